"""The loss over the vocabulary without logits, and logits that are computed only if read."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.nn import functional as F

from fastbert.models.deferred import DeferredTensor
from fastbert.ops import linear_cross_entropy
from fastbert.ops.cross_entropy import cross_entropy as ops_cross_entropy
from tests.support.model_pairs import CASES, NO_DROPOUT, build, close, inputs_for, labels_for
from tests.support.vocabulary_rows import VocabularyRows

VOCABULARY_TASKS = [
    (n, t)
    for n, t in CASES
    if t == "ForMaskedLM" or (t == "ForPreTraining" and n in ("bert", "albert", "ernie", "mobilebert"))
]


@pytest.mark.parametrize(
    ("name", "task", "chunk_rows"),
    [(*c, rows) for c in VOCABULARY_TASKS for rows in (1000, 5) if rows == 1000 or c[0] == "bert"],
)
def test_training_computes_only_the_labelled_tokens(monkeypatch, name, task, chunk_rows):
    """In chunks; loss and gradients equal those from all logits."""
    monkeypatch.setitem(linear_cross_entropy.CHUNK_BYTES, "cpu", 2 * chunk_rows * 333 * 8)
    _, model = build(name, task, vocab_size=333, **NO_DROPOUT)
    model.double().train()
    inputs = inputs_for(name, task)
    labels = labels_for(model, inputs)
    labelled = int((labels["labels"] != -100).sum())
    assert 0 < labelled < inputs["attention_mask"].sum()
    results, logits = [], []
    weights = {p.shape[0] for p in model.parameters() if p.dim() > 1 and p.shape[1] == 333} - {labelled}
    for asked in (None, True):
        model.zero_grad(set_to_none=True)
        with VocabularyRows(333) as seen:
            output = model(**inputs, **labels, output_logits=asked)
            output.loss.backward()
        rows = [n for n in seen.rows if n not in weights]
        results.append([output.loss, *(p.grad for p in model.parameters() if p.grad is not None)])
        logits.append(output.get("logits", output.get("prediction_logits")))
        if asked:
            assert max(rows) == inputs["input_ids"].numel()
        else:
            assert max(rows) == labelled if chunk_rows > labelled else max(rows) <= 5
    assert isinstance(logits[0], DeferredTensor)
    assert not logits[0].is_computed
    assert torch.equal(logits[0], logits[1])
    assert logits[1].shape == (*inputs["input_ids"].shape, 333)
    for a, e in zip(*results, strict=True):
        close(a, e, 1e-12 + 1e-10 * e.abs().max().item())


@pytest.mark.parametrize("task", ["ForMaskedLM", "ForPreTraining"])
def test_when_logits_are_given(task):
    _, model = build("bert", task, **NO_DROPOUT)
    inputs = inputs_for("bert", task)
    labels = labels_for(model, inputs)
    key = {"ForMaskedLM": "logits", "ForPreTraining": "prediction_logits"}[task]
    others = [] if task == "ForMaskedLM" else ["seq_relationship_logits"]
    losses = []
    for training in (False, True):
        model.train(training)
        for given in ({}, labels):
            for asked in (None, True, False):
                if asked is False and not given:
                    with pytest.raises(ValueError, match="output_logits: False leaves only the loss"):
                        model(**inputs, output_logits=False)
                    continue
                output = model(**inputs, **given, output_logits=asked)
                wanted = asked is not False
                assert list(output) == ["loss"] * bool(given) + [key] * wanted + others
                assert output[key] is not None if wanted else getattr(output, key) is None
                if wanted:
                    deferred = asked is None and training and bool(given)
                    assert isinstance(output[key], DeferredTensor) is deferred
                if given:
                    losses.append(output.loss.item())
                tuples = model(**inputs, **given, output_logits=asked, return_dict=False)
                assert len(tuples) == len(output)
    assert max(losses) - min(losses) < 1e-5
    with pytest.raises(TypeError, match="output_logits: expected True, False or None, got 1"):
        model(**inputs, **labels, output_logits=1)
    if task == "ForPreTraining":  # no loss without both labels
        only = {"labels": labels["labels"]}
        assert model(**inputs, **only).prediction_logits is not None
        with pytest.raises(ValueError, match=r"output_logits: .* none without all labels"):
            model(**inputs, **only, output_logits=False)


def masked_lm(**config):
    """(a masked-LM model in training, a padded batch with labels, its logits computed in forward)."""
    _, model = build("bert", "ForMaskedLM", **{"num_hidden_layers": 1, **NO_DROPOUT, **config})
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(model, inputs)
    return model, inputs, model(**inputs, output_logits=True).logits


def test_deferred_logits_say_what_they_are_without_being_computed():
    model, inputs, expected = masked_lm()
    logits = model(**inputs).logits
    for ask in (
        lambda t: t.shape,
        lambda t: t.dtype,
        lambda t: t.device,
        lambda t: t.ndim,
        lambda t: t.size(-1),
        lambda t: t.dim(),
        lambda t: t.numel(),
        len,
        lambda t: t.requires_grad,
        torch.is_floating_point,
    ):
        assert ask(logits) == ask(expected)
    assert logits.grad_fn is None
    assert isinstance(logits, torch.Tensor)
    assert not logits.is_computed
    tuples = model(**inputs, return_dict=False)
    assert len(tuples) == len(model(**inputs, output_logits=True, return_dict=False)) == 2
    assert not tuples[1].is_computed
    with torch.no_grad():
        assert not model(**inputs).logits.requires_grad


@pytest.mark.sweep
def test_deferred_logits_are_those_of_the_forward_however_they_are_touched():
    model, inputs, expected = masked_lm()
    labels, flat = inputs["labels"], expected.detach().flatten(0, 1)
    for touch in (
        lambda t: t.argmax(-1),
        lambda t: torch.softmax(t, -1),
        lambda t: t[0, 1],
        lambda t: t + 1,
        lambda t: 2 * t,
        lambda t: t.detach().numpy(),
        lambda t: t.tolist(),
        lambda t: torch.cat([t, t]),
        lambda t: torch.stack((t, t), dim=0),
        repr,
        lambda t: pickle.loads(pickle.dumps(t.detach())),
        lambda t: F.cross_entropy(t.flatten(0, 1), labels.flatten()),
        lambda t: t.view(-1, 120)[3],
        lambda t: ops_cross_entropy(t.flatten(0, 1), labels.flatten()),
        lambda t: t.mT,
        lambda t: t.data,
        lambda t: torch.compile(lambda x: x.argmax(-1), backend="eager")(t),
        lambda t: t.is_leaf,
    ):
        for mode in (torch.enable_grad, torch.no_grad):
            deferred = model(**inputs).logits
            with mode():
                a, e = touch(deferred), touch(expected)
            if isinstance(e, torch.Tensor):
                assert type(a) is torch.Tensor
                assert torch.equal(a, e)
                assert a.requires_grad == e.requires_grad
            elif not isinstance(e, (str, bool)):
                assert (torch.as_tensor(a) == torch.as_tensor(e)).all()
            else:
                assert a == e
            assert deferred.is_computed
            assert deferred.computed() is deferred.computed()
    with torch.inference_mode():
        inside = model(**inputs).logits
    assert torch.equal(inside.argmax(-1), flat.argmax(-1).view(labels.shape))


def test_deferred_logits_have_a_gradient():
    model, inputs, expected = masked_lm()
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    expected.mul(weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert "bert.embeddings.word_embeddings.weight" in grads
    model.zero_grad()
    with torch.no_grad():  # the grad mode of forward counts, not that of the first read
        logits = (output := model(**inputs)).logits
        assert not logits.requires_grad
        assert output.logits.argmax(-1).shape == inputs["labels"].shape
    output = model(**inputs)
    with torch.no_grad():
        output.logits.argmax(-1)
    output.logits.mul(weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (name not in grads)
        assert parameter.grad is None or torch.equal(parameter.grad, grads[name]), name


def test_deferred_logits_know_the_autocast_of_the_forward():
    model, inputs, _ = masked_lm()
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model(**inputs), model(**inputs, output_logits=True).logits
    assert output.logits.dtype == expected.dtype == torch.bfloat16
    wide, copied = output.logits.float(), output.logits.clone()
    assert isinstance(wide, DeferredTensor)
    assert isinstance(copied, DeferredTensor)
    assert wide.dtype == torch.float32
    assert not output.logits.is_computed
    assert torch.equal(wide, expected.float())
    assert torch.equal(output.logits, expected)
    assert torch.equal(copied, expected)
    assert copied.computed() is not output.logits.computed()
    assert type(output.logits.clone()) is type(output.logits.float()) is torch.Tensor
    model.double()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs).logits.computed().dtype == torch.float64


def test_deferred_logits_are_refused_once_the_weights_have_changed():
    for change in (
        lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
        lambda model: model.half(),
        *(
            lambda model, name=name: torch.nn.init.zeros_(model.get_submodule(f"cls.predictions.{name}").bias)
            for name in ("transform.dense", "transform.LayerNorm", "decoder")
        ),
    ):
        model, inputs, expected = masked_lm()
        early, late = model(**inputs), model(**inputs)
        (early.loss + late.loss).backward(retain_graph=True)
        assert torch.equal(early.logits, expected)
        change(model)
        assert torch.equal(early.logits, expected)
        words = r"^logits: the head's weights have changed .* output_logits=True"
        with pytest.raises(RuntimeError, match=words):
            late.logits.argmax(-1)


def test_deferred_logits_where_they_cannot_be():
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad

    model, inputs, expected = masked_lm()
    others = {name: p.detach() * 2 for name, p in model.named_parameters()}
    output = torch.func.functional_call(model, others, (), inputs)
    with pytest.raises(RuntimeError, match=r"^logits: the head's weights have changed"):
        output.logits.sum()
    eager = torch.func.functional_call(model, others, (), {**inputs, "output_logits": True})
    assert not torch.allclose(eager.logits, expected)
    taken = Exp.apply(model(**inputs).logits)
    assert torch.equal(taken, expected.exp())
    with pytest.raises(RuntimeError, match=r"^logits: an autograd.Function took .* output_logits=True"):
        taken.sum().backward()
    usual, wider = model.get_output_embeddings(), torch.nn.Linear(48, 130)
    model.cls.predictions.decoder = wider
    with pytest.raises(RuntimeError, match=r"^logits: expected torch.float32 of shape \(4, 18, 120\)"):
        model(**inputs).logits.sum()
    model.cls.predictions.decoder = usual
    usual._is_fsdp_managed_module = True
    with pytest.raises(RuntimeError, match=r"^logits: FSDP gathers the head's weights"):
        model(**inputs).logits.sum()
