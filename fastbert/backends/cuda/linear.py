"""`linear` by the `cuda` backend: csrc/cuda/linear.cu; contract in fastbert/ops/linear.py.

A call goes to the next backend where the kernels cannot read it in 16 bytes: where a start or a row's stride
lies on none, or `in` is no multiple of 8, backward also `dy`'s columns. float32 has no kernels.

Where mma.sync has half of the tensor cores' rate (compute capability 9.0 to 11.x), backward's products are
PyTorch's, and forward calls with many rows go to the next backend, except those that `hopper_product` takes.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from fastbert.backends.aten import linear as plain
from fastbert.backends.cuda import device
from fastbert.backends.extension import DTYPE_CODES
from fastbert.ops.activation import CODES, GATE_CODES
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved, backward_of, forward_of
from fastbert.runtime import dispatch
from fastbert.runtime.loader import address
from fastbert.runtime.streams import on

DTYPES = (torch.bfloat16, torch.float16)

# enum Layout of csrc/cuda/linear.h
FORWARD, INPUTS, WEIGHTS = range(3)
# elements of 16 bytes
_CHUNK = 8
# blocks of the pass over dy per multiprocessor
_PASS_BLOCKS = 4
# kManyRows of csrc/cuda/linear.h
_MANY_ROWS = 512


def _wants_exact_gelu() -> bool:
    wanted = os.environ.get("FASTBERT_EXACT_GELU", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"FASTBERT_EXACT_GELU: expected 0, 1 or nothing, got {wanted!r}")
    return wanted == "1"


# As in kernels/activation.py, which needs Triton.
EXACT_GELU = _wants_exact_gelu()


def _row_stride(m: Tensor) -> int:
    """Elements between two rows; the stride of a single row may be anything."""
    return m.stride(0) if m.shape[0] > 1 else m.shape[1]


def in_chunks(*matrices: Tensor) -> bool:
    """Whether starts, rows and columns lie on 16 bytes."""
    return all(
        address(m) % 16 == 0 and _row_stride(m) % _CHUNK == 0 and m.shape[1] % _CHUNK == 0 for m in matrices
    )


@functools.lru_cache(maxsize=1024)
def _plan(
    extension, layout: int, rows: int, columns: int, depth: int, multiprocessors: int
) -> tuple[int, int]:
    """(rows of a tile, parts of the depth); kept, because the search takes as long as a launch."""
    return extension.cuda_linear_plan(layout, rows, columns, depth, multiprocessors)


def product(
    layout: int,
    sizes: tuple[int, int, int],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    save: bool = False,
    slope_at: Tensor | None = None,
    sums: Tensor | None = None,
    plan: tuple[int, int] | None = None,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(c, pre) of (rows, columns); see csrc/cuda/linear.h. `plan`: (rows of a tile, parts of the depth).

    Gated, `sizes` have b's columns, and c half of them.
    """
    rows, b_columns, depth = sizes
    columns = b_columns if gated is None else b_columns // 2
    extension = device.extension
    if plan is None:
        plan = _plan(extension, layout, *sizes, device.multiprocessors(a.device))
    c = a.new_empty(rows, columns)
    pre = a.new_empty((rows, b_columns) if save and activation is not None else 0)
    options, gate = (CODES[activation], EXACT_GELU), GATE_CODES[gated]
    partial = a.new_empty(
        extension.cuda_linear_partial(rows, columns, plan[1], *options, gate), dtype=torch.float32
    )
    with on(a.device):
        extension.cuda_linear_product(
            *(DTYPE_CODES[a.dtype], layout, rows, columns, depth),
            *(address(a), _row_stride(a), address(b), _row_stride(b)),
            *(0 if bias is None else address(bias), *options),
            *((0, 0) if residual is None else (address(residual), residual.stride(0))),
            *(0 if slope_at is None else address(slope_at), c.data_ptr(), pre.data_ptr()),
            *(0 if sums is None else sums.data_ptr(), partial.data_ptr(), *plan),
            *(gate, *device.place(a.device)),
        )
    return c, pre


def hopper_serves(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, gated: str | None = None
) -> bool:
    """Whether `hopper_product` takes this call, or `slope_product`, with dy as x.

    x and weight lie in chunks: so do slope_product's columns, which are the weight's.
    """
    columns = weight.shape[0] if gated is None else weight.shape[0] // 2
    return (
        device.extension.cuda_linear_takes_hopper(
            *(x.shape[0], columns, x.shape[1], CODES[activation], EXACT_GELU, GATE_CODES[gated])
        )
        # a tensor map has no rows that overlap
        and all(_row_stride(m) >= m.shape[1] for m in (x, weight))
        and (bias is None or address(bias) % 4 == 0)
        and device.is_hopper(x.device)
    )


def hopper_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    save: bool,
    blocks: int | None = None,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(act(x weightT + bias), the activation's argument where `save`) on compute capability 9.0.

    At most `blocks` blocks take tiles, by default one per multiprocessor. Where the driver refuses a tensor
    map, `product` makes the product.
    """
    rows, b_columns = x.shape[0], weight.shape[0]
    columns = b_columns if gated is None else b_columns // 2
    c = x.new_empty(rows, columns)
    pre = x.new_empty((rows, b_columns) if save else 0)
    with on(x.device):
        served = device.extension.cuda_linear_hopper_product(
            *(DTYPE_CODES[x.dtype], rows, columns, x.shape[1]),
            *(address(x), _row_stride(x), address(weight), _row_stride(weight)),
            *(0 if bias is None else address(bias), CODES[activation], False),
            *(c.data_ptr(), pre.data_ptr() if save else 0),
            *(device.multiprocessors(x.device) if blocks is None else blocks, GATE_CODES[gated]),
            *device.place(x.device),
        )
    if not served:
        sizes = rows, b_columns, x.shape[1]
        return product(FORWARD, sizes, x, weight, bias, activation, save=save, gated=gated)
    return c, pre


def slope_product(
    dy: Tensor,
    weight: Tensor,
    slope_at: Tensor,
    activation: str | None,
    need_sums: bool,
    blocks: int | None = None,
) -> tuple[Tensor, Tensor] | None:
    """(c = (dy weight) act'(slope_at), its column sums) as `hopper_product` makes products.

    None where the driver refuses a tensor map.
    """
    (rows, depth), columns = dy.shape, weight.shape[1]
    c = dy.new_empty(rows, columns)
    # one row per warp of a tile of 128
    sums = dy.new_empty((-(-rows // 128) * 4, columns) if need_sums else 0, dtype=torch.float32)
    with on(dy.device):
        served = device.extension.cuda_linear_slope_product(
            *(DTYPE_CODES[dy.dtype], rows, columns, depth),
            *(address(dy), _row_stride(dy), address(weight), _row_stride(weight)),
            *(CODES[activation], False, address(slope_at), c.data_ptr(), sums.data_ptr()),
            *(device.multiprocessors(dy.device) if blocks is None else blocks, *device.place(dy.device)),
        )
    if not served:
        return None
    return c, add_sums(sums, dy) if need_sums else dy.new_empty(0)


def add_sums(sums: Tensor, like: Tensor) -> Tensor:
    """The sum of the rows of `sums` (parts, columns), in `like`'s dtype."""
    parts, columns = sums.shape
    out = like.new_empty(columns)
    with on(like.device):
        device.extension.cuda_linear_add_sums(
            *(DTYPE_CODES[like.dtype], sums.data_ptr(), parts, columns, out.data_ptr()),
            *device.place(like.device),
        )
    return out


def gradient(
    dy: Tensor,
    pre: TensorOrNone,
    activation: str | None,
    need_g: bool,
    need_dbias: bool,
    gated: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(the gradient at pre, its column sums); the first is dy itself without an activation."""
    rows, columns = dy.shape
    out = columns if gated is None else 2 * columns
    new_g = need_g and activation is not None
    g = dy.new_empty(rows, out) if new_g else dy
    if not (new_g or need_dbias):
        return g, dy.new_empty(0)
    parts = min(rows, _PASS_BLOCKS * device.multiprocessors(dy.device))
    sums = dy.new_empty((parts, out) if need_dbias else 0, dtype=torch.float32)
    with on(dy.device):
        device.extension.cuda_linear_gradient(
            *(DTYPE_CODES[dy.dtype], rows, columns, address(dy)),
            # exact: dy has been rounded already
            *(0 if activation is None else address(pre), CODES[activation], True),
            *(g.data_ptr() if new_g else 0, sums.data_ptr(), parts, GATE_CODES[gated]),
            *device.place(dy.device),
        )
    return g, add_sums(sums, dy) if need_dbias else dy.new_empty(0)


def linear_fwd(inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    return linear_fwd_with(None, inputs, save)


def linear_fwd_with(plan: tuple[int, int] | None, inputs: LinearInputs, save: bool) -> tuple[Tensor, Tensor]:
    """`linear_fwd` with given rows of a tile and parts of the depth, for tests."""
    x, weight, bias, activation, residual, gated, _ = inputs
    taken = in_chunks(x, weight)
    if taken and plan is None and residual is None:
        if hopper_serves(x, weight, bias, activation, gated):
            return hopper_product(x, weight, bias, activation, save, gated=gated)
        taken = activation is not None
    if taken and plan is None and x.shape[0] >= _MANY_ROWS:
        taken = (activation == "gelu" and EXACT_GELU) or not device.has_group_products(x.device)
    if not taken:
        function = forward_of(activation, save, x.shape[0], gated)
        return dispatch.next_function("cuda", function, x.device, x.dtype)(inputs, save)
    sizes = x.shape[0], weight.shape[0], x.shape[1]
    return product(FORWARD, sizes, x, weight, bias, activation, residual, save, plan=plan, gated=gated)


def linear_bwd(dy: Tensor, saved: LinearSaved, need: LinearNeeds) -> tuple[Tensor, Tensor, Tensor]:
    return linear_bwd_with((None, None), dy, saved, need)


def linear_bwd_with(
    plans: tuple[Any, ...], dy: Tensor, saved: LinearSaved, need: LinearNeeds
) -> tuple[Tensor, Tensor, Tensor]:
    """`linear_bwd` with given plans for dx and dweight, for tests."""
    x, weight, pre, activation, gated = saved
    given = [t for t, needed in ((dy, True), (weight, need.dx), (x, need.dweight)) if needed]
    given += [] if activation is None else [pre]
    if dy.shape[0] == 0 or not in_chunks(*given):
        following = dispatch.next_function("cuda", backward_of(activation, gated), dy.device, dy.dtype)
        return following(dy, saved, need)
    g, dbias = gradient(dy, pre, activation, need.dx or need.dweight, need.dbias, gated)
    if plans == (None, None) and (activation is None or device.has_group_products(dy.device)):
        dx, dweight, _ = plain.linear_bwd(g, LinearSaved(x, weight), need._replace(dbias=False))
        return dx, dweight, dbias
    dx = dweight = None
    rows, out = g.shape
    if need.dx:
        sizes = rows, weight.shape[1], out
        dx, _ = product(INPUTS, sizes, g, weight, plan=plans[0])
    if need.dweight:
        sizes = out, x.shape[1], rows
        dweight, _ = product(WEIGHTS, sizes, g, x, plan=plans[1])
    return (
        dy.new_empty(0) if dx is None else dx,
        dy.new_empty(0) if dweight is None else dweight,
        dbias,
    )
