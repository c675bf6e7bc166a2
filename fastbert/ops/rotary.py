r"""Rotary positions: pairs of columns of each head are rotated by an angle that grows with the position.

Forward, per row t with the position p_t, per head, and per pair i < rotary_dim / 2 with the columns (l, r):

    y_l = x_l cos[p_t, i] - x_r sin[p_t, i]
    y_r = x_r cos[p_t, i] + x_l sin[p_t, i]
    y_c = x_c                                 for the columns c >= rotary_dim

    (l, r) = (i, i + rotary_dim / 2)          rotate-half, as in Llama and ModernBERT
    (l, r) = (2 i, 2 i + 1)                   interleaved, as in the paper and NeoBERT

Backward is the rotation by the negative angle, dx = rotary(dy) with -sin, and so is its own derivative's: the
op is differentiated any number of times. The tables have no gradient.

Computed in float32 (float64 for float64) and rounded once. A row of y depends on nothing else in the batch.

Source: Su et al. 2021, "RoFormer", sec. 3.2; partial rotation: Black et al. 2022, "GPT-NeoX-20B", sec. 2.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.runtime import dispatch


def pairs(x: Tensor, half: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The views (l, r) of the rotated columns of `x`, each (..., half)."""
    if interleaved:
        return x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return x[..., :half], x[..., half : 2 * half]


def rotary_ref(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 `x`, else in float32."""
    if positions is None:
        positions = _counted(x)
    half = cos.shape[1]
    left, right = pairs(x.to(checks.compute_dtype(x)), half, interleaved)
    c, s = cos[positions].unsqueeze(-2), sin[positions].unsqueeze(-2)
    rotated = left * c - right * s, right * c + left * s
    rotated = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), -1)


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op("fastbert::rotary_fwd", mutates_args=())
def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """y, contiguous, from x (total, heads, headdim), whose last dimension alone must be contiguous."""
    _check_operands("x", x, cos, sin, positions)
    return dispatch.call("rotary_fwd", x, x, cos, sin, positions, interleaved)


@torch.library.custom_op("fastbert::rotary_bwd", mutates_args=())
def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """dx, contiguous, from dy: the rotation by the negative angle."""
    _check_operands("dy", dy, cos, sin, positions)
    return dispatch.call("rotary_bwd", dy, dy, cos, sin, positions, interleaved)


def _check_operands(name: str, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Check what `torch.ops` passes on unchanged."""
    if x.dim() != 3:
        raise ValueError(f"{name}: expected shape (total, heads, headdim), got {tuple(x.shape)}")
    _check(name, x, cos, sin, positions)
    checks.operand(name, x, x.shape, checks.FLOATS, x, strided=True)
    for what, table in (("cos", cos), ("sin", sin)):
        checks.operand(what, table, table.shape, (checks.compute_dtype(x),), x)
    checks.operand("positions", positions, x.shape[:1], (torch.int32, torch.int64), x)


def _fake(x, cos, sin, positions, interleaved):
    return x.new_empty(x.shape)


rotary_fwd.register_fake(_fake)
rotary_bwd.register_fake(_fake)


# --- autograd: each direction is the other's derivative -----------------------------------------------------


def _setup_context(ctx, inputs, output):
    _, cos, sin, positions, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin, positions)


class RotaryFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers; `backward` says which direction is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        *rest, ctx.is_backward = args
        _setup_context(ctx, (x, *rest), None)
        return dispatch.call("rotary_bwd" if ctx.is_backward else "rotary_fwd", x, x, *rest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        tables = ctx.saved_tensors
        checks.ids_in_range("positions", "position", tables[2], tables[0].shape[0], "tables")
        dx = RotaryFunction.apply(_strided(dy), *tables, ctx.interleaved, not ctx.is_backward)
        return dx, None, None, None, None, None


def _differentiated_by(other):
    """The backward of a custom op whose derivative is `other`."""

    def backward(ctx, dy):
        return other(_strided(dy), *ctx.saved_tensors, ctx.interleaved), None, None, None, None

    return backward


rotary_fwd.register_autograd(_differentiated_by(rotary_bwd), setup_context=_setup_context)
rotary_bwd.register_autograd(_differentiated_by(rotary_fwd), setup_context=_setup_context)


# --- public function ----------------------------------------------------------------------------------------


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """Rotate the pairs of columns of every head by the angles of the row's position.

    Under autocast `x` keeps its dtype.

    Args:
        x: (total, heads, headdim) of packed sequences, or (batch, seqlen, heads, headdim); float32, bfloat16,
            float16 or float64. May be a strided view, such as the query and key heads of one packed product.
            It is copied where its last dimension has gaps.
        cos: (max_positions, rotary_dim / 2) float32, float64 with float64 `x`: a row per position.
            rotary_dim is at most headdim. It has no gradient.
        sin: as `cos`.
        positions: int32 or int64 in `x`'s shape without its last two dimensions: the position of each row in
            its sequence, in [0, max_positions). None with a 4-D `x` means 0 to seqlen - 1. The values of a
            CPU tensor are checked. On another device the check would wait for it. There our kernel reads no
            memory for a position out of range, and the rotated columns of its row are NaN.
        interleaved: whether the pairs are the columns (2 i, 2 i + 1), not (i, i + rotary_dim / 2).

    Returns:
        A new contiguous tensor of `x`'s shape and dtype.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.

    Source: Su et al. 2021, sec. 3.2.
    """
    positions, shape = _check("x", x, cos, sin, positions), x.shape
    if derivatives.plain_torch():
        return rotary_ref(x, cos, sin, positions, interleaved)
    if len(shape) == 4:
        x = x.reshape(shape[0] * shape[1], *shape[2:])
    tables = cos.contiguous(), sin.contiguous(), positions.reshape(-1).contiguous()
    args = _strided(x), *tables, bool(interleaved)
    if torch.compiler.is_compiling():
        return rotary_fwd(*args).view(shape)
    if torch.is_grad_enabled() and x.requires_grad:
        return RotaryFunction.apply(*args, False).view(shape)
    return dispatch.call("rotary_fwd", x, *args).view(shape)


def _check(name: str, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Tensor:
    """Check all arguments; returns the positions, those that None means if need be."""
    checks.float_tensor(name, x)
    if x.dim() not in (3, 4):
        raise ValueError(
            f"{name}: expected shape (total, heads, headdim) or (batch, seqlen, heads, headdim), "
            f"got {tuple(x.shape)}"
        )
    check_tables(cos, sin, x.shape[-1], name, x)
    if positions is None:
        if x.dim() == 3:
            raise ValueError(f"positions: expected one position per row of a packed {name}, got None")
        if x.shape[1] > cos.shape[0]:
            raise ValueError(f"cos: expected a row for each of {x.shape[1]} positions, got {cos.shape[0]}")
        return _counted(x)
    checks.int_tensor("positions", positions, x)
    checks.shape("positions", positions, x.shape[:-2])
    checks.ids_in_range("positions", "position", positions, cos.shape[0], "tables")
    return positions


def check_tables(cos: Tensor, sin: Tensor, headdim: int, name: str, x: Tensor) -> None:
    """Raise unless the tables rotate heads of `headdim` columns of `x`, which errors call `name`."""
    compute = checks.compute_dtype(x)
    for what, table in (("cos", cos), ("sin", sin)):
        checks.float_tensor(what, table, x)
        if table.dtype != compute:
            raise TypeError(f"{what}: expected {compute} for {x.dtype} {name}, got {table.dtype}")
        if table.dim() != 2 or not 0 < 2 * table.shape[1] <= headdim:
            raise ValueError(
                f"{what}: expected shape (max_positions, rotary_dim / 2) with rotary_dim from 2 to headdim "
                f"{headdim}, got {tuple(table.shape)}"
            )
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{what}: expected a tensor that requires no gradient, got one that does")
    checks.shape("sin", sin, cos.shape)


def _counted(x: Tensor) -> Tensor:
    """Positions 0 to seqlen - 1 of each sequence of a padded `x`, (batch, seqlen)."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)


def _strided(x: Tensor) -> Tensor:
    """`x`, copied where its last dimension has gaps."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
