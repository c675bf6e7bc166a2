r"""Padded <-> packed: gather the kept tokens of a padded batch, and put them back among zeros.

Forward, which the public `pack` calls, and backward, which the public `unpack` calls:

    packing_fwd    y[t] = x.reshape(batch * seqlen, ...)[indices[t]]
    packing_bwd    y.reshape(batch * seqlen, ...)[indices[t]] = x[t],  0 everywhere else

Each is the other's derivative: dx of `pack` is `unpack(dy)`, and dx of `unpack` is `pack(dy)`. Nothing is
computed, so every element is exact. The value of a slot that is not kept reaches neither the output nor a
gradient.

Source: Zhai et al. 2023, "ByteTransformer", sec. III-B (the padding-free layout).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.runtime import dispatch

DTYPES = (*checks.FLOATS, torch.int64, torch.int32, torch.bool)


def pack_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`pack` in plain PyTorch, differentiable by autograd."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[indices]


def unpack_ref(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """`unpack` in plain PyTorch, differentiable by autograd."""
    padded = x.new_zeros(batch * seqlen, *x.shape[1:])
    return padded.index_put((indices,), x).reshape(batch, seqlen, *x.shape[1:])


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op("fastbert::packing_fwd", mutates_args=())
def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    """Packed (total, inner) from padded (rows, inner)."""
    _check_rows(x)
    _check_indices(indices, x, x.shape[0])
    return dispatch.call("packing_fwd", x, x, indices)


@packing_fwd.register_fake
def _(x, indices):
    return x.new_empty((indices.shape[0], x.shape[1]))


@torch.library.custom_op("fastbert::packing_bwd", mutates_args=())
def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Padded (rows, inner) from packed (total, inner); zeros in rows without an index."""
    _check_rows(x)
    if rows < 0:
        raise ValueError(f"rows: expected an integer >= 0, got {rows}")
    _check_indices(indices, x, rows)
    checks.shape("x", x, (indices.shape[0], x.shape[1]))
    return dispatch.call("packing_bwd", x, x, indices, rows)


@packing_bwd.register_fake
def _(x, indices, rows):
    return x.new_empty((rows, x.shape[1]))


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _pack_setup_context(ctx, inputs, output):
    x, indices = inputs
    ctx.save_for_backward(indices)
    ctx.rows = x.shape[0]


def _unpack_setup_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


class PackFunction(torch.autograd.Function):
    """Eager autograd around the backend's launcher; its backward is `unpack`, so it differentiates twice."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        _pack_setup_context(ctx, inputs, None)
        return dispatch.call("packing_fwd", inputs[0], *inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return UnpackFunction.apply(dy.contiguous(), ctx.saved_tensors[0], ctx.rows), None


class UnpackFunction(torch.autograd.Function):
    """Eager autograd around the backend's launcher; its backward is `pack`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _unpack_setup_context(ctx, inputs, None)
        return dispatch.call("packing_bwd", inputs[0], *inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return PackFunction.apply(dy.contiguous(), ctx.saved_tensors[0]), None, None


packing_fwd.register_autograd(
    lambda ctx, dy: (packing_bwd(dy.contiguous(), ctx.saved_tensors[0], ctx.rows), None),
    setup_context=_pack_setup_context,
)
packing_bwd.register_autograd(
    lambda ctx, dy: (packing_fwd(dy.contiguous(), ctx.saved_tensors[0]), None, None),
    setup_context=_unpack_setup_context,
)


# --- public functions ---------------------------------------------------------------------------------------


def pack(x: Tensor, indices: Tensor) -> Tensor:
    """The kept tokens of a padded batch, one after another.

    Args:
        x: (batch, seqlen, ...), floating point, int64, int32 or bool.
        indices: (total,) int64, strictly increasing positions in [0, batch * seqlen), on `x`'s device. The
            values are checked on the CPU only: on another device the check would wait for it. There our
            kernels neither read nor write at an index out of range: its row is NaN (the least integer, or
            False), `unpack` leaves it out, and the next call raises an IndexError that names the index.

    Returns:
        (total, ...).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    _check_tensor("x", x)
    if x.dim() < 2:
        raise ValueError(f"x: expected shape (batch, seqlen, ...), got {tuple(x.shape)}")
    rows, inner = x.shape[0] * x.shape[1], x.shape[2:]
    if derivatives.plain_torch():
        return pack_ref(x, indices)
    _check_indices(indices, x, rows)
    flat = _flat(x, rows, inner)
    if torch.compiler.is_compiling():
        y = packing_fwd(flat, indices)
    elif torch.is_grad_enabled() and x.requires_grad:
        y = PackFunction.apply(flat, indices)
    else:
        y = dispatch.call("packing_fwd", flat, flat, indices)
    return y.view(indices.shape[0], *inner)


def unpack(x: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Packed tokens at their padded places, and zeros everywhere else.

    Args:
        x: (total, ...), floating point, int64, int32 or bool.
        indices: the indices passed to `pack`.
        batch, seqlen: sizes of the padded batch.

    Returns:
        (batch, seqlen, ...).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    _check_tensor("x", x)
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool) or size < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {size!r}")
    rows = batch * seqlen
    if derivatives.plain_torch():
        return unpack_ref(x, indices, batch, seqlen)
    _check_indices(indices, x, rows)
    if x.dim() < 1 or x.shape[0] != indices.shape[0]:
        raise ValueError(
            f"x: expected shape ({indices.shape[0]}, ...), one row per index, got {tuple(x.shape)}"
        )
    inner = x.shape[1:]
    flat = _flat(x, x.shape[0], inner)
    if torch.compiler.is_compiling():
        y = packing_bwd(flat, indices, rows)
    elif torch.is_grad_enabled() and x.requires_grad:
        y = UnpackFunction.apply(flat, indices, rows)
    else:
        y = dispatch.call("packing_bwd", flat, flat, indices, rows)
    return y.view(batch, seqlen, *inner)


def _check_tensor(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
    if t.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name}: expected one of {names}, got {t.dtype}")


def _check_rows(x: Tensor) -> None:
    """`x` must be as the custom ops take it: 2-D, with the elements of a row side by side."""
    _check_tensor("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: expected shape (rows, inner), got {tuple(x.shape)}")
    checks.operand("x", x, x.shape, DTYPES, x, strided=True)


def _check_indices(indices: Tensor, x: Tensor, rows: int) -> None:
    checks.int_tensor("indices", indices, x)
    if indices.dtype != torch.int64:
        raise TypeError(f"indices: expected int64, got {indices.dtype}")
    if indices.dim() != 1:
        raise ValueError(f"indices: expected shape (total,), got {tuple(indices.shape)}")
    checks.ids_in_range("indices", "position", indices, rows, "a padded batch of batch * seqlen")
    if checks.has_values(indices) and not torch.compiler.is_compiling():
        falls = (indices[1:] <= indices[:-1]).nonzero()
        if falls.numel():
            at = int(falls[0])
            raise ValueError(
                f"indices: expected strictly increasing positions, got {indices[at].item()} before "
                f"{indices[at + 1].item()} at {at}"
            )


def _flat(x: Tensor, rows: int, inner) -> Tensor:
    """The 2-D view (rows, inner elements), copied where the inner elements have gaps."""
    x = x.reshape(rows, math.prod(inner))
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
