"""`fastbert analyze probe`: labels and trees by layer, beside random weights, on files and models on disk."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest
import torch

import fastbert
from fastbert.analysis.features import hidden_states, with_random_weights
from fastbert.analysis.probing import edge_probe
from fastbert.analysis.targets import of_treebank
from fastbert.analysis.treebank import as_examples, read_conllu
from fastbert.cli.analyses.loading import naming_lines
from fastbert.cli.main import main
from fastbert.cli.usage import UsageError
from fastbert.sentences.tokenizer import load_tokenizer
from tests.cli.conftest import call

KINDS = {
    "edge": (["layers", "weights"], "F1: "),
    "mdl": (["layers"], "compression: "),
    "control": (["layers"], "selectivity: "),
    "structural": (["layers", "correlation"], "UUAS: "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result(folder, tmp_path, capsys, kind):
    pictures, says = KINDS[kind]
    output = tmp_path / "out"
    assert call(folder, "probe", "encoder", "trees.conllu", output, "--probe", kind, "--seed", 3) == 0
    said = capsys.readouterr().out
    expected = {"probe.json", "probe.npz"} | {f"{p}.{end}" for p in pictures for end in ("svg", "png")}
    assert {path.name for path in output.iterdir()} == expected
    numbers = json.loads((output / "probe.json").read_text())
    assert (numbers["probe"], numbers["seed"], numbers["n"]) == (kind, 3, 24)
    assert all(line in said for line in numbers["summary"])
    assert f"  {says}" in said
    assert "with random weights: " in said
    assert "seed 3" in said
    assert len(numbers["intervals"]) == 4


def test_the_numbers_are_the_librarys(folder, tmp_path, capsys):
    output = tmp_path / "out"
    assert call(folder, "probe", "encoder", "trees.conllu", output, "--label", "relation") == 0
    numbers = json.loads((output / "probe.json").read_text())
    model = fastbert.AutoModel.from_pretrained(folder / "encoder").eval()
    sentences = read_conllu(folder / "trees.conllu")
    examples = as_examples(load_tokenizer(folder / "encoder"), sentences)
    targets = of_treebank(sentences, examples, "relation")
    assert numbers["labels"] == list(targets.label_names)
    assert numbers["targets"] == len(targets)
    for one, key in ((model, "f1"), (with_random_weights(model, 0), "f1_random_weights")):
        found = edge_probe(hidden_states(one, examples, targets.rows), targets, seed=0)
        np.testing.assert_allclose(numbers[key], found.scores(), atol=0.02)
    assert "published: 5.69 and 13.75 for dependencies, BERT-large" in capsys.readouterr().out


def test_labelled_spans(folder, tmp_path, capsys):
    assert call(folder, "probe", "encoder", "edges.jsonl", tmp_path / "out") == 0
    numbers = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert (numbers["labels"], numbers["targets"], numbers["n"]) == (["x", "y", "z"], 20, 20)
    assert numbers["edges"] == str(folder / "edges.jsonl")
    assert "label" not in numbers
    assert "published" not in capsys.readouterr().out
    # the words of each target are told from each other by any layer
    assert max(numbers["f1"]) > 0.9


def test_random_weights_are_of_the_same_form(folder):
    model = fastbert.AutoModel.from_pretrained(folder / "encoder")
    state = torch.random.get_rng_state()
    one, again, other = (with_random_weights(model, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not one.training
    assert type(one) is type(model)
    for name, value in model.state_dict().items():
        fresh = one.state_dict()[name]
        assert fresh.shape == value.shape
        assert torch.equal(fresh, again.state_dict()[name])
        if value.dim() == 2:
            assert not torch.equal(fresh, value)
            assert not torch.equal(fresh, other.state_dict()[name])


def test_links(folder, tmp_path, capsys):
    from fastbert.analysis.links import links
    from fastbert.analysis.targets import of_texts, read_edges

    file, output = folder / "edges.jsonl", tmp_path / "out"
    assert call(folder, "links", "encoder", file.name, output, "--seed", 3) == 0
    said = capsys.readouterr().out
    assert {path.name for path in output.iterdir()} == {
        *(f"links.{end}" for end in ("json", "npz")),
        *(f"scores.{end}" for end in ("svg", "png")),
    }
    numbers, arrays = json.loads((output / "links.json").read_text()), np.load(output / "links.npz")
    texts = read_edges(file)
    model = fastbert.AutoModel.from_pretrained(folder / "encoder").eval()
    examples = as_examples(load_tokenizer(folder / "encoder"), texts)
    found = links(model, examples, of_texts(texts, examples), seed=3)
    np.testing.assert_allclose(arrays["score"], found.score, rtol=1e-5)
    best = found.best()
    assert numbers["best"]["score"] == pytest.approx(best.score._asdict(), rel=1e-5)
    assert (numbers["links"], numbers["examples_with_links"]) == (20, 20)
    assert f"largest score {found.scores().max():.3f} at " in said
    assert "published: 1-2 0.201, 7-6 0.209 (Kovaleva" in said
    same = {"text": "a dog ran", "targets": [{"span1": [1, 2], "span2": [1, 2], "label": "z"}]}
    (tmp_path / "same.jsonl").write_text(file.read_text() + "\n" + json.dumps(same) + "\n")
    more = ("--edges", tmp_path / "same.jsonl")
    assert call(folder, "links", "encoder", None, tmp_path / "none", *more) == 2
    assert "same.jsonl, line 22: targets[20]: a link needs two tokens" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"out", "same.jsonl"}


@pytest.mark.parametrize(
    "command", [["probe", "--probe", "structural"], ["report", "--input", "edges.jsonl"]]
)
def test_without_scipy(folder, tmp_path, capsys, monkeypatch, no_work, command):
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "scipy", None)
    files = ["--model", "encoder", "--conllu", "trees.conllu", "--output", str(tmp_path / "out")]
    assert main(["analyze", *command, *files, "--device", "cpu"]) == 2
    assert "structural probes need SciPy: pip install 'fastbert-kernels[analysis]'" in capsys.readouterr().err


def test_a_number_among_those_that_are_kept_names_no_line_of_the_file(folder):
    """With --on-long error, all sentences of the file are kept."""
    file = folder / "trees.conllu"
    for on_long, said in ((None, "examples"), ("error", rf"{file}, line \d+: examples")):
        args = argparse.Namespace(input=None, conllu=file, edges=None, on_long=on_long)
        problem = rf"^{said}\[3\]: bad$"
        with pytest.raises((ValueError, UsageError), match=problem), naming_lines(args, None):
            raise ValueError("examples[3]: bad")
