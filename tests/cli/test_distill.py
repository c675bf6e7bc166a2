"""`fastbert distill`: what is printed, a stop and its resumption, and mistakes in a line."""

from __future__ import annotations

import json
import re
import signal

import pytest

import fastbert
from fastbert.cli.main import main
from fastbert.compression.distillation.recipes import RECIPES
from tests.cli.conftest import signalled
from tests.support.rule_tasks import quick, tiny_model, written


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distil")
    tiny_model(folder / "base")
    written("csv", folder / "data", 24, 12)
    quick("csv", folder / "base", folder / "data", folder / "teacher", epochs=1)
    return folder


def distil(places, output, *more):
    given = ["distill", "--teacher", places / "teacher", "--data", places / "data", "--output", output]
    quick = ["--epochs", "1", "--batch-size", "8", "--max-length", "32", "--device", "cpu", "--no-progress"]
    return main([*map(str, [*given, *quick, *more])])


def test_what_is_printed(places, tmp_path, capsys):
    more = ["--layers", "0,1", "--recipe", "pkd", "--layer-map", "2", "--weights", "kd=.9,task=.1"]
    more += ["--temperature", "4", "--lr", "1e-4", "--seed", "3", "--cache", tmp_path / "cache"]
    assert distil(places, tmp_path / "out", *more) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'out'}: pkd\n")
    for name in ("parameters", "size, MB", "MFLOP per token, 128 tokens", "tokens per second"):
        assert re.search(rf"\n  {name} +\S+ -> +\S+  \d+\.\d\d x\n", said), name
    assert re.search(r"\n  accuracy on dev +\d\.\d{4} -> +\d\.\d{4}\n", said)
    assert re.search(r"\n  patient_loss +\S+\n", said)
    assert all(f"\n  published: {row}\n" in said for row in RECIPES["pkd"].published)
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["pairs"] == [[1, 2]]
    assert stored["phases"][0]["weights"] == {"kd": 0.9, "task": 0.1, "patient": 500.0}
    assert (stored["temperature"], stored["settings"]["seed"]) == (4.0, 3)
    assert stored["phases"][0]["lr"] == 1e-4
    assert (tmp_path / "cache" / "outputs.safetensors").is_file()
    found = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert len(found.base_model.layer_list()) == 2


def test_a_bilstm(places, tmp_path, capsys):
    assert distil(places, tmp_path / "out", "--student", "bilstm") == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{tmp_path / 'out'}: bilstm\n")
    assert "\n  published: BiLSTM: 110 x smaller" in said


def test_a_sentence_encoder(places, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("the red cat\n" * 9)
    found = fastbert.SentenceEncoder.from_pretrained(places / "base")
    found.save_pretrained(tmp_path / "teacher")
    more = ["--teacher", tmp_path / "teacher", "--data", tmp_path / "texts.txt", "--recipe", "sentences"]
    family = ["--student-family", "distilbert"]
    assert distil(places, tmp_path / "out", *more, "--layers", "0", *family) == 0
    said = capsys.readouterr().out
    assert re.search(r"\n  parameters +\S+ -> +\S+  \d+\.\d\d x\n", said)
    assert re.search(r"\n  vectors_loss +\S+\n", said)
    assert fastbert.SentenceEncoder.from_pretrained(tmp_path / "out").model.config.model_type == "distilbert"


def test_a_stopped_command_says_how_to_resume(places, tmp_path, capsys):
    with signalled(signal.SIGTERM, 0):
        assert distil(places, tmp_path / "out", "--layers", "1") == 128 + signal.SIGTERM
    assert "rerun the command to resume" in capsys.readouterr().err
    assert distil(places, tmp_path / "out", "--layers", "1") == 0
    assert "resumes from step 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--layers 0,x", "argument --layers: expected numbers with commas between, got '0,x'"),
        ("--layers 0 --layer-map a", "argument --layer-map: expected numbers with commas between, got 'a'"),
        ("--layers 0 --weights kd", "--weights kd: expected LOSS=X, with commas between"),
        ("--layers 0 --student DIR", "argument --student: not allowed with argument --layers"),
        ("--recipe kd", "one of the arguments --student --layers is required"),
        ("--layers 5", "layers: expected ascending numbers of 2 layers, got [5]"),
        ("--layers 0 --lr 1,x", "argument --lr: expected numbers with commas between, got '1,x'"),
    ],
)
def test_mistakes(places, tmp_path, capsys, given, message):
    assert distil(places, tmp_path / "out", *given.split()) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
