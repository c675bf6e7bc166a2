"""Every analysis with the model on a device that is not the CPU: the same numbers, every tensor in its place.

The device is tests/support/fake_gpu.py, which refuses an operation of tensors on two devices.
tests/analysis/test_device.py runs this in a process of its own.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch

from fastbert.analysis import change as changes
from fastbert.analysis import geometry as geometries
from fastbert.analysis import probing, starts, structure, syntax, targets
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.effective import effective_attention
from fastbert.analysis.features import hidden_states
from fastbert.analysis.fixed import fixed_heads
from fastbert.analysis.heads import ablate, importance, pruning_curve
from fastbert.analysis.maps import attention_maps, example_maps
from fastbert.analysis.probes import Recipe
from fastbert.analysis.treebank import as_examples, read_conllu
from fastbert.finetuning.settings import Settings
from fastbert.tasks.examples import masked, paired, tokenized
from tests.analysis.conftest import PAIRS, TEXTS, make_tokenizer
from tests.support import fake_gpu
from tests.support.model_pairs import build, model_of
from tests.support.treebank import conllu

CLOSE = dict(rtol=1e-4, atol=1e-5)


def pair(task="", name="bert", **config):
    """(a model on the CPU, the same on the device), without dropout."""
    model = build(name, task, **config)[1] if task else model_of(name, **config)
    return model, fake_gpu.move(copy.deepcopy(model))


def alike(found, expected):
    """Every array of two results."""
    if is_dataclass(expected):
        for field in fields(expected):
            alike(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            alike(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            alike(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.device.type == "cpu"
        torch.testing.assert_close(found, expected, **CLOSE)
    elif isinstance(expected, (np.ndarray, float)):
        np.testing.assert_allclose(found, expected, **CLOSE)
    else:
        assert found == expected


def both_ways(function, models):
    on_cpu, on_device = models
    expected = function(on_cpu)
    with fake_gpu.waits():
        found = function(on_device)
    alike(found, expected)
    return expected


@pytest.fixture(autouse=True)
def no_inference_tensors(monkeypatch):
    """The fake device's tensors cannot be inference tensors."""
    plain = contextlib.nullcontext
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad() if mode else plain())


@pytest.fixture(scope="module")
def plain():
    return tokenized(make_tokenizer(), TEXTS)


@pytest.fixture(scope="module")
def labelled():
    return replace(tokenized(make_tokenizer(), TEXTS, pairs=PAIRS), labels=np.array([0, 2, 1, 1, 0]))


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    path = tmp_path_factory.mktemp("trees") / "trees.conllu"
    path.write_text(conllu())
    return read_conllu(path)


@pytest.mark.parametrize("family", ["bert", "distilbert", "albert", "mpnet"])
def test_statistics(plain, family):
    both_ways(lambda model: attention_statistics(model, plain), pair(name=family))


def test_maps(plain):
    models = pair()
    both_ways(lambda model: attention_maps(model, plain, 1), models)
    found = attention_statistics(models[0], plain)
    both_ways(lambda model: example_maps(model, plain, found), models)


@pytest.mark.parametrize("unit", ["head", "all-but-one", "layer"])
@pytest.mark.parametrize("mode", ["zero", "uniform"])
def test_ablation(labelled, unit, mode):
    models = pair("ForSequenceClassification", num_labels=3)
    both_ways(lambda model: ablate(model, labelled, unit=unit, mode=mode), models)


def test_importance_and_pruning(labelled):
    models = pair("ForSequenceClassification", num_labels=3)
    found = both_ways(lambda model: importance(model, labelled), models)
    both_ways(lambda model: pruning_curve(model, labelled, found.order()), models)


def test_masked_words_and_pairs(plain):
    hidden_words = masked(plain, 4)
    both_ways(lambda model: importance(model, hidden_words), pair("ForMaskedLM"))
    two = paired(make_tokenizer(), TEXTS, PAIRS, labels=[0.5, 1.0, -1.0, 0.0, 0.3])
    both_ways(lambda model: importance(model, two, pooling="mean"), pair())


def test_fixed_patterns(labelled):
    models = pair("ForSequenceClassification", num_labels=3)
    both_ways(lambda model: fixed_heads(model, labelled), models)
    assignment = np.resize(np.arange(10), (3, 3))
    both_ways(lambda model: fixed_heads(model, labelled, assignment), models)


def test_change(plain):
    one, other = pair(), pair(name="bert")
    for model in other:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    expected = changes.change(one[0], other[0], plain)
    with fake_gpu.waits():
        alike(changes.change(one[1], other[1], plain), expected)


def test_effective_attention_and_geometry(plain):
    both_ways(lambda model: effective_attention(model, plain), pair())
    both_ways(lambda model: geometries.geometry(model, plain), pair())


def test_syntax(sentences):
    examples = as_examples(make_tokenizer(), sentences)
    both_ways(lambda model: syntax.attention_by_label(model, examples, sentences), pair())
    both_ways(lambda model: syntax.parse(model, examples, sentences), pair())


def test_probes(sentences):
    """On the device, of hidden states that the model has put there or elsewhere."""
    examples = as_examples(make_tokenizer(), sentences * 4)
    rows = np.flatnonzero(examples.words >= 0)
    told = targets.of_treebank(sentences * 4, examples, "upos")
    states = both_ways(lambda model: hidden_states(model, examples, rows, dtype=torch.float32), pair())
    recipe = Recipe(inner=8, dropout_p=0.1, batch=16, epochs=3)

    def with_device(function, *given, **options):
        expected = function(*given, **options)
        with fake_gpu.waits():
            alike(function(*given, **options, device=fake_gpu.DEVICE), expected)

    with_device(probing.edge_probe, states, told, recipe=recipe)
    with_device(probing.online_code, states, told, recipe=recipe)
    with_device(probing.control_task, states, told)
    with_device(structure.structural_probe, states, sentences * 4, examples, rank=4, epochs=2)


def test_three_starts(tmp_path, monkeypatch, labelled):
    """Of a head that learns on the device: the same scores, to rounding."""
    model = pair("ForSequenceClassification", num_labels=3)[0]
    model.config.update({"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
    model.save_pretrained(tmp_path)
    first_model, made = starts.first_model, {}

    def first(kind, place, settings, *given):
        """The weights that the CPU began with: PyTorch draws others below a dispatch mode."""
        if settings not in made:
            made[settings] = first_model(kind, place, settings, *given)
        return copy.deepcopy(made[settings])

    monkeypatch.setattr(starts, "first_model", first)
    many = labelled.chosen([*range(5)] * 4)
    settings = Settings(lr=1e-3, epochs=1, batch_size=8, max_length=64)
    expected = starts.starts(tmp_path, many, settings=settings)
    with fake_gpu.waits():
        alike(starts.starts(tmp_path, many, settings=settings, device=fake_gpu.DEVICE), expected)
