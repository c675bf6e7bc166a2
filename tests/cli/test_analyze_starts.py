"""`fastbert analyze starts`: three trainings by one command, and every mistake in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fastbert.analysis import starts as analysis
from fastbert.analysis.intervals import estimate
from fastbert.training.loop import Interrupted
from tests.cli.conftest import call

SMALL = ["--epochs", "1", "--batch-size", "8", "--lr", "1e-3"]


@pytest.mark.parametrize(
    ("model", "more", "labels", "score"),
    [
        ("words", ["--labels", "class"], [0, 1, 2], "accuracy"),
        ("classes", ["--labels", "name", "--pairs"], ["x", "y", "z"], "accuracy"),
        ("words", ["--labels", "number"], None, "negative squared error"),
    ],
)
def test_a_result(folder, tmp_path, capsys, model, more, labels, score):
    """From any directory, also one with a head for other classes."""
    assert call(folder, "starts", model, "starts.jsonl", tmp_path / "out", *more, *SMALL, "--seed", "3") == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: starts of 20 examples" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"starts.{end}" for end in ("json", "npz", "svg", "png")
    }
    numbers = json.loads((tmp_path / "out" / "starts.json").read_text())
    arrays = np.load(tmp_path / "out" / "starts.npz")
    assert (numbers["labels"], numbers["score"]) == (labels, score)
    assert (numbers["learned_from"], numbers["cases"], numbers["steps"]) == (16, 4, 2)
    assert (numbers["epochs"], numbers["batch_size"], numbers["lr"]) == (1, 8, 1e-3)
    assert arrays["score"].shape == (3, 4)
    for name, row in zip(analysis.STARTS, arrays["score"], strict=True):
        assert numbers["intervals"][name]["mean"] == pytest.approx(row.mean())
        assert f"  {name}: {score} {estimate(row, seed=3).text('.4f')}\n" in said
    assert numbers["intervals"]["baseline"]["mean"] == pytest.approx(arrays["baseline"].mean())
    assert "MRPC 31.6 / 68.3 / 82.3" in said
    assert "intervals over 4 examples, seed 3" in said


def test_one_seed_one_result(folder, tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(len(name))
        torch.randn(7 if name == "b" else 3)
        assert (
            call(folder, "starts", "words", "starts.jsonl", tmp_path / name, "--labels", "class", *SMALL) == 0
        )
    one, other = (np.load(tmp_path / name / "starts.npz")["loss"] for name in ("a", "b"))
    np.testing.assert_array_equal(one, other)


def test_a_signal_ends_it_and_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    def stopped(*args, **options):
        raise Interrupted(15, None)

    monkeypatch.setattr(analysis, "starts", stopped)
    assert call(folder, "starts", "words", "starts.jsonl", tmp_path / "out", "--labels", "class") == 128 + 15
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
