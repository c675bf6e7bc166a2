"""Backward of a product with bias and activation: the activation's gradient and the bias's in one pass.

Math       g = dy * act'(pre);  dbias = Σ_rows g;  dx = g @ weight;  dweight = g.T @ x
Tiling     A program owns BLOCK_N columns and every num_programs-th row tile of them. Its sums of columns are
           partial: registers, then a row of its own, which a second kernel adds in a fixed order.
           Computed in the loads of the two products, g would cost more: a tile of g is loaded
           OUT x IN / BLOCK times, each time as two matrices, and its slope is computed as often. The products
           are PyTorch's: no fusion is left that would save a byte.
Precision  float32 from the load to the store; g and dbias are rounded once.
Saved      pre in storage dtype.
Source     The derivatives: fastbert/ops/activation.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels import tuning
from fastbert.kernels.activation import slope
from fastbert.kernels.column_sums import SIZES, _sum_partials_kernel
from fastbert.kernels.launch import MOST_REGISTERS, PROGRAMS, launch, resident_programs

if TYPE_CHECKING:
    from fastbert.ops.linear import LinearNeeds, LinearSaved


@triton.jit(do_not_specialize=("n_rows",))
def _linear_bwd_kernel(
    dy_ptr, pre_ptr, g_ptr, dbias_ptr, dy_stride, pre_stride, n_rows,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """g in storage dtype for every num_programs-th row tile; its column sums go to this program's row."""
    program = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < OUT
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        g = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            pre = tl.load(pre_ptr + rows[:, None] * pre_stride + cols[None, :], mask=mask, other=0.0)
            DTYPE: tl.constexpr = pre_ptr.dtype.element_ty
            g *= slope(pre.to(tl.float32), ACTIVATION, FEW_DIGITS=DTYPE == tl.bfloat16)  # noqa: SIM300
            if g_ptr is not None:
                tl.store(g_ptr + rows[:, None] * OUT + cols[None, :], g.to(DTYPE), mask=mask)
        dbias += g
    if dbias_ptr is not None:
        tl.store(dbias_ptr + program.to(tl.int64) * OUT + cols, tl.sum(dbias, 0), mask=col_mask)


# --- launchers ----------------------------------------------------------------------------------------------


class Config(NamedTuple):
    """How the pass runs; a line of kernels/tuned/<gpu>.json.

    Attributes:
        block_m, block_n: rows and columns of a tile.
        num_warps: Triton's.
        per_multiprocessor: programs per multiprocessor, where they sum columns.
    """

    block_m: int
    block_n: int
    num_warps: int
    per_multiprocessor: int = PROGRAMS


def heuristic(out_features: int) -> Config:
    """The config where no table has one: 2048 elements per tile, which is 16 for each of 128 threads."""
    block_n = max(16, min(256, triton.next_power_of_2(out_features)))
    return Config(2048 // block_n, block_n, 4)


def candidates(out_features: int) -> tuple[Config, ...]:
    """What a tuner may choose from: other numbers of programs, then tiles of 16 or 32 elements per thread."""
    usual = heuristic(out_features)
    if out_features < 256:
        return (usual,)
    found = [usual, *(usual._replace(per_multiprocessor=n) for n in (2, 4, 6))]
    for block_n, warps, each in ((256, 8, 16), (512, 4, 16), (128, 4, 16), (256, 4, 32), (512, 8, 16)):
        config = Config(32 * warps * each // block_n, block_n, warps)
        found += [config, config._replace(per_multiprocessor=2)]
    return tuple(found)


def tuning_key(out_features: int, activation: str | None, dtype: torch.dtype) -> str:
    """The key of this computation in kernels/tuned: "bfloat16 3072 gelu"."""
    words = [str(dtype).removeprefix("torch."), str(out_features)]
    return " ".join(words + ([activation] if activation else []))


@lru_cache(maxsize=4096)
def config_for(
    rows_bucket: int, out_features: int, activation: str | None, dtype: torch.dtype, device: tuning.Device
) -> Config:
    """The config of the GPU's table, else the heuristic's."""
    key = tuning_key(out_features, activation, dtype)
    found = tuning.tuned(device, "linear_bwd", key, rows_bucket)
    return heuristic(out_features) if found is None else Config(**found)


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias): the contract of `fastbert.ops.linear.linear_bwd`, without gates."""
    g, dbias = _activation_bwd(dy, saved.pre, saved.activation, need.dx or need.dweight, need.dbias)
    return (
        g @ saved.weight if need.dx else dy.new_empty((0,)),
        g.t() @ saved.x if need.dweight else dy.new_empty((0,)),
        dbias,
    )


def _activation_bwd(
    dy: Tensor, pre: Tensor | None, activation: str | None, need_g: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """(g = dy * act'(pre), Σ_rows g). Without an activation g is dy itself; dbias is empty if not needed."""
    rows, out_features = dy.shape
    device = tuning.device_of(dy.device)
    config = config_for(tuning.bucket(rows), out_features, activation, dy.dtype, device)
    return activation_bwd_with(config, dy, pre, activation, need_g, need_dbias)


def activation_bwd_with(
    config: Config,
    dy: Tensor,
    pre: Tensor | None,
    activation: str | None,
    need_g: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """`_activation_bwd` with a given config, for the tuner and the tests."""
    rows, out_features = dy.shape
    new_g = need_g and activation is not None
    g = dy.new_empty((rows, out_features)) if new_g else dy
    # Zeros: the sum over no rows.
    dbias = dy.new_zeros((out_features if need_dbias else 0,))
    if rows == 0 or not (new_g or need_dbias):
        return g, dbias
    block_m, block_n, num_warps, per_multiprocessor = config
    programs, column_blocks = triton.cdiv(rows, block_m), triton.cdiv(out_features, block_n)
    partials = None
    if need_dbias:
        resident = resident_programs(dy.device, per_multiprocessor)
        programs = min(programs, max(1, resident // column_blocks))
        partials = dy.new_empty((programs, out_features), dtype=torch.float32)
    launch(
        _linear_bwd_kernel,
        (programs, column_blocks),
        dy.device,
        dy,
        pre,
        g if new_g else None,
        partials,
        dy.stride(0),
        0 if pre is None else pre.stride(0),
        rows,
        OUT=out_features,
        ACTIVATION=activation,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        maxnreg=MOST_REGISTERS,
    )
    if need_dbias:
        launch(
            *(_sum_partials_kernel, (triton.cdiv(out_features, 32), 1), dy.device),
            *(partials, dbias, None, None, programs),
            HIDDEN=out_features,
            **SIZES,
        )
    return g, dbias
