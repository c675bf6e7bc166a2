r"""Losses between the attention of a student and of its teacher, without a map in memory.

With P = softmax(S), S = scale · q kᵀ + bias, of the teacher (t) and of the student (s), with one bias, and
with o(q, k, x)_i = Σ_j P_ij x_j and lse as attention's kernels return them, row i has

    KL(P_t ‖ P_s)_i = scale_t q_t·o(q_t, k_t, k_t) - scale_s q_s·o(q_t, k_t, k_s) + lse_s - lse_t
    dq_s = g scale_s (o(q_s, k_s, k_s) - o(q_t, k_t, k_s))
    dk_s = scale_s (P_sᵀ - P_tᵀ) (g q_s)               two gradients of values, for dout = g q_s

The squared distance of raw scores, D = q kᵀ - q' k'ᵀ with the scales in q and q', needs only Gram matrices:

    ‖D‖² = ⟨qᵀq, kᵀk⟩ - 2 ⟨q'ᵀq, k'ᵀk⟩ + ⟨q'ᵀq', k'ᵀk'⟩
    dq = 2 (q (kᵀk) - q' (k'ᵀk)),  dk = 2 (k (qᵀq) - k' (q'ᵀq))

which take time in proportion to n, not n². They are summed in float64, because the difference of large terms
loses digits. For short texts, under a mask, and on a GPU, whose float64 may be slow, D itself is computed, a
block of rows at a time, with dq = 2 D k and dk = 2 Dᵀ q in the same pass.

Half precision is computed in float32: the divergence is a small difference of larger numbers. Each loss is a
scalar in float32 (float64 for a float64 student), with a gradient for the student's tensors only. Tokens
without an allowed key, and rows past cu_seqlens[-1], have no divergence. In float32 the rounding error of a
row's divergence is about 4 eps of its largest score.

Source: Wang et al. 2020, "MiniLM", sec. 3.1 and 3.2; Wang et al. 2021, "MiniLMv2", sec. 3; Jiao et al. 2020,
"TinyBERT", eq. 7 (scores before softmax). The identities follow from the definition of softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fastbert.analysis.identities import Probabilities
from fastbert.layers.batch import PackedBatch
from fastbert.ops import checks, derivatives
from fastbert.ops.attention_grid import grid_mask, to_grid
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE

# Gram matrices from this many tokens per column of a head; measured on a CPU (2 cores).
GRAM_FROM = 6
# Devices whose float64 is fast, and where the host knows the lengths: each sequence is computed by itself.
_APART = ("cpu",)
# Scores computed at a time, in elements.
_BLOCK = {"cpu": 2**20, "cuda": 2**26}


def attention_kl(
    student_q: Tensor, student_k: Tensor, teacher_q: Tensor, teacher_k: Tensor, batch: PackedBatch
) -> Tensor:
    """Mean over tokens and heads of KL(teacher's attention ‖ student's attention), in nats.

    Args:
        student_q, student_k: (total, nheads, headdim), packed, before the scale headdim ** -0.5.
        teacher_q, teacher_k: (total, nheads, teacher's headdim): as many heads, of any size.
        batch: where the sequences are; `bias` and `causal` count for both maps. Windows are not looked at.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    given = _checked(
        batch, student_q=student_q, student_k=student_k, teacher_q=teacher_q, teacher_k=teacher_k
    )
    return _divergence(*given, batch)


def relation_kl(student: Tensor, teacher: Tensor, batch: PackedBatch, heads: int | None = None) -> Tensor:
    """Mean over tokens and heads of KL(teacher's relation ‖ student's), with relation softmax(x xᵀ / √d).

    Args:
        student, teacher: x: queries, keys, values or hidden states, (total, nheads, d) or (total, width).
        batch: as in `attention_kl`.
        heads: relation heads that split all columns of x anew; None leaves the heads of x, one for (total,
            width).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    s, t = _relation_heads("student", student, heads), _relation_heads("teacher", teacher, heads)
    s, t = _checked(batch, student=s, teacher=t)
    return _divergence(s, s, t, t, batch)


def score_mse(
    student_q: Tensor, student_k: Tensor, teacher_q: Tensor, teacher_k: Tensor, batch: PackedBatch
) -> Tensor:
    """Mean over heads and pairs of tokens of one sequence of the squared difference of their raw scores.

    Raw scores are q kᵀ headdim ** -0.5. All pairs of all sequences count alike, without those that a bias of
    -inf (or the smallest number of its dtype) or `causal` forbids; another bias cancels. 0 without pairs.

    Args:
        student_q, student_k, teacher_q, teacher_k, batch: as in `attention_kl`.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    given = _checked(
        batch, student_q=student_q, student_k=student_k, teacher_q=teacher_q, teacher_k=teacher_k
    )
    loss, cells = given[0].new_zeros(()), torch.zeros((), dtype=torch.int64, device=student_q.device)
    with torch.autocast(student_q.device.type, enabled=False):
        for grids, allowed, pairs in _groups(given, batch):
            loss = loss + _SquaredDistance.apply(*grids, allowed)
            cells = cells + pairs * student_q.shape[1]
    return loss / cells.clamp(min=1)


def _divergence(*given: Any) -> Tensor:
    """`_AttentionKL` in the tensors' own dtype."""
    with torch.autocast(given[0].device.type, enabled=False):
        return _AttentionKL.apply(*given)


class _AttentionKL(torch.autograd.Function):
    """The divergence from its identity, and gradients from attention's own forward and backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        student_q, student_k, teacher_q, teacher_k, batch = given
        student = Probabilities.of(student_q, student_k, batch)
        teacher = Probabilities.of(teacher_q, teacher_k, batch)
        seen = teacher.of_values(student.k)
        own = teacher.scale * (teacher.q * teacher.keys).sum(-1)
        found = (own - student.scale * (student.q * seen).sum(-1)) + (student.lse - teacher.lse)
        found = found.masked_fill(teacher.lse.isneginf(), 0.0)  # no allowed key
        count = (batch.cu_seqlens[-1] * student_q.shape[1]).clamp(min=1)
        if any(ctx.needs_input_grad[:2]):
            ctx.student, ctx.teacher, ctx.count = student, teacher, count
            # the inputs lead a second derivative to its error
            ctx.save_for_backward(student.keys - seen, student_q, student_k)
        return found.sum() / count

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        student, teacher, dq, dk = ctx.student, ctx.teacher, None, None
        factor = dloss * student.scale / ctx.count
        if ctx.needs_input_grad[0]:
            dq = factor * ctx.saved_tensors[0]
        if ctx.needs_input_grad[1]:
            dout = factor * student.q
            dk = student.received(dout) - teacher.received(dout)
        return dq, dk, None, None, None


class _SquaredDistance(torch.autograd.Function):
    """Σ (q kᵀ - q' k'ᵀ)² over the allowed pairs, with the scales; forward computes the gradients too."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, teacher_q, teacher_k, allowed = given  # (batch, nheads, S, headdim)
        scale = q.shape[-1] ** -0.5
        args = q * scale, k, teacher_q * teacher_q.shape[-1] ** -0.5, teacher_k
        few = q.shape[2] < GRAM_FROM * max(q.shape[3], teacher_q.shape[3])
        if few or allowed is not None or q.device.type not in _APART:
            loss, dq, dk = _by_blocks(*args, allowed)
        else:
            loss, dq, dk = _by_grams(*args)
        ctx.save_for_backward(2 * scale * dq, 2 * dk, q, k)
        return loss

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:
        dq, dk = ctx.saved_tensors[:2]
        return dloss * dq, dloss * dk, None, None, None


def _by_grams(q: Tensor, k: Tensor, teacher_q: Tensor, teacher_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(‖D‖², D k, Dᵀ q)."""
    dtype = q.dtype
    q, k, teacher_q, teacher_k = (t.double() for t in (q, k, teacher_q, teacher_k))
    of_q, of_k = q.mT @ q, k.mT @ k
    crossed_q, crossed_k = teacher_q.mT @ q, teacher_k.mT @ k
    crossed = (crossed_q * crossed_k).sum()
    teachers = ((teacher_q.mT @ teacher_q) * (teacher_k.mT @ teacher_k)).sum()
    loss = ((of_q * of_k).sum() - crossed) + (teachers - crossed)
    dq, dk = q @ of_k - teacher_q @ crossed_k, k @ of_q - teacher_k @ crossed_q
    return loss.to(dtype), dq.to(dtype), dk.to(dtype)


def _by_blocks(
    q: Tensor, k: Tensor, teacher_q: Tensor, teacher_k: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(‖D‖², D k, Dᵀ q), with D computed for some rows at a time."""
    batch, heads, seqlen, _ = q.shape
    loss, dq, dk = q.new_zeros(()), torch.empty_like(q), torch.zeros_like(k)
    size = max(1, _BLOCK.get(q.device.type, 2**22) // max(1, batch * heads * seqlen))
    for start in range(0, seqlen, size):
        rows = slice(start, start + size)
        apart = q[:, :, rows] @ k.mT - teacher_q[:, :, rows] @ teacher_k.mT
        if allowed is not None:
            apart.masked_fill_(~allowed[:, :, rows], 0.0)
        loss += apart.square().sum()
        dq[:, :, rows] = apart @ k
        dk += apart.mT @ q[:, :, rows]
    return loss, dq, dk


def _groups(tensors: list[Tensor], batch: PackedBatch) -> Iterator[tuple[list[Tensor], Tensor | None, Any]]:
    """(the tensors as (batch, nheads, S, columns), zeros past each length; which pairs count; how many).

    On a CPU each sequence is a group, so nothing is padded. On a GPU the whole batch is one, so that the host
    does not wait for the lengths.
    """
    ends, bias = batch.cu_seqlens, batch.bias
    if tensors[0].device.type not in _APART:
        grids = [to_grid(t, ends, batch.max_seqlen).transpose(1, 2) for t in tensors]
        yield grids, *_allowed(ends, batch.max_seqlen, bias, batch.causal)
        return
    lengths = ends.diff().tolist()
    split = [t[: sum(lengths)].split(lengths) for t in tensors]
    for i, length in enumerate(lengths):
        own = bias if bias is None or bias.shape[0] == 1 else bias[i : i + 1]
        grids = [parts[i].transpose(0, 1)[None] for parts in split]
        yield grids, *_allowed(ends[i : i + 2] - ends[i], length, own, batch.causal)


def _allowed(ends: Tensor, seqlen: int, bias: Tensor | None, causal: bool) -> tuple[Tensor | None, Tensor]:
    """(the pairs that count, (batch, 1 or nheads, S, S) bool or None for all; their number per head)."""
    if bias is None and not causal:
        return None, ends.diff().long().square().sum()
    allowed = grid_mask(ends, ends.shape[0] - 1, seqlen, CAUSAL if causal else EVERYWHERE, ends.device)
    if bias is not None:
        allowed = allowed & (bias > torch.finfo(bias.dtype).min)[..., :seqlen, :seqlen]
    return allowed, allowed.sum() / allowed.shape[1]


def _relation_heads(name: str, x: Tensor, heads: int | None) -> Tensor:
    """(total, heads, columns)."""
    checks.float_tensor(name, x)
    if x.dim() not in (2, 3):
        raise ValueError(f"{name}: expected shape (total, nheads, d) or (total, width), got {tuple(x.shape)}")
    if heads is None:
        return x if x.dim() == 3 else x[:, None]
    width = x[0].numel() if x.shape[0] else x.shape[1:].numel()
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise ValueError(f"heads: expected a divisor of {name}'s {width} columns, got {heads!r}")
    return x.reshape(x.shape[0], heads, width // heads)


def _checked(batch: PackedBatch, **given: Tensor) -> list[Tensor]:
    """The tensors in the dtype that computes, the teacher's without a gradient."""
    first_name, first = next(iter(given.items()))
    for name, t in given.items():
        checks.float_tensor(name, t, first if isinstance(first, Tensor) else None)
        same = given[name.replace("_k", "_q")] if name.endswith("_k") else t
        wanted = (*first.shape[:2], *same.shape[2:])
        if t.dim() != 3 or tuple(t.shape) != wanted:
            expected = (
                f"({', '.join(map(str, wanted))})" if name != first_name else "(total, nheads, headdim)"
            )
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(t.shape)}")
    checks.lengths(batch.cu_seqlens, first.shape[0], first_name)
    if batch.relative is not None:
        raise ValueError("batch: scores of distances are the model's own; maps with them are not compared")
    compute = checks.compute_dtype(first)
    return [(t.detach() if name.startswith("teacher") else t).to(compute) for name, t in given.items()]
