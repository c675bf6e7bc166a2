"""`fastbert quantize`: a small directory that loads, what it prints, and every mistake in one line."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

import fastbert
from fastbert.cli.analyses.loading import model_of
from fastbert.cli.main import main
from fastbert.finetuning.run import COPIED, copy_files
from fastbert.layers import float8
from fastbert.layers.quantizing import kinds_of
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("the cat sat\na dog\nthe dog sat on the cat\n", encoding="utf-8")
    return file


def quantize(folder, model, output, *more):
    return main([*map(str, ["quantize", "--model", folder / model, "--output", output, *more])])


@pytest.mark.parametrize(
    ("weights", "embeddings"), [("int8", "int8"), ("int4", "int4"), ("float", "int8"), ("int8", "float")]
)
def test_a_model_with_a_head(folder, tmp_path, capsys, texts, weights, embeddings):
    given = ["--weights", weights, "--embeddings", embeddings, "--input", texts]
    assert quantize(folder, "classes", tmp_path / "out", *given) == 0
    said = capsys.readouterr().out
    for name in ("parameters", "size, MB", "MFLOP per token, 128 tokens", "tokens per second"):
        assert re.search(rf"\n  {name} +\S+.* -> +\S+", said), name
    least = float(re.search(r"\n  cosine, 3 texts +(\S+) the least", said)[1])
    assert 0.8 < least <= 1.0
    kinds = tuple(None if kind == "float" else kind for kind in (weights, embeddings))
    expected = model_of(str(folder / "classes"), "cpu").quantize(kinds[0], embeddings=kinds[1])
    found = model_of(str(tmp_path / "out"), "cpu")
    assert kinds_of(found) == kinds
    assert all(torch.equal(t, found.state_dict()[key]) for key, t in expected.state_dict().items())
    assert load_tokenizer(tmp_path / "out").get_vocab() == load_tokenizer(folder / "classes").get_vocab()
    stored = sum(t.nbytes for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert f"-> {stored / 1e6:>14,.1f}" in said
    assert ("published, for comparison: Zafrir 2019" in said) == (weights == "int8")


def test_each_file_beside_the_weights_is_copied(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    copy_files(source, target)
    assert not any(target.iterdir())
    for name in (*COPIED, "model.safetensors"):
        (source / name).write_text(name)
    copy_files(source, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {name: name for name in COPIED}


def test_8_bit_floats_are_written_without_a_gpu(folder, tmp_path, capsys, texts, monkeypatch):
    given = ["--weights", "fp8", "--input", texts, "--report"]
    assert quantize(folder, "classes", tmp_path / "out", *given) == 0
    said = capsys.readouterr().out
    assert "tokens per second" not in said
    assert 0.8 < float(re.search(r"\n  cosine, 3 texts +(\S+) the least", said)[1]) <= 1.0
    assert len(re.findall(r"\n  (bert\.\S+)  +([\d.]+)  +([\d.]+)  +([\d.]+)", said)) == 18
    monkeypatch.setattr(float8, "gap", lambda device: None)
    found = fastbert.BertForSequenceClassification.from_pretrained(tmp_path / "out")
    expected = fastbert.BertForSequenceClassification.from_pretrained(folder / "classes").bfloat16()
    for name, value in expected.quantize("fp8").state_dict().items():
        assert torch.equal(found.state_dict()[name].float(), value.float()), name
    assert quantize(folder, "classes", tmp_path / "both", "--weights", "fp8", "--embeddings", "int8") == 2
    assert "embeddings: expected None with fp8, got 'int8'" in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


def test_a_sentence_encoder_stays_one(folder, tmp_path, capsys, texts):
    SentenceEncoder.from_pretrained(folder / "encoder", pooling="cls").save_pretrained(tmp_path / "whole")
    given = ["--embeddings", "int8", "--input", texts, "--report"]
    assert quantize(tmp_path, "whole", tmp_path / "out", *given) == 0
    said = capsys.readouterr().out
    found = SentenceEncoder.from_pretrained(tmp_path / "out")
    assert found.pooling == "cls"
    assert kinds_of(found.model) == ("int8", "int8")
    lines = texts.read_text(encoding="utf-8").splitlines()
    expected = SentenceEncoder.from_pretrained(tmp_path / "whole").quantize(embeddings="int8").encode(lines)
    assert (found.encode(lines) == expected).all()
    # The table, and six linear layers in each of three layers
    rows = re.findall(r"\n  (\S+)  +([\d.]+)  +([\d.-]+)  +([\d.-]+)", said.partition("outliers")[2])
    assert len(rows) == 1 + 3 * 6
    assert rows[0][0] == "embeddings.word_embeddings"
    assert rows[0][2:] == ("-", "-")
    assert all(float(number) > 1 for row in rows[1:] for number in row[1:])


@pytest.mark.parametrize("kind", ["encoder", "classes", "sentences"])
def test_smoothing_by_typical_texts(folder, tmp_path, capsys, texts, kind):
    lines = texts.read_text(encoding="utf-8").splitlines()
    place = folder / kind
    if kind == "sentences":
        place = tmp_path / "whole"
        SentenceEncoder.from_pretrained(folder / "encoder", pooling="cls").save_pretrained(place)
    given = ["--smooth", "0.5", "--calibrate", texts]
    assert quantize(place.parent, place.name, tmp_path / "out", *given) == 0
    if kind == "sentences":
        expected = SentenceEncoder.from_pretrained(place).quantize(smooth=0.5, calibrate=lines).model
        found = SentenceEncoder.from_pretrained(tmp_path / "out").model
    else:
        expected, found = (model_of(str(each), "cpu", pooler=True) for each in (place, tmp_path / "out"))
        encoder = SentenceEncoder(expected.base_model, load_tokenizer(place))
        expected.quantize(smooth=0.5, calibrate=lambda: encoder.encode(lines))
    state = found.state_dict()
    assert any(key.endswith(".smooth") for key in state)
    assert all(torch.equal(value, state[key]) for key, value in expected.state_dict().items())


@pytest.mark.parametrize("kind", ["static", "float"])
def test_activations(folder, tmp_path, texts, kind):
    lines, more = texts.read_text(encoding="utf-8").splitlines(), {}
    given = ["--activations", kind, *(["--calibrate", texts] if kind == "static" else [])]
    assert quantize(folder, "encoder", tmp_path / "out", *given) == 0
    expected, found = (
        model_of(str(each), "cpu", pooler=True) for each in (folder / "encoder", tmp_path / "out")
    )
    if kind == "static":
        encoder = SentenceEncoder(expected.base_model, load_tokenizer(folder / "encoder"))
        more = {"calibrate": lambda: encoder.encode(lines)}
    state = expected.quantize(activations=kind, **more).state_dict()
    assert state.keys() == found.state_dict().keys()
    assert any(key.endswith(".input_range") for key in state) == (kind == "static")
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in state.items())


def test_an_encoder_keeps_its_pooler(folder, tmp_path, capsys):
    assert quantize(folder, "encoder", tmp_path / "out", "--report") == 0
    found = fastbert.BertModel.from_pretrained(tmp_path / "out")
    whole = fastbert.BertModel.from_pretrained(folder / "encoder")
    assert torch.equal(found.pooler.dense.weight, whole.pooler.dense.weight)
    assert "cosine" not in capsys.readouterr().out


def test_the_report_is_of_the_smoothed_layers(folder, tmp_path, capsys, texts):
    tables = []
    for name, more in (("plain", []), ("smooth", ["--smooth", "0.5", "--calibrate", texts])):
        assert quantize(folder, "classes", tmp_path / name, "--input", texts, "--report", *more) == 0
        said = capsys.readouterr().out
        tables.append(re.findall(r"\n  (bert\.\S+)  +([\d.]+)  +([\d.]+)  +([\d.]+)", said))
    plain, smooth = tables
    assert len(plain) == len(smooth) == 18
    assert plain != smooth
    assert [(row[0], row[3]) for row in plain] == [(row[0], row[3]) for row in smooth]


def test_mistakes(folder, tmp_path, capsys):
    shutil.copytree(folder / "classes", tmp_path / "there")
    for more, message in (
        (["--weights", "float"], "--weights, --embeddings: expected bits for at least one"),
        (["--smooth", "0.5"], "calibrate: expected typical inputs with smooth, got None"),
        (["--activations", "static"], "calibrate: expected typical inputs with activations='static'"),
        (["--calibrate", tmp_path / "there" / "vocab.txt"], "calibrate: expected None without smooth"),
        (
            ["--smooth", "2", "--calibrate", tmp_path / "there" / "vocab.txt"],
            "smooth: expected None or a number",
        ),
        (["--weights", "int3"], "argument --weights: invalid choice: 'int3'"),
        (["--input", tmp_path / "none.txt"], "none.txt"),
    ):
        assert quantize(folder, "classes", tmp_path / "out", *more) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert quantize(folder, "classes", tmp_path / "there") == 2
    assert "there" in capsys.readouterr().err
    assert quantize(folder, "classes", tmp_path / "out") == 0
    assert quantize(tmp_path, "out", tmp_path / "again", "--weights", "int4") == 2
    assert "has 8 bits already, got 'int4'" in capsys.readouterr().err
