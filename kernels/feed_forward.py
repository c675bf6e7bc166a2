"""The gradient between the two products of a feed-forward block, in the epilogue of the second one's.

Math       g = (dy @ down_weight) * act'(pre);  dbias = Σ_rows g
Tiling     As kernels/linear.py, with the columns of the inner layer as columns and those of dy as depth. The
           weight is read as it lies: its rows are the depth.
Precision  float32 accumulators, slopes and sums; g is rounded once, at its store. The product itself, which
           PyTorch would round first, is never in memory: that saves writing it and reading it again.
Sums       Each tile stores the sums of its columns over its rows; they are added in a fixed order. On
           capability 9 a product with ones makes them, of g as it is stored: 2.6 instructions per element
           instead of 7.4, most of those moves between lanes. (For capability 10 Triton 3.9 makes a kernel
           that only traps.)
Transport  As kernels/linear.py. By TMA pre comes in the layout of the accumulators; through pointers they
           are brought into the layout of pre, at 32 bits per element instead of 16.
Source     Hendrycks and Gimpel 2016, Gaussian Error Linear Units; Vaswani et al. 2017, sec. 3.3.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert.kernels import activation as activation_kernels
from fastbert.kernels import linear, tuning
from fastbert.kernels.activation import slope
from fastbert.kernels.column_sums import SIZES, _sum_partials_kernel
from fastbert.kernels.launch import MOST_REGISTERS, launch
from fastbert.kernels.linear_forward import _halves, _load_depth, _store, _tile_at


@triton.jit
def _times_slope(
    acc, pre, g, sums_ptr,
    row_start, col_start, n_rows,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr,
    DTYPE: tl.constexpr, EXACT: tl.constexpr, SUM_BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    """Finish and store `acc` = [BLOCK_M, SPLIT * part], part by part; `sums_ptr`: this row tile's sums."""
    if SPLIT > 1:
        left, right = _halves(acc)
        HALF: tl.constexpr = acc.shape[1] // 2
        _times_slope(
            *(left, pre, g),
            sums_ptr,
            *(row_start, col_start, n_rows, INNER, ACTIVATION, SPLIT // 2, TMA, DTYPE, EXACT, SUM_BY_PRODUCT),
        )
        col_start += HALF
        _times_slope(
            *(right, pre, g),
            sums_ptr,
            *(row_start, col_start, n_rows, INNER, ACTIVATION, SPLIT // 2, TMA, DTYPE, EXACT, SUM_BY_PRODUCT),
        )
    else:
        rows = row_start + tl.arange(0, acc.shape[0])
        cols = col_start + tl.arange(0, acc.shape[1])
        mask = (rows < n_rows)[:, None] & (cols < INNER)[None, :]
        at = rows.to(tl.int64)[:, None] * INNER + cols[None, :]
        if TMA:
            z = pre.load([row_start, col_start]).to(tl.float32)
        else:
            z = tl.load(pre + at, mask=mask, other=0.0).to(tl.float32)
        # DTYPE is a value here, whatever its letters say to a linter
        HALF_PRECISION: tl.constexpr = DTYPE != tl.float32  # noqa: SIM300
        few = DTYPE == tl.bfloat16  # noqa: SIM300
        acc *= slope(z, ACTIVATION, FEW_DIGITS=few, CHEAP=HALF_PRECISION and not EXACT)
        _store(g, row_start, col_start, at, acc, mask, TMA, DTYPE)
        if sums_ptr is not None and SUM_BY_PRODUCT:
            # [1, 0, 0, …]ᵀ [1, 1, 1, …] @ g: its first row
            line = tl.arange(0, 64)[:, None]
            ones = tl.where(line + tl.zeros((64, acc.shape[0]), tl.int32) == 0, 1.0, 0.0).to(DTYPE)
            sums = tl.dot(ones, acc.to(DTYPE), input_precision="ieee")
            sums_at = sums_ptr + tl.zeros((64, 1), tl.int32) + cols[None, :]
            tl.store(sums_at, sums, mask=(line == 0) & (cols < INNER)[None, :])
        elif sums_ptr is not None:
            if not TMA:  # which has zeros in the rows after the last one
                acc = tl.where(mask, acc, 0.0)
            tl.store(sums_ptr + cols, tl.sum(acc, 0), mask=cols < INNER)


@triton.jit(do_not_specialize=("n_rows",))
def _feed_forward_bwd_kernel(
    dy, weight, pre, g, partials_ptr, dy_stride, weight_stride, n_rows,
    OUT: tl.constexpr, INNER: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr,
    TMA: tl.constexpr, EXACT: tl.constexpr, SUM_BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    """With TMA `dy`, `weight`, `pre` and `g` are descriptors, else pointers.

    `partials` = [row tiles, INNER].
    """
    DTYPE: tl.constexpr = dy.dtype if TMA else dy.dtype.element_ty
    COL_TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    row_tiles = tl.cdiv(n_rows, BLOCK_M)
    for tile in tl.range(tl.program_id(0), row_tiles * COL_TILES, tl.num_programs(0), flatten=TMA):
        row_tile, col_tile = _tile_at(tile, row_tiles, COL_TILES, GROUP_M)
        row_start, col_start = row_tile * BLOCK_M, col_tile * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if TMA:
            for k in range(0, OUT, BLOCK_K):
                dy_tile = dy.load([row_start, k])  # [BLOCK_M, BLOCK_K]
                weight_tile = weight.load([k, col_start])  # [BLOCK_K, BLOCK_N]
                acc = tl.dot(dy_tile, weight_tile, acc, input_precision="ieee")
        else:
            rows = tl.minimum(row_start + tl.arange(0, BLOCK_M), n_rows - 1).to(tl.int64)
            cols = tl.minimum(col_start + tl.arange(0, BLOCK_N), INNER - 1)
            ks = tl.arange(0, BLOCK_K)
            WHOLE: tl.constexpr = OUT % BLOCK_K == 0
            dy_at = dy + rows[:, None] * dy_stride + ks[None, :]
            weight_at = weight + ks.to(tl.int64)[:, None] * weight_stride + cols[None, :]
            for k in range(0, OUT, BLOCK_K):
                inside = ks < OUT - k
                dy_tile = _load_depth(dy_at + k, inside[None, :], WHOLE)  # [BLOCK_M, BLOCK_K]
                weight_row = weight_at + tl.cast(k, tl.int64) * weight_stride
                weight_tile = _load_depth(weight_row, inside[:, None], WHOLE)  # [BLOCK_K, BLOCK_N]
                acc = tl.dot(dy_tile, weight_tile, acc, input_precision="ieee")
        sums_ptr = None
        if partials_ptr is not None:
            sums_ptr = partials_ptr + row_tile.to(tl.int64) * INNER
        _times_slope(
            *(acc, pre, g),
            sums_ptr,  # a tuple cannot hold a None that is no argument of the kernel
            *(row_start, col_start, n_rows, INNER, ACTIVATION, SPLIT, TMA, DTYPE, EXACT, SUM_BY_PRODUCT),
        )


# --- launchers ----------------------------------------------------------------------------------------------


def inner_gradient(
    dy: Tensor, down_weight: Tensor, pre: Tensor, activation: str, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """(g, dbias) as in "Math"; dbias is empty where not needed.

    Args:
        dy: (rows, out).
        down_weight: (out, inner), of `dy`'s dtype, its rows as they lie in memory.
        pre: (rows, inner), contiguous: the input of the activation.
        activation: a name of fastbert.ops.activation.
        need_dbias: whether the column sums are wanted.
    """
    rows, inner = pre.shape
    device = tuning.device_of(dy.device)
    aligned = linear.fits_tensor_map(dy, down_weight, pre) and inner * dy.element_size() % 16 == 0
    config = config_for(linear.counted(rows), dy.shape[1], inner, activation, dy.dtype, aligned, device)
    return inner_gradient_with(config, dy, down_weight, pre, activation, need_dbias)


def heuristic(
    rows: int, inner: int, dtype: torch.dtype, aligned: bool, device: tuning.Device
) -> linear.Config:
    """The config of `linear`'s heuristic; in float32 its smallest tiles.

    The larger tiles spill there, on sm_80 and sm_120, where the depth is no multiple of a tile's.
    """
    if dtype == torch.float32:
        return linear.ladder(dtype, aligned, device.capability)[-1]
    return linear.heuristic(rows, inner, dtype, aligned, device)


def candidates(dtype: torch.dtype, capability: tuple[int, int]) -> tuple[linear.Config, ...]:
    """What a tuner may choose from for aligned matrices: those of `linear` that fit here.

    Those of 256 x 128, which spill on capability 9, do not fit. Training has no use for tiles of 16 rows.
    """
    ladder = linear.ladder(dtype, True, capability)
    if dtype == torch.float32:
        return ladder[-1:]
    return tuple(
        c
        for c in linear.candidates(dtype, capability)
        if c in ladder
        or (c.block_m >= 32 and shared_memory(c, dtype, capability) <= linear.most_shared(capability))
    )


def shared_memory(config: linear.Config, dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """An upper bound of the bytes that a program of `config` takes.

    As in `linear`; on capability 9 and 10 a part of pre and one of g are there beside that.
    """
    more = 2 * config.block_m * config.block_n // config.split if capability[0] in (9, 10) else 0
    return linear.shared_memory(config, dtype, capability) + more * dtype.itemsize


def tuning_key(out_features: int, inner: int, activation: str, dtype: torch.dtype) -> str:
    """The key of this computation in kernels/tuned: "bfloat16 768x3072 gelu"."""
    return f"{str(dtype).removeprefix('torch.')} {out_features}x{inner} {activation}"


@lru_cache(maxsize=16384)
def config_for(
    rows: int,
    out_features: int,
    inner: int,
    activation: str,
    dtype: torch.dtype,
    aligned: bool,
    device: tuning.Device,
) -> linear.Config:
    """The config of the GPU's table, which is for aligned matrices; else the heuristic's."""
    key = tuning_key(out_features, inner, activation, dtype)
    found = (
        tuning.tuned(device, "feed_forward_bwd", key, tuning.bucket(rows), below=False) if aligned else None
    )
    if found is not None:
        return linear.Config(**found)
    return heuristic(max(rows, linear.ROW_UNIT), inner, dtype, aligned, device)


def sums_by_product(config: linear.Config, dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether a product with ones makes the sums of columns; see "Sums". In the interpreter it does too."""
    return config.tma and dtype != torch.float32 and capability[0] in (0, 9)


def inner_gradient_with(
    config: linear.Config,
    dy: Tensor,
    down_weight: Tensor,
    pre: Tensor,
    activation: str,
    need_dbias: bool,
    by_product: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`inner_gradient` with a given config, for the tuner and the tests; TMA needs aligned matrices.

    by_product: a way to sum; None: that of `sums_by_product`.
    """
    rows, inner = pre.shape
    if by_product is None:
        by_product = sums_by_product(config, dy.dtype, tuning.device_of(dy.device).capability)
    g = torch.empty_like(pre)
    # zeros: the sum over no rows
    dbias = dy.new_zeros((inner if need_dbias else 0,))
    if rows == 0:
        return g, dbias
    row_tiles = triton.cdiv(rows, config.block_m)
    partials = dy.new_empty((row_tiles, inner), dtype=torch.float32) if need_dbias else None
    dy_arg, weight_arg, pre_arg, g_arg = dy, down_weight, pre, g
    if config.tma:
        dy_arg = TensorDescriptor.from_tensor(dy, [config.block_m, config.block_k])
        weight_arg = TensorDescriptor.from_tensor(down_weight, [config.block_k, config.block_n])
        part = [config.block_m, config.block_n // config.split]
        pre_arg, g_arg = TensorDescriptor.from_tensor(pre, part), TensorDescriptor.from_tensor(g, part)
    tiles = row_tiles * triton.cdiv(inner, config.block_n)
    programs = min(tiles, tuning.device_of(dy.device).multiprocessors * config.per_multiprocessor)
    launch(
        _feed_forward_bwd_kernel,
        (programs,),
        dy.device,
        dy_arg,
        weight_arg,
        pre_arg,
        g_arg,
        partials,
        dy.stride(0),
        down_weight.stride(0),
        rows,
        OUT=dy.shape[1],
        INNER=inner,
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SPLIT=config.split,
        TMA=config.tma,
        EXACT=activation_kernels.EXACT_GELU,
        SUM_BY_PRODUCT=by_product,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=MOST_REGISTERS,
    )
    if partials is not None:
        launch(
            *(_sum_partials_kernel, (triton.cdiv(inner, 32), 1), dy.device),
            *(partials, dbias, None, None, row_tiles),
            HIDDEN=inner,
            **SIZES,
        )
    return g, dbias
