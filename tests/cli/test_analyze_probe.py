"""`fastbert analyze probe`: labels and trees by layer, beside random weights, on files and models on disk."""

from __future__ import annotations

import argparse
import json
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import transformers

import fastbert
from fastbert.analysis.features import hidden_states, with_random_weights
from fastbert.analysis.probing import edge_probe
from fastbert.analysis.targets import of_treebank
from fastbert.analysis.treebank import as_examples, read_conllu
from fastbert.cli.analyses.loading import naming_lines
from fastbert.cli.main import main
from fastbert.cli.usage import UsageError
from fastbert.sentences.tokenizer import load_tokenizer
from tests.support.hf_models import hf_config
from tests.support.treebank import TREES, conllu

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dog ran to house . , !"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a tokenizer, a treebank, and labelled spans."""
    place = tmp_path_factory.mktemp("probe")
    torch.manual_seed(0)
    transformers.BertModel(hf_config("bert")).save_pretrained(place / "encoder")
    (place / "encoder" / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
    (place / "trees.conllu").write_text(conllu(TREES * 5))
    rows = [
        {"text": "the cat sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": ["x", "y"]}]},
        {"text": "a dog ran", "targets": [{"span1": [1, 2], "span2": [0, 3], "label": "z"}]},
    ] * 10
    (place / "edges.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def call(folder, output, *more):
    arguments = ["analyze", "probe", "--model", folder / "encoder", "--output", output, "--device", "cpu"]
    return main([*map(str, arguments), *map(str, more)])


KINDS = {
    "edge": (["layers", "weights"], "F1: "),
    "mdl": (["layers"], "compression: "),
    "control": (["layers"], "selectivity: "),
    "structural": (["layers", "correlation"], "UUAS: "),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result(folder, tmp_path, capsys, kind, drawn):
    pictures, says = KINDS[kind]
    output = tmp_path / "out"
    assert call(folder, output, "--conllu", folder / "trees.conllu", "--probe", kind, "--seed", 3) == 0
    said = capsys.readouterr().out
    expected = {"probe.json", "probe.npz"} | {f"{p}.{end}" for p in pictures for end in ("svg", "png")}
    assert {path.name for path in output.iterdir()} == expected
    numbers = json.loads((output / "probe.json").read_text())
    assert (numbers["probe"], numbers["seed"], numbers["n"]) == (kind, 3, 40)
    assert all(line in said for line in numbers["summary"])
    assert f"  {says}" in said
    assert "with random weights: " in said
    assert "seed 3" in said
    assert len(numbers["intervals"]) == 4
    for picture in pictures:
        ElementTree.parse(output / f"{picture}.svg")


def test_the_numbers_are_the_librarys(folder, tmp_path, capsys):
    output = tmp_path / "out"
    more = ("--conllu", folder / "trees.conllu", "--label", "relation")
    assert call(folder, output, *more) == 0
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
    assert call(folder, tmp_path / "out", "--edges", folder / "edges.jsonl") == 0
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


def test_links(folder, tmp_path, capsys, request):
    from fastbert.analysis.links import links
    from fastbert.analysis.targets import of_texts, read_edges

    file, output = folder / "edges.jsonl", tmp_path / "out"
    arguments = ["analyze", "links", "--model", folder / "encoder", "--output", output, "--edges", file]
    assert main([*map(str, arguments), "--device", "cpu", "--seed", "3"]) == 0
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
    request.getfixturevalue("no_work")
    for given, expected in (
        (["--edges", "nothing.jsonl"], "nothing.jsonl"),
        ([], "--edges: links needs a file of labelled spans"),
        (["--edges", str(file), "--input", "x"], "--input: links does not read it; expected --edges alone"),
        (["--edges", str(file), "--max-examples", "3"], "expected 4 with links at least"),
    ):
        out = ["--output", str(tmp_path / "none")]
        assert main(["analyze", "links", "--model", str(folder / "encoder"), *out, *given]) == 2
        assert expected in capsys.readouterr().err
    same = {"text": "a dog ran", "targets": [{"span1": [1, 2], "span2": [1, 2], "label": "z"}]}
    (tmp_path / "same.jsonl").write_text(file.read_text() + "\n" + json.dumps(same) + "\n")
    given = [*arguments[:-1], tmp_path / "same.jsonl"]
    given[given.index("--output") + 1] = tmp_path / "none"
    assert main([str(each) for each in given]) == 2
    assert "same.jsonl, line 22: targets[20]: a link needs two tokens" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"out", "same.jsonl"}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "--conllu, --edges: probe needs a treebank in the CoNLL-U format or a file of labelled spans"),
        (["--input", "x"], "--conllu, --edges: probe needs a treebank"),
        (
            ["--conllu", "trees.conllu", "--input", "x"],
            "--input: probe does not read it; expected --conllu or",
        ),
        (["--conllu", "trees.conllu", "--edges", "edges.jsonl"], "--edges: probe reads one file; expected"),
        (["--edges", "edges.jsonl", "--probe", "structural"], "--probe structural: needs trees; expected"),
        (
            ["--edges", "edges.jsonl", "--probe", "mdl"],
            r"edges\.jsonl, line 1: targets\[0\]: expected one label, got 2",
        ),
        (["--conllu", "trees.conllu", "--max-examples", "9"], "examples: a split needs 10 with a target"),
        (
            ["--edges", "edges.jsonl", "--probe", "control"],
            r"edges\.jsonl, line 1: targets\[0\]: expected one label, got 2",
        ),
        (
            ["--conllu", "trees.conllu", "--max-examples", "9", "--probe", "structural"],
            "sentences: a split needs 10 of two words at least, got 8",
        ),
        (["--edges", "nothing.jsonl"], "nothing.jsonl"),
        (["--edges", "edges.jsonl", "--label", "upos"], "--label: --edges takes none"),
        (["--conllu", "trees.conllu", "--probe", "structural", "--label", "upos"], "structural takes none"),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, no_work, more, expected):
    files = ("trees.conllu", "edges.jsonl", "nothing.jsonl")
    assert call(folder, tmp_path / "out", *(folder / each if each in files else each for each in more)) == 2
    said = capsys.readouterr()
    assert re.search(expected, said.err), said.err
    assert len(said.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


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
