"""Ablation, importance and pruning curves against transformers, head masks and central differences."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.analysis import heads
from fastbert.analysis.heads import PruningCurve, ablate, importance, pruning_curve
from fastbert.analysis.measures import Measure
from fastbert.analysis.walk import batches, encode
from fastbert.layers.batch import PackedBatch
from fastbert.runtime import dispatch
from fastbert.tasks.examples import masked
from tests.support.analysis import both, inputs_of, losses, without_head
from tests.support.hf_models import ANALYSED

HEADS = 3
CLOSE = dict(rtol=1e-9, atol=1e-11)


@pytest.fixture
def of_words(texts):
    return masked(texts, 4, share=0.4, seed=1)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "electra", "mpnet"])
def test_without_a_head_as_transformers_without_its_columns(labelled, family):
    theirs, ours = both(family)
    found = ablate(ours, labelled)
    np.testing.assert_allclose(found.base_loss, losses(theirs, labelled), **CLOSE)
    for layer, head in ((0, 0), (1, 2), (2, 1)):
        expected = losses(without_head(theirs, layer, head), labelled)
        np.testing.assert_allclose(found.loss[:, layer, head], expected, **CLOSE)


def test_uniform_as_transformers_with_queries_of_zero(labelled):
    theirs, ours = both("bert")
    found = ablate(ours, labelled, mode="uniform")
    for layer, head in ((0, 1), (2, 0)):
        model = copy.deepcopy(theirs)
        query = model.bert.encoder.layer[layer].attention.self.query
        with torch.no_grad():
            query.weight[head * 16 : (head + 1) * 16] = 0
            query.bias[head * 16 : (head + 1) * 16] = 0
        np.testing.assert_allclose(found.loss[:, layer, head], losses(model, labelled), **CLOSE)


def mask_without(layers, unit, layer, head):
    mask = torch.ones(layers, HEADS, dtype=torch.float64)
    if unit == "head":
        mask[layer, head] = 0
    elif unit == "all-but-one":
        mask[layer] = 0
        mask[layer, head] = 1
    else:
        mask[layer] = 0
    return mask


@pytest.mark.parametrize("unit", heads.UNITS)
@pytest.mark.parametrize(("family", "tokens"), [("bert", 1), ("bert", 4096), *((f, 40) for f in ANALYSED)])
def test_shared_prefixes_change_nothing(labelled, family, unit, tokens):
    """Every unit of BERT by a head mask through the whole model, and some units of other families."""
    ours = both(family)[1]
    found = ablate(ours, labelled, unit=unit, batch_tokens=tokens)
    layers = len(ours.base_model.layer_list())
    assert found.loss.shape == (5, layers, 1 if unit == "layer" else HEADS)
    np.testing.assert_allclose(found.base_loss, losses(ours, labelled), **CLOSE)
    places = list(itertools.product(range(layers), range(found.loss.shape[2])))
    for layer, head in places if family == "bert" else places[::4]:
        expected = losses(ours, labelled, head_mask=mask_without(layers, unit, layer, head))
        np.testing.assert_allclose(found.loss[:, layer, head], expected, **CLOSE)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["reference", "aten", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_prefixes_have_the_bits_of_one_by_one(labelled, backend, dtype):
    """Of one backend, where the shapes of all products are the same: one example and variant at a time."""
    model = copy.deepcopy(both("bert")[1]).to(dtype)
    measure = Measure.of(model, labelled)
    with dispatch.use_backend(backend), torch.inference_mode():
        found = ablate(model, labelled, batch_tokens=1).loss
        for layer, head in itertools.product(range(3), range(HEADS)):
            gates = mask_without(3, "head", layer, head).to(dtype)
            for batch in batches(model, labelled, 1):
                hidden = encode(model, batch, gates=gates)
                loss = measure(hidden, batch.inputs, measure.labels_of(batch))[0]
                assert found[batch.numbers, layer, head] == loss.double().numpy()


def test_labels_by_their_names(labelled):
    ours = both("bert")[1]
    names = np.array([ours.config.id2label[int(i)] for i in labelled.labels])
    found = ablate(ours, replace(labelled, labels=names))
    np.testing.assert_array_equal(found.loss, ablate(ours, labelled).loss)
    with pytest.raises(ValueError, match=r"labels\[1\]: 'other' is none of the config's, LABEL_0"):
        ablate(ours, replace(labelled, labels=np.array([names[0], "other", *names[2:]])))


def test_a_skipped_layer(labelled):
    ours = both("bert")[1]
    found = ablate(ours, labelled, unit="layer", mode="skip")
    for layer in range(3):
        model = copy.deepcopy(ours)
        del model.bert.encoder.layer[layer]
        model.config.num_hidden_layers = 2
        np.testing.assert_allclose(found.loss[:, layer, 0], losses(model, labelled), **CLOSE)


def test_masked_words(of_words):
    theirs, ours = both("bert", "ForMaskedLM")
    found = ablate(ours, of_words)
    np.testing.assert_allclose(found.base_loss, losses(theirs, of_words), **CLOSE)
    expected = losses(without_head(theirs, 1, 2), of_words)
    np.testing.assert_allclose(found.loss[:, 1, 2], expected, **CLOSE)
    assert found.score_name == "accuracy"
    assert ((found.score >= 0) & (found.score <= 1)).all()


def test_labels_of_tokens(texts):
    labels = np.where(texts.words >= 0, texts.ids % 3, -100)
    # the first token of each text is its own, not the last of the previous text
    labels[texts.starts[:-1]] = [0, 1, 2, 0, 1]
    examples = replace(texts, labels=labels)
    theirs, ours = both("bert", "ForTokenClassification")
    found = ablate(ours, examples)
    np.testing.assert_allclose(found.base_loss, losses(theirs, examples), **CLOSE)
    np.testing.assert_allclose(found.loss[:, 0, 1], losses(without_head(theirs, 0, 1), examples), **CLOSE)


def test_regression_and_several_labels(pairs):
    theirs, ours = both("bert", num_labels=1)
    examples = replace(pairs, labels=np.array([0.5, -1.0, 2.0, 0.0, 1.5]))
    found = ablate(ours, examples)
    np.testing.assert_allclose(found.base_loss, losses(theirs, examples), **CLOSE)
    np.testing.assert_allclose(found.base_score, -found.base_loss, **CLOSE)
    theirs, ours = both("bert", num_labels=3, problem_type="multi_label_classification")
    examples = replace(pairs, labels=np.random.default_rng(0).integers(0, 2, (5, 3)).astype(float))
    found = ablate(ours, examples)
    np.testing.assert_allclose(found.base_loss, losses(theirs, examples), **CLOSE)
    with torch.no_grad():
        logits = [theirs(**inputs_of(theirs, examples, i)).logits[0].numpy() for i in range(5)]
    assert (abs(np.array(logits)) < 0.5).any()
    np.testing.assert_allclose(found.base_score, ((np.array(logits) > 0) == examples.labels).mean(1))
    theirs, ours = both("bert", num_labels=3, problem_type="regression")
    np.testing.assert_allclose(ablate(ours, examples).base_loss, losses(theirs, examples), **CLOSE)


def test_a_copy_of_a_sequence_keeps_its_bias(texts):
    (batch,) = batches(both("bert")[1], texts)
    packing, n = batch.inputs.packing, len(batch)
    bias = torch.arange(float(n)).view(n, 1, 1, 1)
    sequences = PackedBatch(packing.cu_seqlens, packing.max_seqlen, bias)
    repeated, _ = heads._repeated(sequences, batch, 3, torch.float32)
    assert repeated.bias.flatten().tolist() == [*range(n)] * 3


def test_accuracy_is_what_the_logits_say(labelled):
    theirs, ours = both("bert")
    found = ablate(ours, labelled)
    for number in range(len(labelled)):
        with torch.no_grad():
            logits = theirs(**inputs_of(theirs, labelled, number)).logits
        assert found.base_score[number] == (logits.argmax().item() == labelled.labels[number])
    change = found.score_change()
    np.testing.assert_allclose(change, found.score.mean(0) - found.base_score.mean())
    np.testing.assert_allclose(found.loss_change(), found.loss.mean(0) - found.base_loss.mean())


def test_the_best_head_alone(labelled):
    found = ablate(both("bert")[1], labelled, unit="all-but-one")
    best = found.best_head()
    for layer in range(3):
        order = [(found.score[:, layer, h].mean(), -found.loss[:, layer, h].mean()) for h in range(HEADS)]
        assert order[best[layer]] == max(order)


# -- importance ----------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("family", ANALYSED)
def test_importance_is_the_central_difference(labelled, family):
    ours = both(family)[1]
    found = importance(ours, labelled).derivatives
    layers = len(ours.base_model.layer_list())
    step = 1e-5
    for layer, head in ((0, 0), (1, 2), (layers - 1, 1)):
        sides = []
        for sign in (1, -1):
            mask = torch.ones(layers, HEADS, dtype=torch.float64)
            mask[layer, head] += sign * step
            sides.append(losses(ours, labelled, head_mask=mask))
        expected = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found[:, layer, head], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("tokens", [1, 50])
def test_importance_does_not_depend_on_batches(of_words, tokens):
    """The absolute value belongs to each example, not to a batch."""
    ours = both("bert", "ForMaskedLM")[1]
    whole, found = importance(ours, of_words), importance(ours, of_words, batch_tokens=tokens)
    np.testing.assert_allclose(found.derivatives, whole.derivatives, **CLOSE)
    each = np.stack([importance(ours, of_words.chosen([i])).values() for i in range(5)])
    np.testing.assert_allclose(whole.values(), each.mean(0), **CLOSE)
    signs = np.sign(whole.derivatives)
    assert (np.abs(signs.sum(0)) < 5).any(), "of one sign everywhere: |sum| would be as good"
    np.testing.assert_allclose(np.linalg.norm(whole.values(normalized=True), axis=1), 1)
    assert np.array_equal(whole.order(normalized=False), np.argsort(whole.values().ravel(), kind="stable"))


def test_importance_leaves_the_model_alone(labelled):
    ours = both("bert")[1]
    ours.train()
    frozen = ours.bert.embeddings.word_embeddings.weight
    frozen.requires_grad_(False)
    try:
        importance(ours, labelled)
        ablate(ours, labelled)
        assert ours.training
        assert all(p.grad is None for p in ours.parameters())
        assert [p is frozen for p in ours.parameters() if not p.requires_grad] == [True]
    finally:
        frozen.requires_grad_(True)
        ours.eval()


# -- pruning curves ------------------------------------------------------------------------------------------


def test_how_many_can_go():
    """Until the first significant drop; a gain or a drop by chance is none."""
    draw = np.random.default_rng(0)
    whole = (draw.random(400) < 0.8).astype(float)
    same = whole.copy()
    same[:2] = 1 - same[:2]
    worse = np.where(draw.random(400) < 0.3, 0.0, whole)
    curve = PruningCurve(
        np.arange(9), np.array([0, 3, 6, 9]), np.stack([whole, same, worse, same]), "accuracy"
    )
    assert curve.removable() == 3
    assert replace(curve, score=np.stack([whole] * 4)).removable() == 9
    assert replace(curve, score=np.stack([whole, worse, worse, worse])).removable() == 0
    with pytest.raises(ValueError, match=r"values\[0\]: expected finite numbers, got nan"):
        replace(curve, score=np.stack([whole, whole * np.nan, worse, worse])).removable()


def test_no_order_of_what_is_no_number():
    nan = np.array([[[1.0, np.nan]]])
    with pytest.raises(ValueError, match=r"derivatives\[0\]: expected finite numbers, got nan"):
        heads.Importance(nan).order()
    with pytest.raises(ValueError, match=r"score\[0\]: expected finite numbers, got nan"):
        heads.Ablation("head", "zero", "accuracy", np.ones(1), np.ones(1), nan, nan).best_head()


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, "labels: BertForSequenceClassification needs them, the examples have none"),
        ([0, 1, 2, 3, 0], r"labels\[3\]: 3 is no class; expected 0 to 2"),
        ([0.5] * 5, r"labels: expected 3 per example, got \(5,\)"),
        ([[1.0, 0, 0]] * 4 + [[0, np.inf, 0]], r"labels\[4\]: expected finite numbers, got inf"),
    ],
)
def test_bad_labels(pairs, labels, expected):
    examples = replace(pairs, labels=None if labels is None else np.array(labels))
    model = both("bert")[1]
    # What other tests have trained it for
    model.config.problem_type = None
    for function in (ablate, importance):
        with pytest.raises(ValueError, match=expected):
            function(model, examples)


def test_labels_of_the_wrong_kind(of_words, labelled):
    with pytest.raises(ValueError, match="labels: expected one per example, got one per token"):
        ablate(both("bert")[1], of_words)
    with pytest.raises(ValueError, match="labels: expected one per token, got one per example"):
        ablate(both("bert", "ForMaskedLM")[1], labelled)
    with pytest.raises(TypeError, match=r"model: expected an encoder, .*, got BertForPreTraining"):
        ablate(both("bert", "ForPreTraining")[1], labelled)


def test_orders_and_bad_arguments(labelled):
    ours = both("bert")[1]
    for order in (range(8), [0] * 9):
        with pytest.raises(ValueError, match="order: expected each of the 9 heads once"):
            pruning_curve(ours, labelled, order)
    with pytest.raises(ValueError, match=r"step: expected a number in \(0, 1\], got 0"):
        pruning_curve(ours, labelled, range(9), step=0)
    assert pruning_curve(ours, labelled, range(9)).removed.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    for arguments, expected in (
        ({"unit": "neuron"}, "unit: expected one of head, all-but-one, layer, got 'neuron'"),
        ({"mode": "skip"}, "mode: skip is for unit='layer', got unit='head'"),
        ({"batch_tokens": 0}, "batch_tokens: expected an integer >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=expected):
            ablate(ours, labelled, **arguments)


def test_one_example_has_no_interval(labelled):
    one = ablate(both("bert")[1], labelled.chosen([0]))
    assert one.loss.shape == (1, 3, 3)
    assert one.interval(0, 0, seed=7) == (one.score_change()[0, 0], None, None, 1, 7)
    assert one.loss_interval(2, 1).mean == one.loss_change()[2, 1]
    with pytest.raises(ValueError, match="values: an interval needs two examples at least, got 1"):
        one.p_values()
