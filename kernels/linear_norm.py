"""A product of few rows, with the residual sum and the LayerNorm that follow it, for inference.

Math       z = x @ weight.T + bias + residual;  y = (z - mean) * rstd * norm_weight + norm_bias
Tiling     Few rows read the weight and little else, so all multiprocessors must take part in reading it. A
           program multiplies one tile of [BLOCK_M, BLOCK_N] over one of SPLIT_K parts of the depth. It stores
           float32 sums to its own place in `partials` = [SPLIT_K, rows, OUT]; part 0 adds bias and residual.
           Then rows are normalized: their parts are added in the order 0, 1, …, whichever was done first.
Launches   One, if the caller has counters at zero and few sums are left to be normalized: each program counts
           its arrival at its row tile, and the last one there normalizes these rows and sets the counter back
           to zero. No program waits for another. Otherwise a second kernel normalizes, on all
           multiprocessors.
Order      `debug_barrier` (bar.sync) puts the stores of all threads before the one that counts, by an atomic
           add that is acq_rel at the scope of the GPU. Its result reaches the other threads through shared
           memory and a second bar.sync. Both are cumulative, so the last to arrive sees all stores of all
           programs; it reads them with .cg, past L1, which may hold older lines. test_compile.py looks for
           each step in PTX and in machine code.
Precision  float32 accumulators; bias, residual and LayerNorm in float32, formulas of kernels/layer_norm.py;
           one rounding, at the store.
Source     Ba, Kiros, Hinton 2016, Layer Normalization, eq. 4; CUTLASS, "Efficient GEMM", for split-K.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.launch import MOST_REGISTERS, cdiv, launch, next_power_of_2
from fastbert.kernels.layer_norm_forward import centred_rows, row_of, rstd_of
from fastbert.kernels.linear_forward import _add_product

if TYPE_CHECKING:
    from fastbert.ops.linear_norm import LinearNormInputs

# The most rows of one call. With more, a product of large tiles reads less.
MOST_ROWS = 256
# The widest row that one program normalizes: of 4,096 columns and eight parts it spills.
MOST_COLUMNS = 2048


@triton.jit
def _normalize(
    partials_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr,
    first_row, n_rows, eps,
    OUT: tl.constexpr, SPLIT_K: tl.constexpr, NORM_M: tl.constexpr, NORM_N: tl.constexpr,
):  # fmt: skip
    """y of NORM_M rows from `first_row`: the parts added in their order, then LayerNorm."""
    rows = first_row + tl.arange(0, NORM_M)
    cols = tl.arange(0, NORM_N)
    inside = (cols < OUT)[None, :]
    mask = (rows < n_rows)[:, None] & inside
    at = rows.to(tl.int64)[:, None] * OUT + cols[None, :]
    # Loaded before z: of the layouts of two loads Triton keeps the later one's, and the larger must stay.
    norm_weight = row_of(norm_weight_ptr, cols, OUT)
    if norm_bias_ptr is not None:
        norm_bias = row_of(norm_bias_ptr, cols, OUT)
    z = tl.load(partials_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")  # [NORM_M, NORM_N]
    for part in tl.static_range(1, SPLIT_K):
        of_part = partials_ptr + tl.cast(n_rows, tl.int64) * (part * OUT)
        z += tl.load(of_part + at, mask=mask, other=0.0, cache_modifier=".cg")
    _, centred = centred_rows(z, inside, OUT)
    rstd = rstd_of(tl.sum(centred * centred, 1), eps, OUT)
    y = centred * rstd[:, None] * norm_weight
    if norm_bias_ptr is not None:
        y += norm_bias
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("n_rows",))
def _normalize_kernel(
    partials_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr, n_rows, eps,
    OUT: tl.constexpr, SPLIT_K: tl.constexpr, NORM_M: tl.constexpr, NORM_N: tl.constexpr,
):  # fmt: skip
    """The second launch, without counters: NORM_M rows per program."""
    first_row = tl.program_id(0) * NORM_M
    norm = norm_weight_ptr, norm_bias_ptr
    _normalize(partials_ptr, *norm, y_ptr, first_row, n_rows, eps, OUT, SPLIT_K, NORM_M, NORM_N)


@triton.jit(do_not_specialize=("n_rows",))
def _linear_norm_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, partials_ptr, norm_weight_ptr, norm_bias_ptr, y_ptr,
    arrivals_ptr,
    x_stride, weight_stride, residual_stride, n_rows, eps,
    IN: tl.constexpr, OUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr, NORM_M: tl.constexpr, NORM_N: tl.constexpr,
):  # fmt: skip
    """One part of one tile; with `arrivals_ptr` the last program of a row tile also normalizes its rows."""
    STEPS: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    COL_TILES: tl.constexpr = (OUT + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    part = program % SPLIT_K
    col_start = program // SPLIT_K % COL_TILES * BLOCK_N
    row_tile = program // (SPLIT_K * COL_TILES)
    row_start = row_tile * BLOCK_M
    rows = row_start + tl.arange(0, BLOCK_M)
    cols = col_start + tl.arange(0, BLOCK_N)
    operands = x_ptr, weight_ptr, None, x_stride, weight_stride
    first, last = part * STEPS // SPLIT_K * BLOCK_K, (part + 1) * STEPS // SPLIT_K * BLOCK_K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc, _ = _add_product(
        *(acc, acc, operands, row_start, col_start, n_rows, first, last, IN, OUT, False, BLOCK_K, False)
    )
    mask = (rows < n_rows)[:, None] & (cols < OUT)[None, :]
    is_first = part == 0
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=(cols < OUT) & is_first, other=0.0).to(tl.float32)[None, :]
    wide = rows.to(tl.int64)[:, None]
    residual = tl.load(residual_ptr + wide * residual_stride + cols[None, :], mask=mask & is_first, other=0.0)
    acc += residual.to(tl.float32)
    place = tl.cast(part, tl.int64) * n_rows * OUT
    tl.store(partials_ptr + place + wide * OUT + cols[None, :], acc, mask=mask)
    if arrivals_ptr is not None:
        tl.debug_barrier()
        before = tl.atomic_add(arrivals_ptr + row_tile, 1, sem="acq_rel", scope="gpu")
        if before == COL_TILES * SPLIT_K - 1:
            tl.store(arrivals_ptr + row_tile, 0)
            norm = norm_weight_ptr, norm_bias_ptr
            for first_row in range(row_start, tl.minimum(row_start + BLOCK_M, n_rows), NORM_M):
                _normalize(partials_ptr, *norm, y_ptr, first_row, n_rows, eps, OUT, SPLIT_K, NORM_M, NORM_N)


# --- launchers ----------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the kernel runs; a line of kernels/tuned/<gpu>.json.

    Attributes:
        block_m, block_n, block_k: rows, columns and depth of a tile.
        split_k: parts of the depth.
        num_warps, num_stages: Triton's.
    """

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


# (block_m, block_n, num_warps). The product is `mma.sync` on every GPU: it does not limit so few rows.
TILES = ((16, 32, 4), (16, 64, 8), (32, 32, 4), (32, 64, 8), (64, 64, 8))
BLOCK_K = 128
SPLITS = (1, 2, 3, 4, 6, 8)
# In bytes of operands of the busiest multiprocessor, which read 57 kB of them per µs on an H100 (128 and 256
# rows, 768 columns). The last program of a row tile reads its sums when all else is done, and a row's mean
# and variance wait for them: a byte of theirs counts as four. A second launch takes as long as a LayerNorm,
# 3.1 µs.
TAIL = 4
SECOND_LAUNCH = 180_000
# Bytes of shared memory for tiles on their way: what two programs of a GPU with 227 KB may have, and one of a
# GPU with 99 KB. 100 KB in flight per multiprocessor hide a microsecond at 100 GB/s.
ROOM = 96 * 1024


def space(capability: tuple[int, int]) -> tuple[Config, ...]:
    """`TILES` in every number of parts."""
    if capability == (0, 0):
        # Small, so that small tests have several tiles and parts.
        return (Config(16, 32, 32, 3, 4, 2),)
    found = []
    for block_m, block_n, num_warps in TILES:
        stage = (block_m + block_n) * BLOCK_K * 2
        # One stage lies in registers.
        stages = min(6, ROOM // stage + 1)
        found += [Config(block_m, block_n, BLOCK_K, split_k, num_warps, stages) for split_k in SPLITS]
    return tuple(found)


def candidates(in_features: int, capability: tuple[int, int]) -> tuple[Config, ...]:
    """What `heuristic` and a tuner may choose from: of `space` what has no more parts than steps."""
    steps = cdiv(in_features, BLOCK_K)
    return tuple(c for c in space(capability) if c.split_k <= steps or capability == (0, 0))


def heuristic(
    rows: int, in_features: int, out_features: int, one_launch: bool, device: tuning.Device
) -> Config:
    """The config where no table has one: that with the least `work`, counted, not measured."""

    def bytes_of(config: Config) -> int:
        return work(config, rows, in_features, out_features, one_launch, device)

    return min(candidates(in_features, device.capability), key=bytes_of)


def work(
    config: Config, rows: int, in_features: int, out_features: int, one_launch: bool, device: tuning.Device
) -> int:
    """The bytes that the busiest multiprocessor moves.

    Those are the operands of its tiles and then, if there is one launch, the float32 sums of a row tile,
    which its last program reads. With two launches all multiprocessors share these.
    """
    return sum(_work(config, rows, in_features, out_features, one_launch, device))


def _work(
    config: Config, rows: int, in_features: int, out_features: int, one_launch: bool, device: tuning.Device
) -> tuple[int, int]:
    """(the operands, the sums) of `work`."""
    block_m, block_n, _, split_k, *_ = config
    programs = cdiv(rows, block_m) * cdiv(out_features, block_n) * split_k
    depth = cdiv(cdiv(in_features, BLOCK_K), split_k) * BLOCK_K
    operands = (block_m + block_n) * depth * 2
    sums = 4 * split_k * out_features
    tail = sums * min(rows, block_m) if one_launch else sums * cdiv(rows, device.multiprocessors)
    return cdiv(programs, device.multiprocessors) * operands, tail


@lru_cache(maxsize=4096)
def in_one_launch(rows_bucket: int, in_features: int, out_features: int, device: tuning.Device) -> bool:
    """Whether a call with counters takes one launch, by a count: not where many sums are left to the end."""
    rows, sizes = 2**rows_bucket, (in_features, out_features)
    best = {one: heuristic(rows, *sizes, one, device) for one in (True, False)}
    (operands, tail), two = (_work(best[one], rows, *sizes, one, device) for one in (True, False))
    return operands + TAIL * tail <= sum(two) + SECOND_LAUNCH


def tuning_key(in_features: int, out_features: int, one_launch: bool, dtype: torch.dtype) -> str:
    """The key of this computation in kernels/tuned: "bfloat16 3072x768" or "… two_launches"."""
    words = [str(dtype).removeprefix("torch."), f"{in_features}x{out_features}"]
    return " ".join(words if one_launch else [*words, "two_launches"])


@lru_cache(maxsize=4096)
def config_for(
    rows_bucket: int,
    in_features: int,
    out_features: int,
    one_launch: bool,
    dtype: torch.dtype,
    device: tuning.Device,
) -> Config:
    """The config of the GPU's table, else the heuristic's.

    For few buckets of rows: many lengths must not compile many kernels.
    """
    key = tuning_key(in_features, out_features, one_launch, dtype)
    found = tuning.tuned(device, "linear_norm", key, rows_bucket)
    if found is not None:
        return Config(**found)
    return heuristic(2**rows_bucket, in_features, out_features, one_launch, device)


@cache
def norm_tile(config: Config, out_features: int) -> tuple[int, int]:
    """(NORM_M, NORM_N) for the last program of a row tile: at most the whole tile.

    A thread has 128 elements of all parts, which are loaded together: with 256 it spills. Of one part 64.
    """
    norm_n = max(16, next_power_of_2(out_features))
    elements = min(64, 128 // next_power_of_2(config.split_k))
    return max(1, min(config.block_m, elements * 32 * config.num_warps // norm_n)), norm_n


def takes(rows: int, out_features: int) -> bool:
    """Whether the kernels here have such a call."""
    return rows <= MOST_ROWS and out_features <= MOST_COLUMNS


def linear_norm_fwd(inputs: LinearNormInputs) -> Tensor:
    """The contract of `fastbert.ops.linear_norm.linear_norm_fwd`, where `takes` holds."""
    x, device = inputs.x, tuning.device_of(inputs.x.device)
    sizes = tuning.bucket(x.shape[0]), x.shape[1], inputs.weight.shape[0]
    one_launch = inputs.arrivals is not None and in_one_launch(*sizes, device)
    if not one_launch:
        inputs = inputs._replace(arrivals=None)
    return linear_norm_fwd_with(config_for(*sizes, one_launch, x.dtype, device), inputs)


def linear_norm_fwd_with(config: Config, inputs: LinearNormInputs) -> Tensor:
    """`linear_norm_fwd` with a given config, for the tuner and the tests."""
    x, weight, bias, residual, norm_weight, norm_bias, eps, arrivals = inputs
    rows, out_features = x.shape[0], weight.shape[0]
    y = x.new_empty((rows, out_features))
    if rows == 0:
        return y
    partials = x.new_empty((config.split_k, rows, out_features), dtype=torch.float32)
    norm_m, norm_n = norm_tile(config, out_features)
    tiles = cdiv(rows, config.block_m) * cdiv(out_features, config.block_n)
    launch(
        _linear_norm_kernel,
        (tiles * config.split_k,),
        x.device,
        x,
        weight,
        bias,
        residual,
        partials,
        norm_weight,
        norm_bias,
        y,
        arrivals,
        x.stride(0),
        weight.stride(0),
        residual.stride(0),
        rows,
        eps,
        IN=x.shape[1],
        OUT=out_features,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        NORM_M=norm_m,
        NORM_N=norm_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=MOST_REGISTERS,
    )
    if arrivals is None:
        # 32 elements per thread, as in kernels/layer_norm.py
        norm_m = max(1, 1024 // norm_n)
        launch(
            _normalize_kernel,
            (cdiv(rows, norm_m),),
            x.device,
            partials,
            norm_weight,
            norm_bias,
            y,
            rows,
            eps,
            OUT=out_features,
            SPLIT_K=config.split_k,
            NORM_M=norm_m,
            NORM_N=norm_n,
            num_warps=max(1, norm_n // 1024),
        )
    return y
