"""The checks of attention's arguments: those of the public function, and those of its custom ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention_inputs import EVERYWHERE, AttentionInputs, Window


def check_operands(inputs: AttentionInputs) -> None:
    """Check what any caller may pass to `torch.ops`, and the lengths, whose values tracing cannot see."""
    q, k, v, cu_seqlens, max_seqlen, _, _, bias, gate, dropout_p, seed, offset = inputs
    check_qkv(q, k, v, cu_seqlens)
    for name, t in (("q", q), ("k", k), ("v", v)):
        checks.operand(name, t, q.shape if name == "q" else k.shape, checks.FLOATS, q, strided=True)
    check_lengths(cu_seqlens, max_seqlen, q)
    check_bias(bias, cu_seqlens.shape[0] - 1, q.shape[1], max_seqlen, q)
    if bias is not None and bias.dim() != 4:
        raise ValueError(f"bias: expected four dimensions, got {tuple(bias.shape)}")
    if gate is not None:
        checks.float_tensor("gate", gate, q)
        checks.shape("gate", gate, (q.shape[1],))
    checks.dropout(dropout_p, seed, offset, q)


def check_qkv(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """One dtype, one shape but for the number of heads of k and v, the layout that `cu_seqlens` asks for."""
    dims = 4 if cu_seqlens is None else 3
    if q.dim() != dims or q.shape[-1] == 0 or q.shape[-2] == 0:
        layout = (
            "(batch, seqlen, nheads, headdim) where cu_seqlens is None"
            if cu_seqlens is None
            else "(total, nheads, headdim) with cu_seqlens"
        )
        raise ValueError(f"q: expected shape {layout}, nheads and headdim >= 1, got {tuple(q.shape)}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name}: expected q's dtype {q.dtype}, got {t.dtype}")
        wanted = (*q.shape[:-2], *(t if name == "k" else k).shape[-2:-1], q.shape[-1])
        if t.shape != q.shape and t.shape != wanted:
            raise ValueError(f"{name}: expected shape {wanted}, got {tuple(t.shape)}")
    if k.shape[-2] != q.shape[-2] and (k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]):
        raise ValueError(
            f"k: expected a number of heads that divides the {q.shape[-2]} of q, got {k.shape[-2]}"
        )


def check_lengths(cu_seqlens: Tensor | None, max_seqlen: int | None, q: Tensor) -> tuple[Tensor, int]:
    """The two arguments, checked for the packed layout of the rows of `q`; values only on the CPU."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens: expected an int32 torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens: expected int32, got {cu_seqlens.dtype}")
    if cu_seqlens.device != q.device:
        checks.same_device("cu_seqlens", cu_seqlens, q)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, (int, torch.SymInt)):
        raise TypeError(f"max_seqlen: expected an int with the packed layout (3-D q), got {max_seqlen!r}")
    if max_seqlen < 0:
        raise ValueError(f"max_seqlen: expected >= 0, got {max_seqlen}")
    longest = checks.lengths(cu_seqlens, q.shape[0], "q")
    if longest is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least the longest length {longest}, got {max_seqlen}")
    return cu_seqlens, max_seqlen


def checked_scale(softmax_scale: float | None, headdim: int) -> float:
    """`softmax_scale`, by default headdim ** -0.5."""
    if softmax_scale is None:
        return float(headdim) ** -0.5
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float, torch.SymFloat)):
        raise TypeError(f"softmax_scale: expected a finite number, got {softmax_scale!r}")
    if not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale: expected a finite number, got {softmax_scale!r}")
    return float(softmax_scale)


def checked_window(causal: bool, window: Sequence[int] | None, seqlen: int | None = None) -> Window:
    """The window of both arguments. A side that reaches over all of `seqlen` tokens, if given, is -1."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {causal!r}")
    if window is None:
        return Window(right=0) if causal else EVERYWHERE
    if not isinstance(window, tuple) or len(window) != 2 or any(type(side) is not int for side in window):
        raise TypeError(f"window: expected two ints (left, right), got {window!r}")
    if min(window) < -1:
        raise ValueError(f"window: expected sides of at least 0, or -1 for no limit, got {window!r}")
    left, right = window
    right = 0 if causal else right
    if seqlen is not None:
        left, right = (-1 if side > 0 and side >= seqlen - 1 else side for side in (left, right))
    return Window(left, right)


def check_bias(bias: Tensor | None, batch: int, nheads: int, seqlen: int, q: Tensor) -> checks.TensorOrNone:
    """The bias in four dimensions, or None; raise if its shape does not broadcast to the scores."""
    if bias is None:
        return None
    checks.float_tensor("bias", bias, q)
    full = (batch, nheads, seqlen, seqlen)
    if bias.dim() not in (3, 4) or any(
        size not in (1, wanted) for size, wanted in zip(bias.shape, full[-bias.dim() :], strict=True)
    ):
        raise ValueError(
            "bias: expected (nheads, S, S) or (batch, nheads, S, S), each size that of "
            f"{full} or 1, got {tuple(bias.shape)}"
        )
    return bias.unsqueeze(0) if bias.dim() == 3 else bias
