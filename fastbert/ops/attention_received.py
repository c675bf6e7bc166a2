r"""How much attention each token receives, over all queries of its sequence and all heads. No gradient.

For each sequence and token j, with P as in fastbert/ops/attention.py, without bias, window and dropout:

    received_j = Σ_h Σ_i P_hij = Σ_h Σ_i exp(softmax_scale q_hi · k_hj - lse_hi)

P is computed again from the lse of `attention`; nothing of size seqlen² is kept. A query whose lse is -inf
sees nothing, and gives nothing. The tokens of a sequence of n tokens receive n · nheads in all. Rows at and
past cu_seqlens[-1] are not read; their result is 0. k may have fewer heads than q, as in `attention`.

Computed in float32 (float64 for float64). Nothing is added atomically, so results are the same in each run.

Source: Goyal et al. 2020, "PoWER-BERT: Accelerating BERT Inference via Progressive Word-vector Elimination",
sec. 3.2 (significance scores).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention_checks import check_lengths, check_qkv, checked_scale
from fastbert.ops.attention_grid import from_grid, to_grid
from fastbert.runtime import dispatch


class AttentionReceivedInputs(NamedTuple):
    """The arguments of `attention_received` as a backend takes them: checked, rows of heads contiguous."""

    q: Tensor
    k: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    lse: Tensor
    softmax_scale: float


def attention_received_ref(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    lse: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Plain PyTorch on a dense (batch, nheads, S, S) grid; the host waits for no device.

    Arguments as in `attention_received`. Computes in float64 for float64 `q`, else in float32.
    """
    compute = checks.compute_dtype(q)
    grids = [to_grid(t.to(compute), cu_seqlens, max_seqlen).transpose(1, 2) for t in (q, k)]
    queries, keys = grids[0], grids[1].repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = to_grid(lse.t().to(compute), cu_seqlens, max_seqlen).transpose(1, 2)
    real = torch.arange(max_seqlen, device=q.device) < cu_seqlens.diff()[:, None]
    sees = ~lse.isneginf() & real[:, None]
    scores = queries @ keys.mT * softmax_scale
    probs = (scores - lse.masked_fill(~sees, 0).unsqueeze(-1)).exp().masked_fill(~sees.unsqueeze(-1), 0)
    return from_grid(probs.sum((1, 2)), cu_seqlens, q.shape[0])


# --- custom op: what torch.compile sees ---------------------------------------------------------------------


@torch.library.custom_op("fastbert::attention_received_fwd", mutates_args=())
def attention_received_fwd(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, max_seqlen: int, lse: Tensor, softmax_scale: float
) -> Tensor:
    """(total,) float32 (float64 for float64), contiguous; arguments as in `attention_received`."""
    check_qkv(q, k, k, cu_seqlens)
    for name, t in (("q", q), ("k", k)):
        checks.operand(name, t, q.shape if name == "q" else k.shape, checks.FLOATS, q, strided=True)
    check_lengths(cu_seqlens, max_seqlen, q)
    checks.operand("lse", lse, (q.shape[1], q.shape[0]), (checks.compute_dtype(q),), q)
    inputs = AttentionReceivedInputs(q, k, cu_seqlens, max_seqlen, lse, softmax_scale)
    return dispatch.call("attention_received_fwd", q, inputs)


@attention_received_fwd.register_fake
def _(q, k, cu_seqlens, max_seqlen, lse, softmax_scale):
    return q.new_empty(q.shape[0], dtype=checks.compute_dtype(q))


# --- public function ----------------------------------------------------------------------------------------


def attention_received(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    lse: Tensor,
    *,
    softmax_scale: float | None = None,
) -> Tensor:
    """The sum of each token's attention probabilities, over the queries of its sequence and all heads.

    Under autocast q and k are cast as `attention` casts them.

    Args:
        q: (total, nheads, headdim), float32, bfloat16, float16 or float64.
        k: (total, kv_heads, headdim) in q's dtype; kv_heads divides nheads.
        cu_seqlens, max_seqlen: as in `ops.attention.attention`, packed layout.
        lse: (nheads, total), as `attention` returns it for these q and k without bias and window: float32,
            float64 for float64.
        softmax_scale: that of `attention`; headdim ** -0.5 by default.

    Returns:
        (total,) float32, float64 for float64; 0 from row cu_seqlens[-1] on.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.

    Source: Goyal et al. 2020, sec. 3.2.
    """
    checks.float_tensor("q", q)
    checks.float_tensor("k", k, q)
    cast = checks.autocast_dtype(q)
    if cast is not None:
        q, k = (t if t.dtype == torch.float64 else t.to(cast) for t in (q, k))
    checks.typed("cu_seqlens", cu_seqlens, torch.int32)
    check_qkv(q, k, k, cu_seqlens)
    check_lengths(cu_seqlens, max_seqlen, q)
    checks.float_tensor("lse", lse, q)
    if lse.dtype != checks.compute_dtype(q):
        raise TypeError(f"lse: expected {checks.compute_dtype(q)} for {q.dtype} q, got {lse.dtype}")
    checks.shape("lse", lse, (q.shape[1], q.shape[0]))
    scale = checked_scale(softmax_scale, q.shape[-1])
    checks.inference_only("attention_received", (q, k, lse), ", or detach it")
    q, k = (t if t.stride(-1) == 1 and t.stride(0) >= t.shape[-1] else t.contiguous() for t in (q, k))
    inputs = AttentionReceivedInputs(q, k, cu_seqlens, max_seqlen, lse.contiguous(), scale)
    if torch.compiler.is_compiling():
        return attention_received_fwd(*inputs)
    return dispatch.call("attention_received_fwd", q, inputs)
