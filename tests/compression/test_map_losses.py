"""Losses between attention: dense maps in float64, the error rule, masks, memory, bad inputs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fastbert.compression.distillation import map_losses
from fastbert.compression.distillation.map_losses import attention_kl, relation_kl, score_mse
from fastbert.layers.batch import PackedBatch
from fastbert.ops.attention_relative import RelativeScores
from fastbert.testing.error_rule import compare
from tests.support.inputs import ends_of, name
from tests.support.ops import HALF, Largest

LENGTHS = [1, 7, 0, 30, 2, 19]
HEADS = 3
sizes = pytest.mark.parametrize("size", [(4, 16), (16, 16), (16, 5)], ids=str)
masked = pytest.mark.parametrize("bias", [None, "shared", "keys", "per sequence", "per head"])
causally = pytest.mark.parametrize("causal", [False, True])


def given(size, lengths=LENGTHS, dtype=torch.float64, seed=0, heads=HEADS, scale=1.0):
    """The student's queries and keys, which need a gradient, and the teacher's."""
    g = torch.Generator().manual_seed(seed)
    found = [scale * torch.randn(sum(lengths), heads, s, generator=g) for s in (*size[:1] * 2, *size[1:] * 2)]
    return [t.to(dtype).requires_grad_(i < 2) for i, t in enumerate(found)]


def batch_of(lengths=LENGTHS, bias=None, causal=False, dtype=torch.float64):
    """A batch whose bias forbids a third of the pairs, never a token itself."""
    longest, g = max(lengths), torch.Generator().manual_seed(5)
    shape = {
        "shared": (1, 1, longest, longest),
        "keys": (len(lengths), 1, 1, longest),
        "per sequence": (len(lengths), 1, longest, longest),
        "per head": (len(lengths), HEADS, longest, longest),
    }.get(bias)
    if shape is not None:
        bias = torch.randn(shape, generator=g, dtype=dtype)
        forbidden = torch.rand(shape, generator=g) < 1 / 3
        bias[forbidden & (~torch.eye(longest, dtype=torch.bool) if shape[2] > 1 else True)] = -math.inf
        bias[..., 0] = bias[..., 0].nan_to_num(neginf=0.5)  # every token sees the first one
    return PackedBatch(ends_of(lengths), longest, bias=bias, causal=causal)


def dense(student_q, student_k, teacher_q, teacher_k, batch):
    """(mean divergence of the maps, mean squared distance of the scores), from maps of each sequence."""
    divergence, squared, cells = 0.0, 0.0, 0
    for i, (first, last) in enumerate(itertools.pairwise(batch.cu_seqlens.tolist())):
        own = []
        for q, k in ((student_q, student_k), (teacher_q, teacher_k)):
            q, k = q[first:last].transpose(0, 1), k[first:last].transpose(0, 1)
            scores = (q @ k.mT) * q.shape[-1] ** -0.5
            own.append(scores if scores.dtype == torch.float64 else scores.float())
        raw, length = own[0] - own[1], last - first
        allowed = torch.ones(length, length, dtype=torch.bool)
        if batch.causal:
            allowed = allowed.tril()
        if batch.bias is not None:
            bias = batch.bias[i if batch.bias.shape[0] > 1 else 0].expand(-1, batch.max_seqlen, -1)
            bias = bias[:, :length, :length]
            own, allowed = [each + bias for each in own], allowed & (bias > -math.inf)
        allowed = allowed.expand_as(raw)
        log_s, log_t = (each.masked_fill(~allowed, -math.inf).log_softmax(-1) for each in own)
        terms = log_t.exp() * torch.where(allowed, log_t - log_s, 0.0)
        divergence, cells = divergence + terms.sum(), cells + allowed.sum()
        squared = squared + raw[allowed].square().sum()
    return divergence / (student_q.shape[0] * student_q.shape[1]), squared / cells


def gradients(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(loss, tensors[:2])]


def assert_near(found, expected, tensors, tolerance=1e-10):
    for a, e in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=tolerance)


# --- the maths ----------------------------------------------------------------------------------------------


@sizes
@masked
@causally
def test_divergence_of_maps(size, bias, causal):
    tensors, batch = given(size), batch_of(bias=bias, causal=causal)
    assert_near(attention_kl(*tensors, batch), dense(*tensors, batch)[0], tensors)


@sizes
@masked
@causally
@pytest.mark.parametrize("path", ["blocks", "small blocks", "grams", "whole"])
def test_distance_of_scores(size, bias, causal, path, monkeypatch):
    monkeypatch.setattr(map_losses, "GRAM_FROM", 0 if path in ("grams", "whole") else 1000)
    monkeypatch.setattr(map_losses, "_BLOCK", {"cpu": 250 if path == "small blocks" else 2**20})
    monkeypatch.setattr(map_losses, "_APART", () if path == "whole" else ("cpu",))  # as on a GPU
    tensors, batch = given(size), batch_of(bias=bias, causal=causal)
    assert_near(score_mse(*tensors, batch), dense(*tensors, batch)[1], tensors)
    if bias is not None:  # transformers' masks have the least number of their dtype
        least = replace(batch, bias=batch.bias.float().clamp(min=torch.finfo(torch.float32).min))
        assert torch.equal(score_mse(*tensors, least), score_mse(*tensors, batch))


def test_gram_matrices_serve_long_texts_without_a_mask(noted):
    seen = noted(map_losses, "_by_grams", lambda q, *_: q.shape[2])
    few, many = 6 * 4 - 1, 6 * 4
    for causal in (False, True):
        score_mse(*given((4, 3), [few, many]), batch_of([few, many], causal=causal))
    assert seen == [many]


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
def test_gradcheck(loss):
    q, k, *teacher = given((3, 4), [4, 2])
    assert torch.autograd.gradcheck(lambda q, k: loss(q, k, *teacher, batch_of([4, 2])), (q, k))


@pytest.mark.parametrize("heads", [None, 1, 2, 6])
@pytest.mark.parametrize("widths", [(12, 24), (24, 12), (12, 12)])
@causally
def test_relations(heads, widths, causal):
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(sum(LENGTHS), HEADS, w // HEADS, generator=g, dtype=torch.float64) for w in widths)
    batch = batch_of(causal=causal)
    split = HEADS if heads is None else heads
    s, t = x.reshape(len(x), split, -1).requires_grad_(), y.reshape(len(y), split, -1)
    expected = dense(s, s, t, t, batch)[0]
    (grad,) = torch.autograd.grad(expected, s)
    for flat in [False] if heads is None else [False, True]:
        student = (x.flatten(1) if flat else x).clone().requires_grad_()
        found = relation_kl(student, y.flatten(1) if flat else y, batch, heads)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)
        found = torch.autograd.grad(found, student)[0].reshape(grad.shape)
        torch.testing.assert_close(found, grad, rtol=0, atol=1e-10)
    if heads == 1:  # as of rows without heads
        torch.testing.assert_close(relation_kl(x.flatten(1), y.flatten(1), batch), expected.detach())


# --- what the losses promise --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("loss", [attention_kl, score_mse])
@pytest.mark.parametrize("gram_from", [0, 1000])
def test_the_teacher_itself_has_no_loss_and_no_gradient(loss, dtype, gram_from, monkeypatch):
    monkeypatch.setattr(map_losses, "GRAM_FROM", gram_from)
    student = given((16, 16), dtype=dtype)[:2]
    for found in gradients(loss(*student, *(t.detach() for t in student), batch_of()), student):
        assert not found.any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=name)
@pytest.mark.parametrize("loss", ["attention_kl", "score_mse", "score_mse of grams"])
@pytest.mark.parametrize("near", [1.0, 0.1])
def test_error_is_no_larger_than_that_of_dense_maps(loss, dtype, near, monkeypatch):
    """Of the losses and gradients of many draws: one loss is near the truth by chance."""
    monkeypatch.setattr(map_losses, "GRAM_FROM", 0 if loss.endswith("grams") else 1000)
    found, eager, truth, which = ([], []), ([], []), ([], []), int(loss != "attention_kl")
    for seed in range(12):
        tensors = given((32, 32), [64, 20], dtype, seed, scale=1.5)
        for i in range(2):
            tensors[i + 2] = (tensors[i].detach().float() + near * tensors[i + 2].float()).to(dtype)
        ours = [attention_kl, score_mse][which]
        for (values, grads), function, kind in (
            (found, ours, dtype),
            (eager, lambda *args: dense(*args)[which], dtype),
            (truth, lambda *args: dense(*args)[which], torch.float64),
        ):
            own = [t.detach().to(kind).requires_grad_(t.requires_grad) for t in tensors]
            value, *both = gradients(function(*own, batch_of([64, 20])), own)
            values.append(value)
            grads += both
    eps = torch.finfo(torch.float32).eps
    largest = max(t.detach().float().norm(dim=-1).max().item() for t in tensors)
    # the conditioning floor of attention, of which each row's divergence is a difference, over its scores
    floors = 4 * eps * (1 + largest**2 * 32**-0.5), 4 * eps * largest * (1 + largest**2 * 32**-0.5) / 84
    for i, floor in enumerate(floors):
        stacked = [torch.stack(each[i]) for each in (found, eager, truth)]
        assert compare(*stacked, dtype if i else torch.float32, floor)[-1] == ""


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
def test_only_the_student_learns_in_its_own_dtype(loss):
    tensors = [t.detach().bfloat16().requires_grad_() for t in given((4, 4))]
    found = loss(*tensors, batch_of())
    found.backward()
    assert found.dtype == torch.float32
    assert [None if t.grad is None else t.grad.dtype for t in tensors] == [torch.bfloat16] * 2 + [None] * 2


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
def test_autocast_changes_nothing(loss):
    tensors = given((8, 8), dtype=torch.float32)
    expected = gradients(loss(*tensors, batch_of()), tensors)
    with torch.autocast("cpu", torch.bfloat16):
        for a, e in zip(gradients(loss(*tensors, batch_of()), tensors), expected, strict=True):
            assert torch.equal(a, e)


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
def test_a_second_derivative_is_refused(loss):
    tensors = given((4, 4))
    grad = torch.autograd.grad(loss(*tensors, batch_of()), tensors[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="are differentiated once"):
        grad.square().sum().backward()


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
@pytest.mark.parametrize("asked", [0, 1])
def test_a_gradient_of_one_alone(loss, asked):
    tensors = given((4, 4))
    expected = torch.autograd.grad(loss(*tensors, batch_of()), tensors[:2])[asked]
    tensors[1 - asked] = tensors[1 - asked].detach()
    assert torch.equal(torch.autograd.grad(loss(*tensors, batch_of()), tensors[asked])[0], expected)


@pytest.mark.parametrize("loss", [0, 1])
def test_rows_past_the_last_sequence_count_nothing(loss):
    tensors, batch = given((4, 6)), batch_of()
    longer = [torch.cat([t.detach(), torch.full_like(t[:5], 3.0)]).requires_grad_() for t in tensors]
    found = [attention_kl, score_mse][loss](*longer, batch)
    expected = gradients(dense(*tensors, batch)[loss], tensors)
    for a, e in zip(gradients(found, longer), expected, strict=True):
        torch.testing.assert_close(a[: len(tensors[0])] if a.dim() else a, e, rtol=0, atol=1e-10)
        assert a.dim() == 0 or not a[len(tensors[0]) :].any()


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
def test_tokens_without_an_allowed_key_and_batches_without_tokens(loss):
    tensors = given((4, 4), [3, 2])
    batch = batch_of([3, 2])
    bias = torch.zeros(2, 1, 3, 3, dtype=torch.float64)
    bias[0] = -math.inf
    found = gradients(loss(*tensors, PackedBatch(batch.cu_seqlens, 3, bias=bias)), tensors)
    second = [t[3:].detach().requires_grad_() for t in tensors]
    alone = gradients(loss(*second, batch_of([2])), second)
    share = 2 / 5 if loss is attention_kl else 1.0
    torch.testing.assert_close(found[0], share * alone[0])
    assert not found[1][:3].any()
    empty = given((4, 4), [0])
    assert not any(t.any() for t in gradients(loss(*empty, batch_of([0])), empty))


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
@pytest.mark.parametrize("gram_from", [0, 1000])
@causally
def test_no_map_exists(loss, gram_from, causal, monkeypatch):
    """Of 300 tokens, maps have 270,000 elements. A causal mask alone has one per pair, without heads."""
    monkeypatch.setattr(map_losses, "GRAM_FROM", gram_from)
    monkeypatch.setattr(map_losses, "_BLOCK", {"cpu": 50_000})
    tensors, batch = given((8, 16), [300]), batch_of([300], causal=causal)
    with Largest() as largest:
        loss(*tensors, batch).backward()
    assert largest.shape.numel() <= 90_000


# --- bad inputs ---------------------------------------------------------------------------------------------

Q, K, TQ, TK = (t.detach() for t in given((4, 6)))
DISTANCES = RelativeScores(torch.zeros(59, dtype=torch.int32), bias=torch.zeros(HEADS, 1))


@pytest.mark.parametrize("loss", [attention_kl, score_mse])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"student_q": Q[0]}, ValueError, r"student_q: expected shape \(total, nheads, headdim\)"),
        ({"student_k": K[:5]}, ValueError, r"student_k: expected shape \(59, 3, 4\), got \(5, 3, 4\)"),
        ({"student_k": K[..., :3]}, ValueError, r"student_k: expected shape \(59, 3, 4\), got \(59, 3, 3\)"),
        ({"teacher_q": TQ[:, :2]}, ValueError, r"teacher_q: expected shape \(59, 3, 6\), got \(59, 2, 6\)"),
        ({"teacher_k": TK[..., :4]}, ValueError, r"teacher_k: expected shape \(59, 3, 6\), got \(59, 3, 4\)"),
        ({"teacher_k": None}, TypeError, "teacher_k: expected a torch.Tensor, got NoneType"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_inputs(loss, change, error, message):
    named = {"student_q": Q, "student_k": K, "teacher_q": TQ, "teacher_k": TK}
    with pytest.raises(error, match=message):
        loss(**{**named, **change}, batch=batch_of())


def test_bad_relation_heads_and_batch():
    for heads in (5, 0, 2.0):
        with pytest.raises(ValueError, match="heads: expected a divisor of student's 12 columns"):
            relation_kl(Q, TQ, batch_of(), heads)
    with pytest.raises(ValueError, match=r"student: expected shape .*, got \(12,\)"):
        relation_kl(Q[0].flatten(), TQ, batch_of())
    with pytest.raises(ValueError, match="cu_seqlens: expected to end within the 59 rows of student_q"):
        score_mse(Q, K, TQ, TK, batch_of([60]))
    relative = PackedBatch(ends_of(LENGTHS), 30, relative=DISTANCES)
    with pytest.raises(ValueError, match="batch: scores of distances"):
        attention_kl(Q, K, TQ, TK, relative)
