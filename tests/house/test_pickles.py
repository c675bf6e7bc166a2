"""Pickles from before the modules moved into rooms load, and their models answer as they did."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from pathlib import Path

import pytest
import torch

import fastbert
from fastbert.runtime import moved
from tests.support.old_pickles import TINY, answer

FOLDER = Path(__file__).parent / "pickles"
ANSWERS = json.loads((FOLDER / "answers.json").read_text())
MODELS = sorted(path.stem for path in FOLDER.glob("*.txt") if path.stem in ANSWERS)


def stored(name: str) -> bytes:
    return zlib.decompress(base64.b64decode((FOLDER / f"{name}.txt").read_text()))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_before_answers_as_it_did(name):
    model = pickle.loads(stored(name))
    assert type(model) is getattr(fastbert, name)
    torch.testing.assert_close(answer(model), torch.tensor(ANSWERS[name]), rtol=1e-5, atol=1e-6)
    again = io.BytesIO()
    torch.save(model, again)
    again.seek(0)
    assert torch.equal(answer(torch.load(again, weights_only=False)), answer(model))


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
