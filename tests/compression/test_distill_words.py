"""A cache of the likeliest words: the losses of a live teacher, masks that repeat, resuming, mistakes."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from safetensors.torch import load_file

import fastbert
from fastbert.compression.distillation import data
from fastbert.compression.distillation.cache import FILE
from fastbert.training.loop import TrainingError
from tests.support.rule_tasks import WORDS, logged, resumes, tiny_model

GIVEN = {"lr": 1e-3, "epochs": 2, "batch_size": 8, "max_length": 32, "progress": False}
MOST = len(WORDS) - 1


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A masked-LM teacher and a text."""
    folder = tmp_path_factory.mktemp("words")
    tiny_model(folder / "words", kind="BertForMaskedLM")
    lines = (" ".join(random.Random(i).choices(WORDS[5:], k=8)) for i in range(60))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    return folder


def distil(places, output, student=(0,), **options):
    student = list(student) if isinstance(student, tuple) else student
    given = {**GIVEN, **options}
    return fastbert.distill(places / "words", student, places / "text.txt", output, "distilbert", **given)


def test_all_words_are_the_live_teacher(places, tmp_path, monkeypatch):
    text_of = data.text_of
    with monkeypatch.context() as patch:
        # The masks, and so the order, of a run with a cache
        patch.setattr(data, "text_of", lambda *given: text_of(*given[:-1], 1))
        distil(places, tmp_path / "live", epochs=2)
    for name, words in (("all", MOST), ("few", 3), ("one", 1)):
        distil(places, tmp_path / name, epochs=2, cache=tmp_path / f"cache-{name}", cache_words=words)
    live, whole, few, one = (logged(tmp_path / name) for name in ("live", "all", "few", "one"))
    for line, other in zip(live, whole, strict=True):
        assert line == pytest.approx(other, rel=1e-4)
    # A loss of fewer words is a lower bound
    assert one[0]["kd_loss"] < few[0]["kd_loss"] < live[0]["kd_loss"]
    assert few[0]["mlm_loss"] == pytest.approx(live[0]["mlm_loss"], rel=1e-4)


def test_losses_fall_and_a_cache_is_read_again(places, tmp_path):
    for name in ("first", "second"):
        distil(places, tmp_path / name, epochs=4, cache=tmp_path / "cache")
    lines = logged(tmp_path / "first")
    assert lines == logged(tmp_path / "second")
    for loss in ("kd", "mlm", "cosine"):
        curve = [line[f"{loss}_loss"] for line in lines]
        assert np.mean(curve[-3:]) < np.mean(curve[:3]), loss
    stored = load_file(tmp_path / "cache" / FILE)
    total = stored["words"].shape[0]
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        "words": (total, 32),
        "word_scores": (total, 33),
        "states.2": (total, 64),
    }
    assert json.loads((tmp_path / "first" / "results.json").read_text())["cache_words"] == 32


def test_masks_repeat_in_each_epoch(places, tmp_path):
    # A student that is the teacher has no loss as long as both see the same masks
    found = distil(places, tmp_path / "out", (0, 1), lr=1e-9, epochs=3, cache=tmp_path / "cache")
    lines = logged(tmp_path / "out")
    assert max(line["kd_loss"] for line in lines) < 1e-5
    assert max(line["cosine_loss"] for line in lines) < 1e-5
    assert found.last["step"] == len(lines) > 2 * len(lines) // 3
    distil(places, tmp_path / "seed", (0, 1), lr=1e-9, epochs=1, cache=tmp_path / "other", seed=1)
    assert logged(tmp_path / "seed")[0]["mlm_loss"] != lines[0]["mlm_loss"]


def test_a_stopped_run_resumes_to_the_same_bytes(places, tmp_path, monkeypatch):
    options = {"cache": tmp_path / "cache"}
    resumes(monkeypatch, 4, tmp_path, lambda out: distil(places, out, **options))
    with pytest.raises(TrainingError, match=r"^cache_words: the run in"):
        distil(places, tmp_path / "part", cache=tmp_path / "new", cache_words=5)


def test_scores_are_those_of_one_temperature(places, tmp_path):
    distil(places, tmp_path / "out", cache=tmp_path / "cache", cache_words=4, epochs=0.2)
    changes = (
        ("temperature", {"temperature": 3.0}),
        ("cache_words", {"cache_words": 5}),
        ("data", {"seed": 1}),
    )
    for name, changed in changes:
        options = {"cache": tmp_path / "cache", "cache_words": 4, "epochs": 0.2, **changed}
        with pytest.raises(ValueError, match=rf"cache: .* was made with another {name}"):
            distil(places, tmp_path / "other", **options)
    # Without the loss of words there are none in the file
    weights = {"kd": 0}
    distil(places, tmp_path / "cosine", weights=weights, cache=tmp_path / "states", epochs=0.2)
    assert load_file(tmp_path / "states" / FILE).keys() == {"states.2"}


@pytest.mark.parametrize("given", [0, MOST + 1, 2.0])
def test_a_wrong_number_of_words(places, tmp_path, given):
    with pytest.raises(ValueError, match=f"cache_words: expected an integer from 1 to {MOST}, got {given}"):
        distil(places, tmp_path / "out", cache=tmp_path / "cache", cache_words=given)


def test_words_of_no_cache(places, tmp_path):
    message = "cache_words: expected None, as no scores of words are cached, got 4"
    with pytest.raises(ValueError, match=message):
        distil(places, tmp_path / "out", cache_words=4)
    with pytest.raises(ValueError, match=message):
        distil(places, tmp_path / "out", cache=tmp_path / "c", cache_words=4, weights={"kd": 0})
