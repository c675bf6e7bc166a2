"""`fastbert analyze starts`: three trainings by one command, and every mistake in one line."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import transformers

from fastbert.analysis import starts as analysis
from fastbert.analysis.intervals import estimate
from fastbert.cli.main import main
from fastbert.training.loop import Interrupted
from tests.support.hf_models import hf_config

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dog ran to house . , !"
SMALL = ["--epochs", "1", "--batch-size", "8", "--lr", "1e-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with a tokenizer, and files with labels."""
    place = tmp_path_factory.mktemp("starts")
    for name, cls, options in (
        ("words", transformers.BertForMaskedLM, {}),
        ("classes", transformers.BertForSequenceClassification, {"num_labels": 2}),
    ):
        torch.manual_seed(0)
        cls(hf_config("bert", **options)).save_pretrained(place / name)
        (place / name / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    subjects, verbs = (
        ("cat", "dog", "mat", "house", "the cat"),
        ("sat .", "ran !", "ran to a mat", "sat on the"),
    )
    rows = [
        {
            "text": f"a {s} {v}",
            "pair": "the dog",
            "class": c,
            "number": c + 0.5,
            "name": "xyz"[c],
            "list": [c],
        }
        for s in subjects
        for c, v in zip((0, 1, 2, 1), verbs, strict=True)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def call(folder, model, output, *more):
    arguments = ["analyze", "starts", "--model", folder / model, "--input", folder / "rows.jsonl"]
    return main([*map(str, arguments), "--output", str(output), "--device", "cpu", *map(str, more)])


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
    assert call(folder, model, tmp_path / "out", *more, *SMALL, "--seed", "3") == 0
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
        assert call(folder, "words", tmp_path / name, "--labels", "class", *SMALL) == 0
    one, other = (np.load(tmp_path / name / "starts.npz")["loss"] for name in ("a", "b"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], r"--labels: starts needs the key of the labels in .*rows\.jsonl"),
        (["--labels", "nothing"], "nothing"),
        (["--labels", "list"], "--labels list: expected a class or a number per example"),
        (["--labels", "class", "--max-examples", "1"], "--labels class: expected two classes at least"),
        (["--labels", "class", "--max-examples", "9"], "examples: expected 10 at least"),
        (["--labels", "class", "--max-examples", "0"], "--max-examples: expected an integer >= 1"),
        (["--labels", "class", "--epochs", "0"], "epochs: expected an integer >= 1, got 0"),
        (["--labels", "class", "--batch-size", "-1"], "batch_size: expected an integer >= 1, got -1"),
        (["--labels", "class", "--lr", "0"], "lr: expected a finite number > 0, got 0.0"),
        (["--labels", "class", "--against", "x"], "--against: starts takes none"),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, more, expected):
    assert call(folder, "words", tmp_path / "out", *more) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("fastbert: ")]
    assert re.search(expected, lines[-1]), said.err
    assert len(lines) == 1
    assert list(tmp_path.iterdir()) == []


def test_others_take_no_recipe(folder, tmp_path, capsys):
    arguments = ["analyze", "attention", "--model", folder / "words", "--input", folder / "rows.jsonl"]
    for option in ("--epochs", "--batch-size", "--lr"):
        assert main([*map(str, arguments), "--output", str(tmp_path / "out"), option, "1"]) == 2
        assert f"{option}: attention takes none" in capsys.readouterr().err


def test_a_signal_ends_it_and_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    def stopped(*args, **options):
        raise Interrupted(15, None)

    monkeypatch.setattr(analysis, "starts", stopped)
    assert call(folder, "words", tmp_path / "out", "--labels", "class") == 128 + 15
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
