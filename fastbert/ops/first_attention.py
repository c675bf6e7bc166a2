r"""Attention of one query per sequence, that of its first token. Inference only.

For each sequence with the tokens t, whose rows x_t make the keys and values, and each head with its query q:

    s_t = (Wk x_t) · q scale + bias[0, t]
    p = softmax(s)                            0 where every s_t is -inf
    y = (Σ_t p_t (Wv x_t + bv)) gate

There is no key bias: it adds the same number to every s_t, which does not change softmax. A backend need not
make keys and values: with (Wkᵀ q) · x_t for the first line and Wv (Σ_t p_t x_t) + bv for the last,
both products with a weight run over sequences instead of tokens.

Computed in float32 (float64 for float64) and rounded once. A sequence of length zero has zeros, and so has a
query without an allowed key. Rows at and past cu_seqlens[-1] are not read.

There is no custom op and no autograd here: training and torch.compile make keys and values and call
`attention`, whose first rows have the same values. On a CPU the backends read `cu_seqlens`. On a GPU only
`reference` does, and the public function where `max_seqlen` is None: the host waits there for the device.

Source: Vaswani et al. 2017, sec. 3.2; the products by associativity.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention_checks import check_bias
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF

# Tokens from which two half-precision weights are worth casting to float32: with fewer, `attention` over keys
# and values of all tokens is faster.
CAST_FROM = 64


class FirstAttentionInputs(NamedTuple):
    """The arguments of `first_attention` as a backend takes them: checked, `bias` in four dimensions.

    `max_seqlen` is at least the longest length.
    """

    x: Tensor
    q: Tensor
    key_weight: Tensor
    value_weight: Tensor
    value_bias: Tensor | None
    cu_seqlens: Tensor
    softmax_scale: float
    bias: Tensor | None
    gate: Tensor | None
    max_seqlen: int


def first_attention_ref(
    x: Tensor,
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None,
    cu_seqlens: Tensor,
    softmax_scale: float,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Plain PyTorch with keys and values of all tokens; computes in float64 for float64 `x`, else in float32.

    Arguments as in `first_attention`, `bias` in four dimensions. `max_seqlen` is not needed.
    """
    compute = checks.compute_dtype(x)
    batch, nheads, head_dim = q.shape
    wide = x.to(compute)
    keys = (wide @ key_weight.to(compute).T).unflatten(1, (nheads, head_dim))
    values = wide @ value_weight.to(compute).T
    if value_bias is not None:
        values = values + value_bias.to(compute)
    values = values.unflatten(1, (nheads, head_dim))
    rows = []
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        scores = torch.einsum("hd,thd->ht", q[i].to(compute), keys[start:end]) * softmax_scale
        if bias is not None:
            scores = scores + bias[i if bias.shape[0] > 1 else 0, :, 0, : end - start].to(compute)
        blind = scores.isneginf().all(-1, keepdim=True)
        probs = torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)
        out = torch.einsum("ht,thd->hd", probs, values[start:end])  # zeros where there is no token
        rows.append(out if gate is None else out * gate.to(compute).unsqueeze(1))
    y = torch.stack(rows) if rows else wide.new_zeros(0, nheads, head_dim)
    return y.reshape(batch, nheads * head_dim).to(x.dtype)


# --- public functions ---------------------------------------------------------------------------------------


def pays(x: Tensor, batch: int) -> bool:
    """Whether `first_attention` of `batch` queries is faster on tokens (total, width) than `attention`.

    On a CPU it is where casting the weights is worth it. Elsewhere it may be in half precision: the serving
    backend decides. The host waits for no device, except for a kernel's first self-check.
    """
    if x.device.type == "cpu":
        return x.shape[0] >= CAST_FROM or checks.compute_dtype(x) == x.dtype
    if x.dtype not in HALF:
        return False
    found = dispatch.serving_function("first_attention_pays", ("first_attention",), x.device, x.dtype)
    return found is not None and found(x, batch)


def first_attention(
    x: Tensor,
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Attention of one query per sequence over keys and values made of the sequence's tokens.

    Args:
        x: (total, width), float32, bfloat16, float16 or float64: what keys and values are made of.
        q: (batch, nheads, head_dim) of `x`'s dtype.
        key_weight, value_weight: (nheads * head_dim, width) of `x`'s dtype.
        value_bias: (nheads * head_dim,) of `x`'s dtype, or None.
        cu_seqlens: (batch + 1,) int32 on the same device: 0, then where each sequence ends, never decreasing
            and not beyond `total`. The values of a CPU tensor are checked. On a GPU a check would cost a
            synchronisation, so the caller is responsible for them.
        softmax_scale: factor of the scores.
        bias: added to the scores as in `ops.attention.attention`, (batch or 1, nheads or 1, S or 1, S), or
            without its first dimension; only query 0 is read. S is at least `max_seqlen`, or the longest
            sequence where that is None, or 1.
        gate: (nheads,) factor of each head's output, or None.
        max_seqlen: at least the longest length. With None the host reads the lengths, and waits for a GPU.

    Returns:
        (batch, nheads * head_dim) in `x`'s dtype.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.

    Source: Vaswani et al. 2017, sec. 3.2.
    """
    checks.float_tensor("x", x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"x: expected shape (total, width) with width >= 1, got {tuple(x.shape)}")
    checks.float_tensor("q", q, x)
    checks.same_dtype("q", q, "x", x)
    if q.dim() != 3 or 0 in q.shape[1:]:
        raise ValueError(f"q: expected shape (batch, nheads, head_dim), got {tuple(q.shape)}")
    batch, nheads, head_dim = q.shape
    for name, weight in (("key_weight", key_weight), ("value_weight", value_weight)):
        checks.shape(name, checks.float_tensor(name, weight, x), (nheads * head_dim, x.shape[1]))
    checks.float_tensors(x, value_bias=value_bias)
    checks.shapes((nheads * head_dim,), value_bias=value_bias)
    checks.same_dtypes(x, key_weight=key_weight, value_weight=value_weight, value_bias=value_bias)
    longest = _longest(cu_seqlens, batch, x, max_seqlen)
    if bias is not None:
        checks.float_tensor("bias", bias, x)
        width = bias.shape[-1] if bias.dim() else 0
        added = check_bias(bias, batch, nheads, width, x)
        if width != 1 and width < longest:
            raise ValueError(f"bias: expected {longest} keys or more, or 1, got {tuple(added.shape)}")
        if added.shape[2] == 0 and longest:
            raise ValueError(f"bias: expected a query or more, got {tuple(added.shape)}")
        bias = added
    if gate is not None:
        checks.float_tensor("gate", gate, x)
        checks.shape("gate", gate, (nheads,))
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale: expected a number, got {softmax_scale!r}")
    weights = key_weight, value_weight, value_bias
    inputs = FirstAttentionInputs(x, q, *weights, cu_seqlens, softmax_scale, bias, gate, longest)
    checks.inference_only("first_attention", inputs, ", or use `attention`")
    return dispatch.call("first_attention_fwd", x, inputs)


def _longest(cu_seqlens: Tensor, batch: int, x: Tensor, max_seqlen: int | None) -> int:
    """`max_seqlen`, or the longest length where that is None, having checked both arguments."""
    checks.shape("cu_seqlens", checks.typed("cu_seqlens", cu_seqlens, torch.int32, x), (batch + 1,))
    if max_seqlen is not None:
        if isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int):
            raise TypeError(f"max_seqlen: expected an int or None, got {max_seqlen!r}")
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen: expected >= 0, got {max_seqlen}")
    longest = checks.lengths(cu_seqlens, x.shape[0], "x")
    if max_seqlen is None:
        return int(cu_seqlens.diff().amax()) if longest is None and batch else longest or 0
    if longest is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least the longest length {longest}, got {max_seqlen}")
    return max_seqlen
