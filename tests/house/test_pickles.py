"""Pickles from before the modules moved into rooms load, and their models return the same as then."""

from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from fastbert.layers.quantized import is_quantized
from fastbert.runtime import moved
from tests.support.old_pickles import ACCELERATED, QUANTIZED, TINY, answer, own

FOLDER = Path(__file__).parent / "pickles"
ANSWERS = json.loads((FOLDER / "answers.json").read_text())
MODELS = sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem in ANSWERS and "-" not in path.stem)
# The transformers whose classes the pickles of accelerated models name; they are made with the first
TRANSFORMERS = "5.23.", "5.24."
with_transformers = pytest.mark.skipif(
    not transformers.__version__.startswith(TRANSFORMERS),
    reason=f"the pickles are of transformers {TRANSFORMERS[0]}x",
)


def stored(name: str) -> bytes:
    return zlib.decompress(base64.b64decode((FOLDER / f"{name}.txt").read_text()))


def assert_answers_as_before(thing: object, name: str) -> None:
    """Now, and after it was saved and loaded once more."""
    torch.testing.assert_close(answer(thing), torch.tensor(ANSWERS[name]), rtol=1e-5, atol=1e-6)
    again = io.BytesIO()
    torch.save(thing, again)
    again.seek(0)
    assert torch.equal(answer(torch.load(again, weights_only=False)), answer(thing))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_before_answers_as_it_did(name):
    model = pickle.loads(stored(name))
    assert type(model) is getattr(fastbert, name)
    assert_answers_as_before(model, name)


@with_transformers
@pytest.mark.parametrize("name", ACCELERATED)
def test_an_accelerated_model_of_before_stays_accelerated(name):
    model = pickle.loads(stored(name))
    assert_answers_as_before(model, name)
    report = fastbert.explain(model)
    if name == "accelerated-prelayernorm":
        assert "(calls: 2 fused)" in str(report)
    else:
        assert (report.fused_layers, [m.unpads for m in report.models]) == (1, [True])
        assert report.layers[0].int8 == (name == "accelerated-bert-int8")
    fastbert.restore(model)
    assert type(model) is getattr(transformers, ACCELERATED[name][0])


@with_transformers
def test_an_accelerated_sentence_transformer_of_before_stays_accelerated():
    pytest.importorskip("sentence_transformers", minversion="6")
    model = pickle.loads(stored("accelerated-sentences"))
    assert_answers_as_before(model, "accelerated-sentences")
    assert fastbert.explain(model).fused_layers == 1
    assert type(model).__mro__[1].__name__ == "AcceleratedSentences"


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantised_model_of_before_stays_quantised(name):
    model = pickle.loads(stored(name))
    assert type(model) is getattr(fastbert, QUANTIZED[name][0])
    assert is_quantized(model)
    assert_answers_as_before(model, name)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()


@pytest.mark.parametrize("name", ["sentence-encoder", "sentence-encoder-int8"])
def test_a_sentence_encoder_of_before_answers_as_it_did(name):
    encoder = pickle.loads(stored(name))
    assert type(encoder) is fastbert.SentenceEncoder
    assert is_quantized(encoder.model) == name.endswith("int8")
    assert_answers_as_before(encoder, name)
    assert (encoder.normalize, encoder.max_length, encoder.similarity_fn_name) == (True, 6, "cosine")


def test_a_graphed_model_says_that_it_has_no_pickle():
    """It had none before either: TypeError, cannot pickle a lock."""
    graphed = fastbert.graph(own("BertModel", "bert"))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"GraphedModel: .*model and call fastbert\.graph again"):
            copied(graphed)


def test_other_objects_of_before():
    config = pickle.loads(stored("config"))
    assert type(config) is fastbert.EncoderConfig
    assert config.to_dict() == fastbert.EncoderConfig(**TINY).to_dict()
    output = pickle.loads(stored("output"))
    assert torch.equal(output[0], output.last_hidden_state)
    assert isinstance(pickle.loads(stored("error")), fastbert.CheckpointError)
    classes = pickle.loads(stored("classes"))
    assert {cls.__name__ for cls in classes} <= set(fastbert.__all__)
    assert all(getattr(fastbert, cls.__name__) is cls for cls in classes)


def test_every_place_is_right():
    for module, names in moved.PLACES.items():
        for name in names:
            assert moved.find(f"fastbert.{module}", name).__name__ == name


def test_other_names_of_modules_that_are_gone_are_refused():
    with pytest.raises(ModuleNotFoundError):
        __import__("fastbert.no_such_module")
    with pytest.raises(AttributeError, match=r"module 'fastbert.heads' has no attribute 'Nothing'"):
        moved.find("fastbert.heads", "Nothing")
