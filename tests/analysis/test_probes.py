"""Probes of spans: against a loop, on features where the answer is known; splits, codes, control tasks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fastbert.analysis import probes as module
from fastbert.analysis import probing
from fastbert.analysis.features import hidden_states
from fastbert.analysis.probes import Probes, Recipe, Spans, fit, losses, one_layer_each, up_to_each
from fastbert.analysis.probing import EdgeProbe, _counts, _f1, control_task, edge_probe, online_code
from fastbert.analysis.targets import LabelledText, Targets, of_texts, of_treebank, read_edges
from fastbert.analysis.treebank import as_examples, pieces_of
from tests.support.analysis import both, inputs_of
from tests.support.analysis import sentence as tree
from tests.support.hf_models import ANALYSED

SHORT = Recipe(inner=16, dropout_p=0.1, lr=0.01, batch=64, epochs=30, patience=5)


def spans_of(bounds, labels, classes):
    return Spans(np.array(bounds, np.int64), np.eye(classes, dtype=bool)[np.array(labels)])


def targets_of(labels, types=None, per_example=4, classes=None):
    """A target of one token each, `per_example` to an example."""
    labels = np.asarray(labels)
    n, classes = len(labels), classes or int(labels.max()) + 1
    tokens = np.stack([np.arange(n), np.arange(n) + 1], 1)[:, None]
    types = np.arange(n) if types is None else types
    names = tuple(f"label {i}" for i in range(classes))
    return Targets(names, np.arange(n) // per_example, tokens, np.eye(classes, dtype=bool)[labels], types)


# -- features ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ANALYSED)
def test_hidden_states_are_those_of_transformers(texts, family, tmp_path):
    theirs, ours = both(family)
    rows = np.flatnonzero(texts.words >= 0)[1::2]
    options = {"dtype": torch.float64, "batch_tokens": 20}
    found = hidden_states(ours, texts, rows, path=tmp_path / "states", **options)
    expected = []
    for number in range(len(texts)):
        with torch.no_grad():
            out = theirs.base_model(**inputs_of(theirs, texts, number), output_hidden_states=True)
        expected.append(torch.stack(out.hidden_states)[:, 0])
    torch.testing.assert_close(found, torch.cat(expected, 1)[:, rows], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found, hidden_states(ours, texts, rows, **options), rtol=1e-9, atol=1e-11)
    assert (tmp_path / "states").stat().st_size == found.nbytes


# -- the network ---------------------------------------------------------------------------------------------


def by_hand(probes, number, states, bounds):
    """The logits of one probe, one target after the other."""
    weights = probes.weights_of_layers()[number] * probes.factor[number]
    mixed = (weights[:, None, None] * states).sum(0)
    rows = []
    for target in bounds:
        parts = []
        for slot, (first, last) in enumerate(target):
            x = mixed[first:last]
            if probes.recipe.inner:
                x = x @ probes.project[slot][number] + probes.project_bias[slot][number]
                weight = (x @ probes.score[slot][number]).softmax(0)
                parts.append((weight * x).sum(0))
            else:
                parts.append(x.mean(0))
        x = torch.cat(parts)
        if probes.recipe.inner:
            x = (x @ probes.first[number] + probes.first_bias[number, 0]).tanh()
            x = F.layer_norm(x, x.shape) * probes.norm[number, 0] + probes.norm_bias[number, 0]
        rows.append(x @ probes.last[number] + probes.last_bias[number, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("inner", [0, 8])
@pytest.mark.parametrize("spans", [1, 2])
@pytest.mark.parametrize("mixes", [one_layer_each(3), up_to_each(3)], ids=["one", "up-to"])
def test_all_probes_at_once_are_each_by_hand(inner, spans, mixes):
    draw = torch.Generator().manual_seed(0)
    probes = Probes(mixes, 6, spans, 4, Recipe(inner=inner)).double().eval()
    with torch.no_grad():
        for value in probes.parameters():
            value.copy_(torch.randn(value.shape, generator=draw, dtype=torch.float64))
    states = torch.randn(3, 11, 6, generator=draw, dtype=torch.float64)
    bounds = np.array([[[0, 3], [4, 5]], [[2, 4], [2, 9]], [[10, 11], [0, 1]], [[5, 11], [1, 3]]])[:, :spans]
    found = probes(states, bounds)
    for number in range(len(mixes)):
        torch.testing.assert_close(
            found[number], by_hand(probes, number, states, bounds), rtol=1e-10, atol=1e-12
        )
    torch.testing.assert_close(probes.logits(states, bounds, batch=3), found.detach())


def known(seed, n=400, classes=3, width=12):
    """(states of 3 layers, labels): layer 0 is noise, layer 1 says the label, layer 2 less clearly."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, n)
    states = draw.normal(size=(3, n, width))
    for layer, scale in ((1, 6.0), (2, 1.5)):
        states[layer, np.arange(n), labels] += scale
    return torch.from_numpy(states.astype(np.float32)), labels


def test_probes_learn_as_if_alone():
    states, labels = known(0)
    targets = targets_of(labels)
    train, held_out, test = (targets.spans(part) for part in targets.split(0))
    options = {"loss": "softmax", "seed": 3}
    recipe = SHORT._replace(epochs=3)
    mixes = up_to_each(3)
    at_once = fit(Probes(mixes, 12, 1, 3, recipe, seed=1), states, train, held_out, **options)
    found = at_once.logits(states, test.bounds)
    for number in range(3):
        alone = Probes(mixes[number : number + 1], 12, 1, 3, recipe, seed=1)
        fit(alone, states, train, held_out, **options)
        torch.testing.assert_close(alone.logits(states, test.bounds)[0], found[number], rtol=1e-3, atol=1e-3)


@pytest.mark.sweep
def test_patience_is_for_epochs_in_which_no_probe_got_better():
    """Those of noise end at once; beside them a probe learns as long as alone."""
    states, labels = known(0)
    train, held_out, _ = (targets_of(labels).spans(part) for part in targets_of(labels).split(0))
    recipe = SHORT._replace(patience=1, lr=0.002)
    found = []
    for mixes in (one_layer_each(3), one_layer_each(3)[1:2]):
        probes = fit(Probes(mixes, 12, 1, 3, recipe), states, train, held_out, loss="softmax")
        found.append(
            losses(probes.logits(states, held_out.bounds), torch.from_numpy(held_out.labels), "softmax")
        )
    assert found[0][1].mean() <= found[1][0].mean() * 1.001


def test_a_probe_keeps_its_best_epoch():
    """It learns by heart from labels that say nothing: the held-out loss rises after the first epochs."""
    draw = np.random.default_rng(0)
    states, _ = known(0, n=80)
    train, held_out = (
        spans_of([[[i, i + 1]] for i in rows], draw.integers(0, 3, 40), 3)
        for rows in (range(40), range(40, 80))
    )
    labels = torch.from_numpy(held_out.labels)
    held = []
    for epochs in range(1, 8):
        recipe = SHORT._replace(epochs=epochs, patience=100, dropout_p=0.0, lr=0.05)
        plain = fit(Probes(one_layer_each(3), 12, 1, 3, recipe), states, train, None, loss="softmax")
        held.append(losses(plain.logits(states, held_out.bounds), labels, "softmax").mean(1))
    held = torch.stack(held)
    assert (held.argmin(0) < 6).any()
    kept = fit(Probes(one_layer_each(3), 12, 1, 3, recipe), states, train, held_out, loss="softmax")
    found = losses(kept.logits(states, held_out.bounds), labels, "softmax").mean(1)
    torch.testing.assert_close(found, held.min(0).values, rtol=1e-4, atol=1e-5)


def test_losses_in_closed_form():
    logits = torch.tensor([[[0.0, math.log(3.0)], [2.0, 2.0]]], dtype=torch.float64)
    labels = torch.tensor([[False, True], [True, False]])
    torch.testing.assert_close(
        losses(logits, labels, "softmax"), torch.tensor([[math.log(4 / 3), math.log(2)]], dtype=torch.float64)
    )
    expected = [[math.log(2) + math.log(4 / 3), math.log1p(math.exp(-2)) + math.log1p(math.exp(2))]]
    torch.testing.assert_close(losses(logits, labels, "sigmoid"), torch.tensor(expected, dtype=torch.float64))


# -- edge probes ---------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("loss", module.LOSSES)
def test_an_edge_probe_finds_the_layer(loss):
    states, labels = known(1)
    found = edge_probe(states, targets_of(labels), recipe=SHORT, loss=loss, seed=0)
    scores = found.scores()
    assert scores[1] > 0.97 > scores[2] > 0.5 > scores[0]
    up_to = found.scores_up_to()
    assert up_to[0] == scores[0]
    assert up_to[1] > 0.97
    assert 0.8 < found.expected_layer() < 1.2
    assert found.weights.argmax() == 1
    assert found.weights.sum() == pytest.approx(1)
    assert found.centre() == pytest.approx(found.weights[1] + 2 * found.weights[2])
    assert sum(found.targets) == 400
    assert found.targets[1:] == (40, 40)
    interval = found.interval(1)
    assert interval.mean == pytest.approx(scores[1])
    assert interval.low <= interval.mean <= interval.high
    assert interval.n == found.counts.shape[1] == 10


def test_counts_are_those_of_the_labels():
    """F1 by hand, of labels of which a target has two, one or none."""
    logits = torch.tensor([[[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]]])
    truth = np.array([[True, True], [False, True], [True, False], [False, True]])
    test = Spans(np.zeros((4, 1, 2), np.int64), truth)
    found = _counts(logits, test, "sigmoid", np.array([5, 5, 7, 7]))
    np.testing.assert_array_equal(found, [[[2, 3, 3], [1, 1, 2]]])
    assert _f1(found.sum(1))[0] == pytest.approx(2 * 3 / (4 + 5))
    most = _counts(logits, test, "softmax", np.array([5, 5, 7, 7]))
    np.testing.assert_array_equal(most[..., 1], [[2, 2]])


def test_the_expected_layer_is_the_papers():
    counts = np.zeros((4, 1, 3), np.int64)
    counts[:, 0, 1] = counts[:, 0, 2] = 100
    counts[:, 0, 0] = 40, 60, 90, 90
    found = EdgeProbe(("a",), counts, counts, np.array([0.1, 0.2, 0.3, 0.4]), (1, 1, 1), 0)
    assert found.expected_layer() == pytest.approx((1 * 20 + 2 * 30 + 3 * 0) / 50)
    assert found.centre() == pytest.approx(2.0)
    assert math.isnan(EdgeProbe(("a",), counts, counts[::-1], found.weights, (1, 1, 1), 0).expected_layer())


# -- description length, control task ------------------------------------------------------------------------


@pytest.mark.sweep
def test_labels_that_are_seen_are_compressed():
    states, labels = known(2)
    found = online_code(states, targets_of(labels), recipe=SHORT)
    compression = found.compression()
    assert compression[1] > 3 > compression[2] > compression[0]
    assert compression[0] < 1.05
    assert found.interval(1).mean == pytest.approx(compression[1])
    # the first block is coded without a probe
    first = np.random.default_rng(0).permutation(100)[: found.blocks[0]]
    np.testing.assert_allclose(found.bits[:, first], 4 * math.log2(3))
    assert found.blocks[-1] == 100
    assert found.targets.sum() == 400


def test_a_code_does_not_know_what_it_codes():
    """Over all labels that a target of the last block may have, the probabilities of its code add up to 1."""
    states, labels = known(0, n=40)
    last = np.random.default_rng(0).permutation(40)[-1]
    share = 0.0
    for label in range(3):
        labels[last] = label
        targets = targets_of(labels, per_example=1, classes=3)
        share += 2.0 ** -online_code(states, targets, recipe=SHORT._replace(epochs=5)).bits[:, last]
    np.testing.assert_allclose(share, 1.0, rtol=1e-6)


def test_a_code_learns_from_all_before_the_block_and_no_more(noted):
    states, labels = known(0, n=160)
    learned = noted(probing, "fit", lambda _, states, train, held_out, **rest: len(train) + len(held_out))
    found = online_code(states, targets_of(labels), recipe=SHORT._replace(epochs=1))
    assert learned == [4 * known for known in found.blocks[:-1]]


@pytest.mark.sweep
def test_a_label_of_the_word_type_is_not_selective():
    """Where vectors say the word type alone the control task is as easy; a label by context is another."""
    draw = np.random.default_rng(0)
    n, types = 600, draw.integers(0, 12, 600)
    context = draw.integers(0, 2, n)
    states = np.zeros((2, n, 14), np.float32)
    states[:, np.arange(n), types] = 1
    states[1, np.arange(n), 12 + context] = 1
    states = torch.from_numpy(states)
    recipe = Recipe(inner=0, lr=0.05, epochs=40, batch=64)
    of_type = control_task(states, targets_of(types % 3, types), recipe=recipe)
    assert (of_type.accuracy() > 0.99).all()
    assert (abs(of_type.selectivity()) < 0.02).all()
    of_context = control_task(states, targets_of(context, types), recipe=recipe)
    assert of_context.accuracy()[1] > 0.99
    assert of_context.accuracy()[0] < 0.75
    assert of_context.interval(1).n == of_context.right.shape[1] == 15


def test_a_control_label_is_of_the_type():
    targets = targets_of(np.random.default_rng(0).integers(0, 3, 400), np.arange(400) % 50)
    control = targets.control(0)
    for number in range(50):
        assert len(np.unique(control.labels[control.types == number].argmax(1))) == 1
    assert (control.labels.sum(1) == 1).all()
    assert not (control.labels == targets.labels).all()
    assert len(np.unique(control.labels.argmax(1))) == 3
    assert (targets.control(1).labels != control.labels).any()
    # as often as the labels occur
    often = targets_of((np.arange(4000) % 10 == 0).astype(int))
    np.testing.assert_allclose(often.control(0).labels.mean(0), [0.9, 0.1], atol=0.02)


# -- targets -------------------------------------------------------------------------------------------------


def test_a_split_is_of_examples():
    targets = targets_of(np.zeros(203, int), per_example=3, classes=2)
    parts = targets.split(4)
    assert sorted(np.concatenate(parts)) == list(range(203))
    sets = [set(targets.example[part]) for part in parts]
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]
    assert [len(s) for s in sets] == [56, 6, 6]
    assert any(
        (a != b).any() for a, b in zip(parts[1:], targets.split(5)[1:], strict=True) if len(a) == len(b)
    )
    with pytest.raises(ValueError, match="examples: a split needs 10 with a target at least, got 9"):
        targets_of(np.zeros(27, int), per_example=3, classes=2).split(0)


SENTENCES = [
    tree("the cats sat in a house", "DET NOUN VERB ADP DET NOUN", [2, 3, 0, 6, 6, 3], "a b root c a obl:in"),
    tree("it rained", "PRON VERB", [2, 0], "nsubj root"),
]


def test_targets_of_a_treebank(tokenizer):
    examples = as_examples(tokenizer, SENTENCES)
    starts, ends = pieces_of(examples)
    words = of_treebank(SENTENCES, examples, "upos")
    assert words.label_names == ("ADP", "DET", "NOUN", "PRON", "VERB")
    assert [words.label_names[i] for i in words.labels.argmax(1)] == [*SENTENCES[0].upos, *SENTENCES[1].upos]
    np.testing.assert_array_equal(words.tokens[:, 0], np.stack([starts, ends], 1))
    np.testing.assert_array_equal(words.example, [0] * 6 + [1] * 2)
    assert words.types[0] != words.types[1]
    assert len(set(words.types)) == 8
    arcs = of_treebank(SENTENCES, examples, "relation")
    found = [arcs.label_names[i] for i in arcs.labels.argmax(1)]
    assert found == ["a", "b", "c", "a", "obl", "nsubj"]
    heads = [1, 2, 5, 5, 2, 7]
    np.testing.assert_array_equal(arcs.tokens[:, 1], np.stack([starts[heads], ends[heads]], 1))
    # cats and rained have two pieces, and special tokens none
    np.testing.assert_array_equal(words.rows, np.flatnonzero(examples.words >= 0))
    found = words.spans(np.arange(8)).bounds[:, 0]
    np.testing.assert_array_equal(found[:, 1] - found[:, 0], [1, 2, 1, 1, 1, 1, 1, 2])
    np.testing.assert_array_equal(found[1:, 0], found[:-1, 1])


def test_a_word_type_is_one_with_capital_letters(tokenizer):
    sentences = [tree("The cat sat the CAT", "X X X X X", [2, 3, 0, 5, 3], "a b root a b")]
    types = of_treebank(sentences, as_examples(tokenizer, sentences), "upos").types
    assert types[0] == types[3] != types[1] == types[4]


def test_edges_of_a_file(tokenizer, tmp_path):
    rows = [
        {"text": "the cats sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": ["x", "y"]}]},
        {"text": "it rained", "targets": []},
        {"text": "a dog", "targets": [{"span1": [1, 2], "span2": [0, 2], "label": "z"}], "info": {}},
    ]
    file = tmp_path / "edges.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = read_edges(file)
    assert texts[0] == LabelledText(("the", "cats", "sat"), (((0, 2), (2, 3)),), (("x", "y"),))
    assert len(texts) == 3
    assert len(read_edges(file, max_examples=1)) == 1
    examples = as_examples(tokenizer, texts)
    targets = of_texts(texts, examples)
    assert targets.label_names == ("x", "y", "z")
    np.testing.assert_array_equal(targets.labels, [[True, True, False], [False, False, True]])
    np.testing.assert_array_equal(targets.example, [0, 2])
    ids = [[examples.ids[slice(*span)].tolist() for span in target] for target in targets.tokens]
    words = [[examples.words[slice(*span)].tolist() for span in target] for target in targets.tokens]
    assert words == [[[0, 1, 1], [2]], [[1], [0, 1]]]
    assert ids[1][0] == [tokenizer.token_to_id("dog")]


def target(**values) -> str:
    """A line of a file with one target."""
    return json.dumps({"text": "a b", "targets": [{"span1": [0, 1], "label": "x", **values}]})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a b"}', "line 2: expected an object with a 'text' and a list of 'targets'"),
        ('{"text": " ", "targets": []}', "line 2: text: expected one word at least"),
        (target(span1=[0, 3]), r"line 2: span1: expected \[first, last \+ 1\] of 2 words, got \[0, 3\]"),
        (target(span1=[1, 1]), r"line 2: span1: expected \[first, last \+ 1\] of 2 words, got \[1, 1\]"),
        (target(label=3), "line 2: label: expected a name or a list of names, got 3"),
        (target(span2=[0, 1]), "line 2: a target of 2 spans; expected 1, as before"),
    ],
)
def test_edges_that_are_none(tmp_path, line, message):
    file = tmp_path / "edges.jsonl"
    file.write_text(target() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_edges(file)


@pytest.mark.parametrize("probe", [edge_probe, online_code, control_task])
def test_what_cannot_be_learned(probe):
    targets = targets_of(np.arange(80) % 3)
    states = torch.randn(2, 80, 6) * 1e10
    with pytest.raises(ValueError, match=r"lr: probes have no finite loss with 1e\+30"):
        probe(states, targets, recipe=Recipe(lr=1e30, inner=0, dropout_p=0))
    states[0, 3] = torch.nan
    with pytest.raises(ValueError, match=r"states\[0\]: expected finite numbers"):
        probe(states, targets)


@pytest.mark.parametrize("probe", [online_code, control_task])
def test_two_labels_are_no_class(probe):
    states, labels = known(0)
    targets = targets_of(labels)
    targets.labels[7] = True
    with pytest.raises(ValueError, match=r"targets\[7\]: "):
        probe(states, targets)
