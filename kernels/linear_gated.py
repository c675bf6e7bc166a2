"""A product with a gated activation in its epilogue, and the pass over its gradient.

Math       (a, b) = the halves of x @ weight.T + bias;  y = act(a) * b + residual
           da = dy * b * act'(a);  db = dy * act(a);  dbias = Σ_rows (da, db)
           a is the half that is activated: the first, or the second. The kernels get the halves of weight,
           bias and pre as tensors of their own, and know no order of them.
Tiling     As in kernels/linear.py, with tiles of [BLOCK_M, BLOCK_N] of both halves: two accumulators, which
           share each tile of x. BLOCK_N is half of a plain product's, so that they take as many registers and
           as much shared memory. Backward as in kernels/linear_backward.py; its products are PyTorch's.
Precision  As in kernels/linear.py: y is made of the unrounded product, and rounded once.
Saved      pre in storage dtype, where backward will ask for it.
Transport  As in kernels/linear.py; a half is a matrix of its own, so TMA cuts it at its last column.
Files      linear_forward.py: forward's kernel, that of a plain product. Here: backward's, and the launches.
Source     Shazeer 2020, GLU Variants Improve Transformer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fastbert.kernels import activation as activation_kernels
from fastbert.kernels import linear, linear_backward, tuning
from fastbert.kernels.activation import activate, slope
from fastbert.kernels.column_sums import SIZES, _sum_partials_kernel
from fastbert.kernels.launch import MOST_REGISTERS, launch, resident_programs
from fastbert.kernels.linear_forward import _linear_fwd_kernel

if TYPE_CHECKING:
    from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved


@triton.jit(do_not_specialize=("n_rows",))
def _linear_gated_bwd_kernel(
    dy_ptr, a_ptr, b_ptr, da_ptr, db_ptr, a_sums_ptr, b_sums_ptr, dy_stride, pre_stride, n_rows,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """da, db for every num_programs-th row tile; their column sums go to this program's row.

    The rows of da, db and of the sums are 2 * OUT apart.
    """
    program = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < OUT
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    a_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b_sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_M), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < n_rows)[:, None] & col_mask[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        pre_at = rows[:, None] * pre_stride + cols[None, :]
        a = tl.load(a_ptr + pre_at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + pre_at, mask=mask, other=0.0).to(tl.float32)
        few = DTYPE == tl.bfloat16  # noqa: SIM300
        da = dy * b * slope(a, ACTIVATION, FEW_DIGITS=few)
        db = dy * activate(a, ACTIVATION, FEW_DIGITS=few, CHEAP=False)
        if da_ptr is not None:
            at = rows[:, None] * (2 * OUT) + cols[None, :]
            tl.store(da_ptr + at, da.to(DTYPE), mask=mask)
            tl.store(db_ptr + at, db.to(DTYPE), mask=mask)
        a_sums += da
        b_sums += db
    if a_sums_ptr is not None:
        tl.store(a_sums_ptr + program * (2 * OUT) + cols, tl.sum(a_sums, 0), mask=col_mask)
        tl.store(b_sums_ptr + program * (2 * OUT) + cols, tl.sum(b_sums, 0), mask=col_mask)


# --- launchers ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def config_for(
    rows: int, columns: int, dtype: torch.dtype, aligned: bool, device: tuning.Device
) -> linear.Config:
    """The heuristic's config of a plain product of 2 * columns, `halved`."""
    if dtype == torch.float32:
        # Without tensor cores the larger tiles spill on capability 8.0.
        return halved(linear.ladder(dtype, aligned, device.capability)[-1])
    return halved(linear.heuristic(max(rows, linear.ROW_UNIT), 2 * columns, dtype, aligned, device))


def halved(config: linear.Config) -> linear.Config:
    """A plain product's config, with half as many columns of each half."""
    # Through pointers, parts of the accumulators spill on capability 8.0, and the whole does not.
    return config._replace(block_n=config.block_n // 2, split=config.split if config.tma else 1)


def halves(t: Tensor, gated: str) -> tuple[Tensor, Tensor]:
    """(the half of the columns that is activated, the other half): views of `t`."""
    a, b = t.tensor_split(2, dim=-1)
    return (a, b) if gated == "first" else (b, a)


def _none_or_halves(t: Tensor | None, gated: str) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if t is None else halves(t, gated)


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    """(y, pre): the contract of `fastbert.ops.linear.linear_fwd` for gated calls."""
    x, weight = inputs[:2]
    columns = weight.shape[0] // 2
    aligned = linear.fits_tensor_map(x, weight) and columns * x.element_size() % 16 == 0
    device = tuning.device_of(x.device)
    config = config_for(linear.counted(x.shape[0]), columns, x.dtype, aligned, device)
    return linear_fwd_with(config, inputs, save)


def linear_fwd_with(config: linear.Config, inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    """`linear_fwd` with a given config, for the tests; TMA needs aligned matrices."""
    x, weight, bias, activation, residual, gated, _ = inputs
    rows, columns = x.shape[0], weight.shape[0] // 2
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    pre = x.new_empty((rows, 2 * columns) if save else (0,))
    if rows == 0:
        return y, pre
    a_pre, b_pre = _none_or_halves(pre if save else None, gated)
    weights = halves(weight.t(), gated)
    operands: list[Tensor | TensorDescriptor | None] = [x, *(w.t() for w in weights), y, a_pre, b_pre]
    if config.tma:
        part = [config.block_m, config.block_n // config.split]
        depth = config.block_k
        blocks = [config.block_m, depth], *2 * [[config.block_n, depth]], *3 * [part]
        operands = [
            None if t is None else TensorDescriptor.from_tensor(t, block)
            for t, block in zip(operands, blocks, strict=True)
        ]
    tiles = triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)
    programs = min(tiles, tuning.device_of(x.device).multiprocessors * config.per_multiprocessor)
    launch(
        _linear_fwd_kernel,
        (programs,),
        x.device,
        *operands[:3],
        *_none_or_halves(bias, gated),
        residual,
        *operands[3:],
        *(x.stride(0), weight.stride(0), y.stride(0), 0 if residual is None else residual.stride(0), rows),
        IN=x.shape[1],
        OUT=columns,
        ACTIVATION=activation,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SPLIT=config.split,
        TMA=config.tma,
        EXACT=activation_kernels.EXACT_GELU,
        BIAS_FIRST=config.bias_first,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=MOST_REGISTERS,
    )
    return y, pre


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias): the contract of `fastbert.ops.linear.linear_bwd` for gated calls."""
    x, weight, pre, activation, gated = saved
    g, dbias = gate_bwd(dy, pre, activation, need.dx or need.dweight, need.dbias, gated)
    return (
        g @ weight if need.dx else dy.new_empty((0,)),
        g.t() @ x if need.dweight else dy.new_empty((0,)),
        dbias,
    )


def gate_bwd(
    dy: Tensor, pre: Tensor, activation: str | None, need_g: bool, need_dbias: bool, gated: str
) -> tuple[Tensor, Tensor]:
    """(g = the gradient at pre, Σ_rows g), each empty where not needed."""
    rows, columns = dy.shape
    g = dy.new_empty((rows, 2 * columns) if need_g else (0,))
    # Zeros: the sum over no rows.
    dbias = dy.new_zeros((2 * columns if need_dbias else 0,))
    if rows == 0 or not (need_g or need_dbias):
        return g, dbias
    block_m, block_n, num_warps, per_multiprocessor = linear_backward.heuristic(2 * columns)
    block_m = max(1, block_m // 2)
    programs, column_blocks = triton.cdiv(rows, block_m), triton.cdiv(columns, block_n)
    partials = None
    if need_dbias:
        resident = resident_programs(dy.device, per_multiprocessor)
        programs = min(programs, max(1, resident // column_blocks))
        partials = dy.new_empty((programs, 2 * columns), dtype=torch.float32)
    launch(
        _linear_gated_bwd_kernel,
        (programs, column_blocks),
        dy.device,
        dy,
        *halves(pre, gated),
        *_none_or_halves(g if need_g else None, gated),
        *_none_or_halves(partials, gated),
        dy.stride(0),
        pre.stride(0),
        rows,
        OUT=columns,
        ACTIVATION=activation,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
        maxnreg=MOST_REGISTERS,
    )
    if need_dbias:
        launch(
            *(_sum_partials_kernel, (triton.cdiv(2 * columns, 32), 1), dy.device),
            *(partials, dbias, None, None, programs),
            HIDDEN=2 * columns,
            **SIZES,
        )
    return g, dbias
