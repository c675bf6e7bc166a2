"""The same training from three starts: beside a loop by hand, and what each start may change."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from fastbert.analysis import starts as module
from fastbert.analysis.starts import FROZEN, PRETRAINED, RANDOM, STARTS, Recipe, starts, trained
from fastbert.tasks.examples import tokenized
from fastbert.training.stream import Stream
from tests.analysis.conftest import PAIRS, TEXTS, make_tokenizer
from tests.support.analysis import both, inputs_of
from tests.support.hf_models import FAMILY_NAMES

STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = ("dog", "mat", "tree", "red", "house", "rain", "the", "a")


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


def classifier(family: str = "bert", **config):
    """One of ours, in float32."""
    return copy.deepcopy(both(family, num_labels=2, **config)[1]).float()


def by_hand(model, examples, recipe: Recipe, seed: int) -> int:
    """AdamW on transformers' model, an example at a time; returns the number of steps."""
    decayed = [p for name, p in model.named_parameters() if "LayerNorm" not in name and "bias" not in name]
    plain = [p for name, p in model.named_parameters() if "LayerNorm" in name or "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, eps=1e-8)
    stream = Stream(module._Source(examples, True), seed, sequences=recipe.batch_size)
    steps = -(-recipe.epochs * len(examples) // recipe.batch_size)
    warm = 0.1 * steps
    for step in range(steps):
        share = step / warm if step < warm else (steps - step) / (steps - warm)
        for group in adam.param_groups:
            group["lr"] = recipe.lr * share
        numbers = [index for _, index in stream.examples(step)]
        losses = [
            model(**inputs_of(model, examples, i), labels=torch.tensor([int(examples.labels[i])])).loss
            for i in numbers
        ]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    return steps


@pytest.mark.sweep
@pytest.mark.parametrize("batch_tokens", [4096, 30], ids=["whole batches", "cut batches"])
def test_the_training_is_that_of_a_loop_by_hand(batch_tokens):
    theirs, ours = (copy.deepcopy(each) for each in both("bert", num_labels=2, **STILL))
    examples = tokenized(make_tokenizer(), TEXTS, PAIRS, labels=[0, 1, 0, 1, 0])
    recipe = Recipe(epochs=4, batch_size=2, lr=1e-3)
    before = copy.deepcopy(ours.state_dict())
    steps = trained(ours, examples, recipe=recipe, seed=3, batch_tokens=batch_tokens)
    assert steps == by_hand(theirs.train(), examples, recipe, 3) == 10
    after, expected = ours.state_dict(), theirs.state_dict()
    for name, value in after.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)
    moved = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert len(moved) > 0.9 * len(after)
    assert not ours.training


@pytest.fixture
def seen(monkeypatch):
    """(weights before, weights after, examples, model) of each training."""
    found, real = [], module.trained

    def spy(model, examples, **options):
        before = copy.deepcopy(model.state_dict())
        steps = real(model, examples, **options)
        found.append((before, model.state_dict(), examples, model))
        return steps

    monkeypatch.setattr(module, "trained", spy)
    return found


def changed(one, other) -> set[str]:
    return {name for name, value in one.items() if not torch.equal(value, other[name].to(value.dtype))}


def others_in_the_sweep(family: str):
    return family if family in ("bert", "roberta") else pytest.param(family, marks=pytest.mark.sweep)


@pytest.mark.sweep
@pytest.mark.parametrize("family", [others_in_the_sweep(name) for name in FAMILY_NAMES])
def test_what_each_start_changes(seen, family):
    model = classifier(family)
    whole = copy.deepcopy(model.state_dict())
    starts(model, labelled(20), recipe=Recipe(1, 8, 1e-3))
    assert changed(whole, model.state_dict()) == set()
    assert len(seen) == len(STARTS)
    head = {name for name in whole if not name.startswith(f"{model.base_model_prefix}.")}
    pooler = f"{model.base_model_prefix}.{model.config.family.pooler}"
    pooled = {name for name in whole if model.config.family.pooler and name.startswith(f"{pooler}.")}
    matrices = {name for name, value in whole.items() if value.dim() > 1}
    befores, afters = ([each[i] for each in seen] for i in range(2))
    # all begin with one head, a new one
    for before in befores:
        assert not changed(befores[0], before) & head
    assert head & matrices <= changed(whole, befores[0])
    for number in (FROZEN, PRETRAINED):
        assert changed(whole, befores[number]) <= head
    assert matrices <= changed(whole, befores[RANDOM])
    assert changed(befores[FROZEN], afters[FROZEN]) <= head | pooled
    assert head & matrices <= changed(befores[FROZEN], afters[FROZEN])
    for number in (RANDOM, PRETRAINED):
        learned = changed(befores[number], afters[number])
        assert matrices - {name for name in matrices if "position" in name or "token_type" in name} <= learned


@pytest.mark.sweep
def test_scores_are_those_of_the_others(seen):
    """Split, scores and baseline, by the models' own forward."""
    model, examples = classifier(), labelled(23)
    found = starts(model, examples, recipe=Recipe(1, 8, 1e-3), seed=5)
    known = seen[0][2]
    assert all(each[2] is known for each in seen)
    assert (len(known), found.learned_from, found.score.shape) == (19, 19, (3, 4))
    texts = [tuple(examples.ids[slice(*examples.starts[i : i + 2])]) for i in range(23)]
    of_known = [tuple(known.ids[slice(*known.starts[i : i + 2])]) for i in range(19)]
    held_out = [i for i, text in enumerate(texts) if text not in of_known]
    assert len(held_out) == 4
    for (*_, one), score, loss in zip(seen, found.score, found.loss, strict=True):
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


def test_the_baseline_is_of_what_was_learned_from():
    known, held_out = np.array([1, 1, 0]), np.array([0, 0, 1])
    np.testing.assert_array_equal(module._baseline(known, held_out, "accuracy"), [0, 0, 1])
    several = module._baseline(np.array([[1, 0], [1, 0], [0, 0]]), np.array([[0, 0], [1, 1]]), "accuracy")
    np.testing.assert_array_equal(several, [0.5, 0.5])
    numbers = module._baseline(np.array([1.0, 3.0]), np.array([0.0]), "negative squared error")
    np.testing.assert_array_equal(numbers, [-4.0])


@pytest.mark.sweep
def test_numbers(seen):
    """A regression: squared errors, and the mean for a baseline."""
    model = copy.deepcopy(both("bert", num_labels=1)[1]).float()
    examples = labelled(20)
    examples = replace(examples, labels=np.linspace(-1, 1, 20, dtype=np.float32))
    found = starts(model, examples, recipe=Recipe(1, 8, 1e-3))
    assert found.score_name == "negative squared error"
    np.testing.assert_array_equal(found.score, -found.loss)
    known = seen[0][2].labels
    held_out = np.setdiff1d(examples.labels, known)
    np.testing.assert_allclose(found.baseline, -((held_out - known.mean()) ** 2), rtol=1e-5)


@pytest.mark.sweep
def test_one_seed_one_result():
    model, examples = classifier(), labelled(20)
    state = torch.get_rng_state()
    one, other = (starts(model, examples, recipe=Recipe(1, 8, 1e-3), seed=4) for _ in range(2))
    np.testing.assert_array_equal(one.loss, other.loss)
    assert torch.equal(torch.get_rng_state(), state)
    another = starts(model, examples, recipe=Recipe(1, 8, 1e-3), seed=6)
    assert not np.array_equal(one.loss, another.loss)


def test_bad_input():
    examples = labelled(12)
    with pytest.raises(TypeError, match="model: expected one with a head for sequence classification"):
        starts(both("bert", "ForMaskedLM")[1], examples)
    with pytest.raises(ValueError, match="model: is quantised, and cannot learn"):
        starts(classifier().quantize("int8"), examples)
    with pytest.raises(ValueError, match=r"examples: expected 10 at least, .* got 9"):
        starts(classifier(), examples.chosen(range(9)))
    with pytest.raises(ValueError, match=r"labels\[1\]: 2 is no class; expected 0 to 1"):
        starts(classifier(), replace(examples, labels=np.arange(12) + 1))
    with pytest.raises(ValueError, match="labels: BertForSequenceClassification needs them"):
        starts(classifier(), replace(examples, labels=None))
    with pytest.raises(ValueError, match="epochs: expected an integer >= 1, got 0"):
        Recipe(epochs=0)
    for value in (0, float("nan")):
        with pytest.raises(ValueError, match="lr: expected a finite number > 0"):
            Recipe(lr=value)
