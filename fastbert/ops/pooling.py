r"""Pooling: one vector per packed sequence, from the hidden states of its tokens.

Forward, for sequence i with the tokens t in [cu_seqlens[i], cu_seqlens[i + 1]), in float32 (float64 for
float64):

    mean                  y_i = Σ_t h_t / length
    cls                   y_i = h_t of the first token
    max                   y_i = max_t h_t, element by element; NaN where one of them is
    lasttoken             y_i = h_t of the last token
    mean_sqrt_len_tokens  y_i = Σ_t h_t / sqrt(length)
    weightedmean          y_i = Σ_t w_t h_t / Σ_t w_t, with the weights w = 1, 2, …, length

Backward: dh_t is dy_i times what h_t is multiplied by above, else 0; max, dh_t = dy_i / ties where h_t = y_i,
for as many tokens as share the maximum, else 0.

y is float32 (float64 for float64), because it is normalised or compared next. A sequence of length zero has
zeros. Rows at and past cu_seqlens[-1] are not read; their gradient is 0. A row of y depends on nothing else
in the batch, and repeats are bit-equal.

Source: Reimers and Gurevych 2019, "Sentence-BERT", sec. 3; Muennighoff 2022, "SGPT", sec. 4.1 (weightedmean).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastbert.ops import checks, derivatives
from fastbert.runtime import dispatch

# sentence-transformers' names
MODES = ("mean", "cls", "max", "lasttoken", "mean_sqrt_len_tokens", "weightedmean")


def _weightedmean(tokens: Tensor) -> Tensor:
    weights = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype, device=tokens.device)
    return weights @ tokens / weights.sum()


# Tokens (length, width) of one sequence -> (width,)
_OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda tokens: tokens.mean(0),
    "cls": lambda tokens: tokens[0],
    "max": lambda tokens: tokens.amax(0),
    "lasttoken": lambda tokens: tokens[-1],
    "mean_sqrt_len_tokens": lambda tokens: tokens.sum(0) / len(tokens) ** 0.5,
    "weightedmean": _weightedmean,
}


def pooling_ref(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """Plain PyTorch, differentiable by autograd; computes in float64 for float64 tensors, else in float32."""
    wide = hidden.to(checks.compute_dtype(hidden))
    rows = []
    for start, end in pairwise(cu_seqlens.tolist()):
        tokens = wide[start:end]
        rows.append(tokens.sum(0) if start == end else _OF_ONE[mode](tokens))
    return torch.stack(rows) if rows else wide.new_zeros((0, hidden.shape[1]))


# --- custom ops: what torch.compile sees --------------------------------------------------------------------


@torch.library.custom_op("fastbert::pooling_fwd", mutates_args=())
def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """(batch, width) in float32 (float64 for float64) from (total, width), the last dimension contiguous."""
    return _launch_fwd(hidden, cu_seqlens, mode)


def _check(hidden, cu_seqlens, mode):
    """Check all but the values."""
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r}; expected one of {', '.join(MODES)}")
    checks.float_tensor("hidden", hidden)
    checks.int_tensor("cu_seqlens", cu_seqlens, hidden)
    if hidden.dim() != 2:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)}; expected (total, hidden)")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"cu_seqlens: shape {tuple(cu_seqlens.shape)}; expected (batch + 1,)")


def _launch_fwd(hidden, cu_seqlens, mode):
    """The backend's forward, after the checks; eager, compiled and `torch.ops` all call it here."""
    _check(hidden, cu_seqlens, mode)
    checks.lengths(cu_seqlens, hidden.shape[0], "hidden")
    return dispatch.call("pooling_fwd", hidden, hidden, cu_seqlens, mode)


@pooling_fwd.register_fake
def _(hidden, cu_seqlens, mode):
    return hidden.new_empty((cu_seqlens.shape[0] - 1, hidden.shape[1]), dtype=checks.compute_dtype(hidden))


@torch.library.custom_op("fastbert::pooling_bwd", mutates_args=())
def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    """dhidden, contiguous, in hidden's dtype. Only "max" reads the elements of `hidden` and `y`."""
    return _launch_bwd(dy, hidden, y, cu_seqlens, mode)


def _launch_bwd(dy, hidden, y, cu_seqlens, mode):
    """The backend's backward, after the checks."""
    _check(hidden, cu_seqlens, mode)
    checks.lengths(cu_seqlens, hidden.shape[0], "hidden")
    result = (cu_seqlens.shape[0] - 1, hidden.shape[1])
    for name, t in (("dy", dy), ("y", y)):
        checks.operand(name, t, result, (checks.compute_dtype(hidden),), hidden)
    return dispatch.call("pooling_bwd", hidden, dy, hidden, y, cu_seqlens, mode)


@pooling_bwd.register_fake
def _(dy, hidden, y, cu_seqlens, mode):
    return hidden.new_empty(hidden.shape)


# --- autograd: one setup and one backward for eager and for the compiled op ---------------------------------


def _setup_context(ctx, inputs, output):
    hidden, cu_seqlens, ctx.mode = inputs
    ctx.save_for_backward(hidden, output, cu_seqlens)


def _backward(launch, ctx, dy):
    hidden, y, cu_seqlens = ctx.saved_tensors
    return launch(dy.contiguous(), hidden, y, cu_seqlens, ctx.mode), None, None


class PoolingFunction(torch.autograd.Function):
    """Eager autograd around the backend's launchers, without the cost of a custom op's dispatch."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # a separate setup_context would cost an inspect.signature at every call
        output = _launch_fwd(*inputs)
        _setup_context(ctx, inputs, output)
        return output

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _backward(_launch_bwd, ctx, dy)


pooling_fwd.register_autograd(lambda ctx, dy: _backward(pooling_bwd, ctx, dy), setup_context=_setup_context)


# --- public function ----------------------------------------------------------------------------------------


def pooling(hidden: Tensor, cu_seqlens: Tensor, mode: str = "mean") -> Tensor:
    """One row per packed sequence.

    Args:
        hidden: (total, width), floating point. Rows at and past cu_seqlens[-1] are ignored.
        cu_seqlens: (batch + 1,) int32 or int64 on the same device: 0, then where each sequence ends, never
            decreasing and not beyond `total`. Values on a CPU are checked (under torch.compile when the graph
            runs); those on a GPU are not, because the check would wait for it.
        mode: "mean", "cls" (the first token), "max", "lasttoken", "mean_sqrt_len_tokens" (the sum over the
            square root of the length) or "weightedmean" (later tokens weigh more).

    Returns:
        (batch, width) in float32 (float64 for float64 input); zeros where a sequence has no tokens.

    Raises:
        ValueError: an unknown mode, a wrong shape or device, lengths that leave the rows of `hidden`.
        TypeError: a wrong type or dtype.

    Source: Reimers and Gurevych 2019, "Sentence-BERT", sec. 3.
    """
    _check(hidden, cu_seqlens, mode)
    hidden, cu_seqlens = checks.rows(hidden), cu_seqlens.contiguous()
    args = (hidden, cu_seqlens, mode)
    if torch.compiler.is_compiling():
        return pooling_fwd(*args)
    if torch.is_grad_enabled() and hidden.requires_grad:
        return PoolingFunction.apply(*args)
    return _launch_fwd(*args)
