"""The same training from three starts: fine-tuning's own, what each start may change, and the scores."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fastbert.analysis import starts as module
from fastbert.analysis.starts import DEFAULT, starts, trained
from fastbert.finetuning.sequences import Table
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import tokenized
from fastbert.tasks.published import STARTS
from tests.analysis.conftest import make_tokenizer
from tests.support.analysis import both, inputs_of
from tests.support.hf_models import ANALYSED
from tests.support.rule_tasks import quick, tiny_model, written

FROZEN, RANDOM, PRETRAINED = range(len(STARTS))
WORDS = ("dog", "mat", "tree", "red", "house", "rain", "the", "a")
SHORT = replace(DEFAULT, epochs=1, batch_size=8, lr=1e-3)


def labelled(count: int = 40):
    """Sentences of random words; the label says whether one of them is "cat"."""
    draw = np.random.default_rng(7)
    texts, labels = [], []
    for i in range(count):
        words = [WORDS[j] for j in draw.integers(0, len(WORDS), draw.integers(2, 6))]
        if i % 2:
            words[draw.integers(0, len(words))] = "cat"
        texts.append(" ".join(words))
        labels.append(i % 2)
    return tokenized(make_tokenizer(), texts, labels=labels)


def directory(folder, family: str = "bert"):
    """A directory of a model with a head for two classes."""
    copy.deepcopy(both(family, num_labels=2)[1]).float().save_pretrained(folder)
    return folder


@pytest.mark.sweep
@pytest.mark.parametrize("changes", [{}, {"freeze": True}, {"random_init": True}], ids=str)
def test_the_training_is_that_of_fine_tuning(tmp_path, changes):
    """The same bits from the same examples."""
    model, data = tiny_model(tmp_path / "model"), written("csv", tmp_path / "data", 20, 8)
    expected = quick("csv", model, data, tmp_path / "run", epochs=1, batch_size=8, **changes).output
    task = Table()
    texts, labels = task.read(data, "train")[1::2]
    examples = tokenized(load_tokenizer(model), texts, labels=[task.classes.index(name) for name in labels])
    found, steps = trained(model, examples, len(task.classes), replace(SHORT, **changes))
    weights = load_file(expected / "model.safetensors")
    assert steps == 3
    assert weights.keys() == found.state_dict().keys()
    assert all(torch.equal(value, weights[name]) for name, value in found.state_dict().items())
    assert not found.training


@pytest.mark.sweep
def test_cut_batches_learn_the_same(tmp_path):
    model = tiny_model(tmp_path, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = (trained(model, labelled(), 2, SHORT, batch_tokens=most)[0] for most in (4096, 10))
    # The gradient of a key's bias is 0 but for rounding, which Adam enlarges
    whole, cut = ({n: v for n, v in one.state_dict().items() if "key.bias" not in n} for one in found)
    assert changed(whole, cut)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)


@pytest.fixture
def seen(monkeypatch):
    """(weights before, model after, examples) of each training."""
    found, build, train = [], module.first_model, module.trained

    def first_model(*given):
        found.append([copy.deepcopy((model := build(*given)).state_dict())])
        return model

    def spy(model, examples, *given):
        result = train(model, examples, *given)
        found[-1] += [result[0], examples]
        return result

    monkeypatch.setattr(module, "first_model", first_model)
    monkeypatch.setattr(module, "trained", spy)
    return found


def changed(one, other) -> set[str]:
    return {
        name
        for name, value in one.items()
        if name not in other or not torch.equal(value, other[name].float())
    }


def others_in_the_sweep(family: str):
    return family if family in ("bert", "roberta") else pytest.param(family, marks=pytest.mark.sweep)


@pytest.mark.sweep
@pytest.mark.parametrize("family", [others_in_the_sweep(name) for name in ANALYSED])
def test_what_each_start_changes(tmp_path, seen, family):
    model = directory(tmp_path, family)
    whole = AutoModelForSequenceClassification.from_pretrained(model)
    prefix, pooler = whole.base_model_prefix, whole.config.family.pooler
    starts(model, labelled(20), settings=SHORT)
    whole = whole.state_dict()
    assert len(seen) == len(STARTS)
    head = {name for name in whole if not name.startswith(f"{prefix}.")}
    pooled = {name for name in whole if pooler and name.startswith(f"{prefix}.{pooler}.")}
    matrices = {name for name, value in whole.items() if value.dim() > 1}
    befores, afters = [each[0] for each in seen], [each[1].state_dict() for each in seen]
    # all begin with one head, a new one
    for before in befores:
        assert not changed(befores[0], before) & head
    assert head & matrices <= changed(befores[0], whole)
    for number in (FROZEN, PRETRAINED):
        assert changed(befores[number], whole) <= head
    assert matrices <= changed(befores[RANDOM], whole)
    assert changed(befores[FROZEN], afters[FROZEN]) <= head | pooled
    assert head & matrices <= changed(befores[FROZEN], afters[FROZEN])
    for number in (RANDOM, PRETRAINED):
        learned = changed(befores[number], afters[number])
        unread = {name for name in matrices if "position" in name or "token_type" in name}
        # BigBird's head reads the first token itself
        unread |= pooled if family == "big_bird" else set()
        assert matrices - unread <= learned


@pytest.mark.sweep
def test_scores_are_those_of_the_others(tmp_path, seen):
    """Split, scores and baseline, by the models' own forward."""
    examples = labelled(23)
    found = starts(directory(tmp_path), examples, settings=replace(SHORT, seed=5))
    known = seen[0][2]
    assert all(each[2] is known for each in seen)
    assert (len(known), found.learned_from, found.steps, found.score.shape) == (19, 19, 3, (3, 4))
    texts = [tuple(examples.ids[slice(*examples.starts[i : i + 2])]) for i in range(23)]
    of_known = [tuple(known.ids[slice(*known.starts[i : i + 2])]) for i in range(19)]
    held_out = [i for i, text in enumerate(texts) if text not in of_known]
    assert len(held_out) == 4
    for (_, one, _), score, loss in zip(seen, found.score, found.loss, strict=True):
        for place, i in enumerate(held_out):
            label = torch.tensor([int(examples.labels[i])])
            with torch.no_grad():
                out = one(**inputs_of(one, examples, i), labels=label)
            assert score[place] == (out.logits.argmax(-1) == label).item()
            assert loss[place] == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-5)
    commonest = np.bincount(known.labels).argmax()
    np.testing.assert_array_equal(found.baseline, examples.labels[held_out] == commonest)
    intervals = found.intervals(seed=1)
    assert list(intervals) == [*STARTS, "baseline"]
    assert intervals["frozen"].mean == found.score[0].mean()
    assert (intervals["frozen"].n, intervals["frozen"].seed) == (4, 1)


@pytest.mark.sweep
def test_numbers(tmp_path, seen):
    """A regression: squared errors, and the mean for a baseline."""
    examples = replace(labelled(20), labels=np.linspace(-1, 1, 20, dtype=np.float32))
    found = starts(directory(tmp_path), examples, settings=SHORT)
    assert found.score_name == "negative squared error"
    np.testing.assert_array_equal(found.score, -found.loss)
    known = seen[0][2].labels
    held_out = np.setdiff1d(examples.labels, known)
    np.testing.assert_allclose(found.baseline, -((held_out - known.mean()) ** 2), rtol=1e-5)


@pytest.mark.sweep
def test_one_seed_one_result(tmp_path):
    model, examples = directory(tmp_path), labelled(20)
    state = torch.get_rng_state()
    one, other, another = (starts(model, examples, settings=replace(SHORT, seed=seed)) for seed in (4, 4, 6))
    np.testing.assert_array_equal(one.loss, other.loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert not np.array_equal(one.loss, another.loss)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (None, "labels: the examples have none"),
        (
            np.array(["a"] * 12),
            r"labels: expected an integer or a float per example, got <U1 of shape \(12,\)",
        ),
        (np.zeros((12, 2)), r"labels: expected .*, got float64 of shape \(12, 2\)"),
        (np.arange(12) - 1, r"labels\[0\]: expected a class from 0 on, got -1"),
        (np.full(12, np.nan), r"labels\[0\]: expected finite"),
    ],
)
def test_bad_labels(tmp_path, labels, expected):
    with pytest.raises(ValueError, match=expected):
        starts(tiny_model(tmp_path), replace(labelled(12), labels=labels))


def test_too_few_examples(tmp_path):
    with pytest.raises(ValueError, match=r"examples: expected 10 at least, .* got 9"):
        starts(tiny_model(tmp_path), labelled(9))
