"""Models with a head: the encoder is replayed, and the head's results are the model's own."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import fastbert
from fastbert.graphs.recorder import EagerRecorder
from tests.support.graphed_models import SIZES, lengths_batch
from tests.support.hf_models import ACCELERATED, hf_model
from tests.support.model_pairs import build, inputs_for

HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta-v2"])
@pytest.mark.parametrize("task", HEADS)
def test_the_head_runs_on_replayed_tokens(name, task):
    _, model = build(name, task)
    graphed = fastbert.graph(model.eval(), recorder=EagerRecorder, **SIZES)
    inputs = inputs_for("bert", task) if name == "bert" else lengths_batch([5, 9, 3])
    with torch.no_grad():
        for times in (1, 2):
            found, wanted = graphed(**inputs), model(**inputs)
            assert graphed.replays == times
            assert found.keys() == wanted.keys()
            for a, b in zip(found.values(), wanted.values(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        # another model of the class is not served, nor is this one called by itself
        other = copy.deepcopy(model)
        other.get_input_embeddings().weight.neg_()
        assert not torch.allclose(other(**inputs)[0], graphed(**inputs)[0])
    assert graphed.replays == 3
    graphed(**inputs)[0].sum().backward()
    assert "gradients are on" in graphed.last_fallback


def test_a_list_of_choices_and_bad_input_are_the_models():
    _, model = build("bert", "ForSequenceClassification")
    graphed = fastbert.graph(model.eval(), recorder=EagerRecorder, **SIZES)
    with torch.no_grad(), pytest.raises(ValueError, match="input_ids: token id 9999"):
        graphed(torch.full((2, 3), 9999))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(graphed)
    with torch.no_grad():
        assert graphed(**lengths_batch([3, 5])).logits.shape == model(**lengths_batch([3, 5])).logits.shape
    graphed.clear()
    assert graphed.encoder.graphs == []


# --- accelerated models of transformers ---------------------------------------------------------------------

PADDED = lengths_batch([5, 9, 3, 1])


def accelerated(name="bert", task="", **options):
    """(graphed, its model)."""
    model = hf_model(name, getattr(transformers, f"AutoModel{task}")).double()
    model = fastbert.accelerate(model, **options)
    return fastbert.graph(model, recorder=EagerRecorder, **SIZES), model


@torch.no_grad()
def check(graphed, model, reason=None, **given):
    found, wanted = graphed(**given), model(**given)
    assert type(found) is type(wanted)
    for a, b in zip(*(o if isinstance(o, tuple) else o.to_tuple() for o in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    assert reason is None if graphed.last_fallback is None else reason in graphed.last_fallback


# The families that have no such head, or whose head needs separators in the text
WITHOUT_SPANS = ("nomic_bert", "gte", "eurobert", "longformer")
# Families without graphs, and why
REFUSED = {"mobilebert": "the embeddings are given", "longformer": "its layers have global tokens"}


@pytest.mark.parametrize(
    ("name", "task"),
    [
        (name, task)
        for name in ACCELERATED
        for task in ("", *HEADS)
        if not (task == "ForQuestionAnswering" and name in WITHOUT_SPANS)
    ],
)
def test_an_accelerated_model(name, task):
    graphed, model = accelerated(name, task)
    if name in REFUSED:
        check(graphed, model, REFUSED[name], **PADDED)
        assert graphed.last_fallback is not None
        return
    for times in (1, 2, 3):
        check(graphed, model, **PADDED)
        assert graphed.replays == times
    check(graphed, model, **PADDED, return_dict=False)
    check(graphed, model, input_ids=PADDED["input_ids"][:2, :3])
    assert graphed.replays == 5


@torch.no_grad()
def test_weights_of_an_accelerated_model_that_change():
    graphed, model = accelerated()
    check(graphed, model, **PADDED)
    before = graphed(**PADDED)[0]
    for change in (
        lambda: model.encoder.layer[1].output.dense.weight.neg_(),
        lambda: model.encoder.layer[1].attention.self.key.weight.data.mul_(3),
        lambda: setattr(model.embeddings, "LayerNorm", torch.nn.LayerNorm(48).double().eval()),
    ):
        change()
        check(graphed, model, **PADDED)
        assert not torch.allclose(graphed(**PADDED)[0], before)


def test_what_an_accelerated_model_does_without_a_graph():
    graphed, model = accelerated()
    left = {**PADDED, "attention_mask": PADDED["attention_mask"].flip(1)}
    padded = "kept the padding"
    check(graphed, model, padded, **left)
    check(graphed, model, "was asked for hidden states", **PADDED, output_hidden_states=True)
    graphed(**PADDED)[0].sum().backward()
    assert "gradients are on" in graphed.last_fallback
    model.encoder.layer[0].output.dropout.train()
    with torch.no_grad():
        graphed(**PADDED)
    assert "training mode" in graphed.last_fallback
    model.eval()
    hook = model.encoder.layer[0].register_forward_hook(lambda module, inputs, output: output * 2)
    check(graphed, model, padded, **PADDED)
    hook.remove()
    fastbert.accelerate(model, unpad=False)
    check(graphed, model, padded, **PADDED)
    assert graphed.encoder.fallbacks.total() == 6
    assert graphed.replays == 0


def test_an_encoder_that_was_replaced_is_not_served():
    graphed, model = accelerated(task="ForSequenceClassification")
    check(graphed, model, **PADDED)
    model.bert = accelerated()[1]
    check(graphed, model, "was not called", **PADDED)


def test_explain_says_what_was_replayed():
    _, model = build("bert", "ForSequenceClassification")
    graphed = fastbert.graph(model.eval(), recorder=EagerRecorder, **SIZES)
    assert "(graph: it was not called yet; " in str(fastbert.explain(graphed))
    with torch.no_grad():
        graphed(**lengths_batch([3, 5]))
    assert str(fastbert.explain(graphed)).endswith("layers 0 to 2 by executor graph")
    graphed(**lengths_batch([3, 5]))
    assert "(graph: gradients are on: " in str(fastbert.explain(graphed))
