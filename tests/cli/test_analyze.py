"""`fastbert analyze`: a directory of results, whole or not at all, and every mistake in one line."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from unittest import mock

import numpy as np
import pytest
import torch

import fastbert
from fastbert.analysis import results, starts, syntax
from fastbert.analysis.annotations import fit, read_patterns
from fastbert.analysis.attention import PATTERNS, attention_statistics, shares_of
from fastbert.analysis.features import hidden_states, with_random_weights
from fastbert.analysis.fixed import NAMES, PREVIOUS, SEPARATORS, fixed_heads
from fastbert.analysis.intervals import estimate
from fastbert.analysis.links import links
from fastbert.analysis.probing import edge_probe
from fastbert.analysis.targets import of_texts, of_treebank, read_edges
from fastbert.analysis.treebank import as_examples, read_conllu
from fastbert.cli.analyses.loading import naming_lines
from fastbert.cli.main import main
from fastbert.cli.usage import UsageError
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import tokenized
from fastbert.tasks.inputs import read
from fastbert.tasks.published import STARTS
from fastbert.training.loop import Interrupted
from tests.cli.conftest import LINES, call, write_rows
from tests.support.treebank import TREES, conllu

CALLS = {
    "attention": ("encoder", "lines.txt", [], ["entropy", "looked-at"]),
    "patterns": ("classes", "rows.jsonl", ["--pairs"], ["shares", "commonest"]),
    "heads": ("classes", "rows.jsonl", ["--labels", "class", "--unit", "all-but-one"], ["score", "loss"]),
    "importance": ("words", "lines.txt", ["--seed", "3"], ["importance", "pruning"]),
    "fixed": ("classes", "rows.jsonl", ["--labels", "class"], ["assignment", "change"]),
    "change": ("encoder", "lines.txt", [], ["attention", "layers"]),
    "effective": ("encoder", "rows.jsonl", ["--pairs"], ["correlation", "lengths"]),
    "geometry": ("encoder", "many.txt", [], ["layers"]),
    "syntax": ("encoder", "four.conllu", [], ["labels", "scores", "heads", "relations"]),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_result(folder, tmp_path, capsys, kind):
    model, file, more, pictures = CALLS[kind]
    if kind == "change":
        more = ["--against", str(folder / "words")]
    output = tmp_path / "new" / "out"
    assert call(folder, kind, model, file, output, *more) == 0
    said = capsys.readouterr().out
    assert f"{output}: {kind} of 4 examples" in said
    expected = {f"{kind}.json", f"{kind}.npz"} | {f"{p}.{end}" for p in pictures for end in ("svg", "png")}
    assert {path.name for path in output.iterdir()} == expected
    numbers = json.loads((output / f"{kind}.json").read_text())
    assert (numbers["n"], numbers["schema"], numbers["kind"]) == (4, 1, kind)
    assert re.fullmatch("[0-9a-f]{64}", numbers["config_sha256"])
    assert all(line in said for line in numbers["summary"])
    assert [path.name for path in output.parent.iterdir()] == ["out"]


def statistics_of(folder, file):
    model = fastbert.AutoModel.from_pretrained(folder / "encoder").eval()
    return attention_statistics(model, tokenized(load_tokenizer(folder / "encoder"), **read(folder / file)))


def test_the_numbers_are_the_librarys(folder, tmp_path):
    assert call(folder, "attention", "encoder", "lines.txt", tmp_path / "out") == 0
    arrays, found = np.load(tmp_path / "out" / "attention.npz"), statistics_of(folder, "lines.txt")
    np.testing.assert_allclose(arrays["entropy"], found.entropy, rtol=1e-5)
    np.testing.assert_allclose(arrays["to_separators"], found.to_kind[1], rtol=1e-5)


MEASURED = {
    "answers": ("answers", "squad.jsonl", [], "exact match"),
    "answers by a key": ("answers", "squad.jsonl", ["--labels", "answers", "--pairs"], "exact match"),
    "pairs": ("encoder", "pairs.tsv", ["--pairs"], "cosine"),
    "rated pairs": ("encoder", "like.jsonl", ["--pairs", "--labels", "like"], "negative squared error"),
}


@pytest.mark.parametrize("kind", ["heads", "importance", "fixed"])
@pytest.mark.parametrize("which", MEASURED)
def test_answers_and_pairs(folder, tmp_path, capsys, kind, which):
    model, file, more, score = MEASURED[which]
    assert call(folder, kind, model, file, tmp_path / "out", *more) == 0
    numbers = json.loads((tmp_path / "out" / f"{kind}.json").read_text())
    assert numbers["score"] == score
    assert (numbers["pooling"], numbers["cases"]) == ("mean" if model == "encoder" else None, 4)
    arrays = np.load(tmp_path / "out" / f"{kind}.npz")
    name = {"heads": "loss", "importance": "derivatives", "fixed": "loss"}[kind]
    assert arrays[name].shape == ((4,) if kind == "fixed" else (4, 3, 3))
    said = capsys.readouterr().out
    assert ("the pairs have no labels (--labels): a model that makes all texts alike" in said) == (
        which == "pairs"
    )
    assert ("removable" in numbers) == (kind == "importance" and which != "pairs")


def test_answers_are_where_the_file_says(folder, tmp_path):
    """The loss is that of the words in the file: no answer is the first token."""
    assert call(folder, "heads", "answers", "squad.jsonl", tmp_path / "out") == 0
    model = fastbert.AutoModelForQuestionAnswering.from_pretrained(folder / "answers").eval()
    tokenizer = load_tokenizer(folder / "answers")
    # [CLS] the cat [SEP], then the second word of the line
    for number, (line, place) in enumerate(zip(LINES, (5, 5, 5, 0), strict=True)):
        encoded = tokenizer.encode("the cat", line)
        ids, types = torch.tensor([encoded.ids]), torch.tensor([encoded.type_ids])
        at = torch.tensor([place])
        with torch.no_grad():
            loss = model(ids, token_type_ids=types, start_positions=at, end_positions=at).loss
        found = np.load(tmp_path / "out" / "heads.npz")["base_loss"][number]
        assert found == pytest.approx(loss.item(), rel=1e-5)


def test_pairs_as_the_sentence_encoder_sees_them(folder, tmp_path, capsys):
    """Pooling, prompt, length and lower case of a sentence-transformers directory."""
    base = fastbert.AutoModel.from_pretrained(folder / "encoder", add_pooling_layer=False)
    settings = {"pooling": "cls", "prompt": "a dog ", "max_length": 8, "lower_case": True}
    encoder = fastbert.SentenceEncoder(base, load_tokenizer(folder / "encoder"), **settings)
    encoder.save_pretrained(tmp_path / "sentences")
    more = ("--pairs", "--on-long", "truncate")
    assert call(tmp_path, "heads", "sentences", folder / "pairs.tsv", tmp_path / "out", *more) == 0
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["pooling"] == "cls"
    one, two = (torch.from_numpy(encoder.encode(texts)) for texts in (LINES, ["the cat ran"] * 4))
    expected = torch.nn.functional.cosine_similarity(one, two).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "out" / "heads.npz")["base_score"], expected, rtol=1e-4)
    assert call(tmp_path, "heads", "sentences", folder / "pairs.tsv", tmp_path / "long", "--pairs") == 2
    assert "examples[0]: 11 tokens; the encoder reads at most 8" in capsys.readouterr().err


def test_annotations(folder, tmp_path, capsys):
    """Labels by the size of a feature: the classifier finds them, and the shares are its own."""
    pytest.importorskip("sklearn")
    statistics = statistics_of(folder, "lines.txt")
    high = statistics.features()["d"] > np.median(statistics.features()["d"])
    rows = [
        {"example": i, "layer": j, "head": k, "pattern": "diagonal" if high[i, j, k] else "block"}
        for i, j, k in np.ndindex(high.shape)
    ]
    write_rows(tmp_path / "mine.jsonl", rows)
    more = ("--annotations", tmp_path / "mine.jsonl", "--seed", 3)
    assert call(folder, "patterns", "encoder", "lines.txt", tmp_path / "out", *more) == 0
    numbers = json.loads((tmp_path / "out" / "patterns.json").read_text())
    arrays = np.load(tmp_path / "out" / "patterns.npz")
    named = read_patterns(tmp_path / "mine.jsonl", PATTERNS, {"example": 4, "layer": 3, "head": 3})
    expected = fit(statistics, named, seed=3)
    assert numbers["annotations"]["macro_f1"] == pytest.approx(expected.macro_f1)
    assert numbers["annotations"]["macro_f1"] > 0.6
    assert numbers["annotations"]["counts"] == expected.counts
    assert np.array_equal(arrays["patterns"], expected.patterns(statistics))
    assert numbers["shares"] == shares_of(arrays["patterns"])
    assert set(np.unique(arrays["patterns"])) == {1, 3}
    assert f"macro-F1 {expected.macro_f1:.2f} over 5 folds of 36 labelled maps" in capsys.readouterr().out
    write_rows(tmp_path / "bad.jsonl", [rows[0] | {"head": 3}])
    more = ("--annotations", tmp_path / "bad.jsonl")
    assert call(folder, "patterns", "encoder", "lines.txt", tmp_path / "bad", *more) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "bad.jsonl, line 1: head: expected an integer from 0 to 2, got 3" in error


def test_an_assignment_of_ones_own(folder, tmp_path, capsys):
    rows = [{"layer": 0, "head": 2, "pattern": "previous"}, {"layer": 2, "head": 1, "pattern": "separators"}]
    write_rows(tmp_path / "mine.jsonl", rows)
    more = ("--pairs", "--labels", "class", "--assignment", str(tmp_path / "mine.jsonl"))
    assert call(folder, "fixed", "classes", "rows.jsonl", tmp_path / "out", *more) == 0
    assert "2 of 9 heads attend by a pattern: previous 1, separators 1" in capsys.readouterr().out
    arrays = np.load(tmp_path / "out" / "fixed.npz")
    assignment = np.zeros((3, 3), np.int8)
    assignment[0, 2], assignment[2, 1] = PREVIOUS, SEPARATORS
    assert np.array_equal(arrays["assignment"], assignment)
    model = fastbert.AutoModelForSequenceClassification.from_pretrained(folder / "classes").eval()
    examples = tokenized(
        load_tokenizer(folder / "classes"), **read(folder / "rows.jsonl", pairs=True, labels="class")
    )
    found = fixed_heads(model, examples, assignment)
    np.testing.assert_allclose(arrays["loss"], found.loss, rtol=1e-5)
    numbers = json.loads((tmp_path / "out" / "fixed.json").read_text())
    assert numbers["names"] == list(NAMES)
    assert numbers["patterns"]["loss_change"] == pytest.approx(found.loss_change(), rel=1e-4, abs=1e-6)
    assert numbers["zero"]["score_change"] == pytest.approx(found.score_change(zero=True))
    assert numbers["patterns"]["interval"] == pytest.approx(found.interval()[1:3])
    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[0] | {"pattern": "diagonal"}) + "\n")
    more = (*more[:-1], str(tmp_path / "bad.jsonl"))
    assert call(folder, "fixed", "classes", "rows.jsonl", tmp_path / "bad", *more) == 2
    assert "bad.jsonl, line 1: pattern: expected one of learned, current," in capsys.readouterr().err


MISTAKES = [
    ("heads encoder --input lines.txt", r"--model .*encoder: heads of BertModel, which has no head, .*pairs"),
    ("heads encoder --input like.jsonl --pairs --labels text", "labels: expected cosines"),
    ("heads answers --input rows.jsonl", "line 1: expected an object with 'answers'"),
    ("heads answers --input rows.jsonl --labels class", r"answers\[0\]: expected .*, got 0"),
    ("importance answers --input pairs.tsv", "labels: .*pairs.tsv has none; expected a .jsonl"),
    ("heads classes --input rows.jsonl", "--labels: heads of BertForSequenceClassification needs"),
    ("attention encoder --input rows.jsonl --labels class", "--labels: attention needs none"),
    ("heads classes --input rows.jsonl --labels text", r"labels\[0\]: 'the cat .* is none of the config's"),
    ("attention encoder --input nothing.txt", "nothing.txt"),
    ("attention encoder --input lines.txt --pairs", "lines.txt, line 1: expected two texts"),
    ("attention encoder --input lines.txt --max-examples 0", "--max-examples: expected an integer"),
    ("attention encoder --input lines.txt --seed -1", "--seed -1: expected an integer >= 0"),
    ("attention nothing --input lines.txt", "nothing"),
    ("change encoder --input lines.txt", "--against: change needs the directory of a second model"),
    ("attention encoder", "--input: attention needs a file of examples"),
    ("syntax encoder --input lines.txt", "--conllu: syntax needs a treebank in the CoNLL-U format"),
    ("syntax encoder --conllu four.conllu --input lines.txt", "--input: syntax does not read it; .*--conllu"),
    ("patterns encoder --input lines.txt --conllu four.conllu", "--conllu: patterns does not read it"),
    ("syntax encoder --conllu nothing", "nothing"),
    ("syntax encoder --conllu four.conllu --pairs", "--pairs: syntax needs none"),
    ("attention encoder --input lines.txt --unit head", "--unit: attention takes none"),
    ("syntax encoder --conllu four.conllu --on-long truncate", "--on-long: a tree is not cut"),
    ("links encoder --edges nothing", "nothing"),
    ("links encoder", "--edges: links needs a file of labelled spans"),
    (
        "probe encoder",
        "--conllu, --edges: probe needs a treebank in the CoNLL-U format or a file of labelled",
    ),
    ("probe encoder --conllu trees.conllu --edges edges.jsonl", "--edges: probe reads one file; expected"),
    ("probe encoder --edges edges.jsonl --probe structural", "--probe structural: needs trees; expected"),
    (
        "probe encoder --edges edges.jsonl --probe mdl",
        r"edges.jsonl, line 1: targets\[0\]: expected one label",
    ),
    ("probe encoder --edges edges.jsonl --probe control", r"line 1: targets\[0\]: expected one label, got 2"),
    ("probe encoder --edges edges.jsonl --label upos", "--label: --edges takes none"),
    ("starts words --input starts.jsonl", r"--labels: starts needs the key of the labels in .*starts\.jsonl"),
    ("starts words --input starts.jsonl --labels list", "--labels list: expected a class or a number per"),
    ("starts words --input starts.jsonl --labels class --max-examples 1", "class: expected two classes at"),
    ("report words --input rows.jsonl --labels class", "--labels: the report of BertForMaskedLM needs none"),
    ("report classes --input rows.jsonl --labels text", r"labels\[0\]: 'the cat .* is none of the config's"),
    (
        "report words --input lines.txt --conllu longer.conllu --on-long error",
        r"longer.conllu, line 2: sentences\[0\]: 102 tokens, expected 72 at most",
    ),
]


@pytest.mark.parametrize(("line", "expected"), MISTAKES)
def test_a_mistake_is_one_line(folder, tmp_path, capsys, no_work, line, expected):
    kind, model, *more = (folder / each if (folder / each).exists() else each for each in line.split())
    assert call(folder, kind, model, None, tmp_path / "out", *more) == 2
    said = [each for each in capsys.readouterr().err.splitlines() if each.startswith("fastbert: ")]
    assert len(said) == 1
    assert re.search(expected, said[0]), said
    assert list(tmp_path.iterdir()) == []


def test_what_ends_all_work_is_seen_before_it(folder, tmp_path, capsys, monkeypatch, no_work):
    """No place for the results, no matplotlib for the figures."""
    monkeypatch.setattr(results.os, "access", lambda path, mode: False)
    assert call(folder, "attention", "encoder", "lines.txt", tmp_path / "new" / "out") == 2
    assert f"{tmp_path}: no results can be written there" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert call(folder, "attention", "encoder", "lines.txt", tmp_path / "out") == 2
    assert "pictures need matplotlib: pip install" in capsys.readouterr().err


DEEP = "[" * 100_000
PAIR = '{{"text": "the cat", "pair": "a dog", "class": {}}}'
BAD_FILES = [
    ("attention", "encoder", "--input", ('{"text": "a"}', DEEP), "no JSON"),
    ("attention", "encoder", "--input", ('{"text": "a"}', '{"text": "\\ud83d"}'), "half of a surrogate pair"),
    ("attention", "encoder", "--input", ('{"text": "a"}', '{"text": "\udcff"}'), "not UTF-8"),
    ("attention", "encoder", "--input", ('{"text": "a"}', '{"text": "%s"}' % ("a " * 99)), "101 tokens"),
    ("probe", "encoder", "--edges", ('{"text": "a", "targets": []}', DEEP), "no JSON"),
    ("patterns", "encoder", "--annotations", ("", DEEP), "no JSON"),
    *(
        ("heads", "classes", "--input", (PAIR.format(0), PAIR.format(label)), f"labels[1]: {expected}")
        for label, expected in (
            ("NaN", "expected finite numbers, got nan"),
            ("1e400", "expected finite numbers, got inf"),
            ("1" + "0" * 30, "expected a number, a text, or a list of numbers, got 1000"),
            ('"the"', "expected a label like labels[0], 0, got 'the'"),
            ("7", "7 is no class; expected 0 to 1"),
        )
    ),
    ("starts", "classes", "--input", (PAIR.format(0), PAIR.format("NaN")), "labels[1]: expected finite"),
    ("heads", "encoder", "--input", (PAIR.format(0), PAIR.format(3)), "labels[2]: 3 is no cosine"),
]


@pytest.mark.parametrize(("kind", "model", "option", "lines", "expected"), BAD_FILES)
def test_a_mistake_in_a_file_names_its_line(folder, tmp_path, capsys, kind, model, option, lines, expected):
    """An empty line is no example, and has its number."""
    file = tmp_path / "bad.jsonl"
    file.write_text("\n\n".join(lines) + "\n", errors="surrogateescape")
    more = [] if option in ("--input", "--edges") else ["--input", folder / "lines.txt"]
    more += ["--pairs", "--labels", "class"] if "class" in lines[0] else []
    assert call(folder, kind, model, None, tmp_path / "out", option, file, *more) == 2
    error = capsys.readouterr().err
    assert f"{file}, line 3: " in error
    assert expected in error
    assert len(error.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_the_numbers_of_a_treebank(folder, tmp_path, capsys):
    file = tmp_path / "many.conllu"
    file.write_text(conllu(TREES * 12))
    assert call(folder, "syntax", "encoder", file, tmp_path / "out", "--seed", "3") == 0
    said = capsys.readouterr().out
    numbers = json.loads((tmp_path / "out" / "syntax.json").read_text())
    arrays = np.load(tmp_path / "out" / "syntax.npz")
    model = fastbert.AutoModel.from_pretrained(folder / "encoder").eval()
    sentences = read_conllu(file)
    examples = as_examples(load_tokenizer(folder / "encoder"), sentences)
    parsing = syntax.parse(model, examples, sentences)
    labels = syntax.attention_by_label(model, examples, sentences)
    np.testing.assert_array_equal(arrays["right"], parsing.right)
    np.testing.assert_allclose(arrays["score"], labels.score, rtol=1e-5)
    assert arrays["relations"].tolist() == list(parsing.relations)
    assert (numbers["left_out"], numbers["conllu"], numbers["n"]) == (0, str(file), 96)
    assert numbers["arcs"] == len(parsing.sentence)
    best = parsing.best(seed=3)
    assert [each["relation"] for each in numbers["best"]] == [each.relation for each in best]
    assert numbers["best"][0]["accuracy"] == best[0].accuracy._asdict()
    (det,) = (each for each in numbers["best"] if each["relation"] == "det")
    assert det["published"] == {"relation": "det", "head": "8-11", "accuracy": 0.943, "offset": 0.517}
    assert "published: det 8-11 94.3% (offset 51.7%)" in said
    assert "nouns: in 84 sentences" in said
    assert "scored on the other 48; seed 3" in said
    assert numbers["labels"]["nouns"]["share_of_attention"] == pytest.approx(labels.to_label[0].mean())


def test_sentences_that_do_not_fit(folder, tmp_path, capsys):
    """Are left out, and counted; or are an error, if that is asked for."""
    long = " | ".join(f"the X {i} dep" for i in range(100))
    file = tmp_path / "long.conllu"
    file.write_text(conllu([TREES[1], long, *TREES, "a X 2 dep | \u200b X 0 root"]))
    more = ("--on-long", "error")
    assert call(folder, "syntax", "encoder", file, tmp_path / "out", *more) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"long.conllu, line \d+: sentences\[1\]: 102 tokens, expected 72 at most: 'the the", error
    )
    assert call(folder, "syntax", "encoder", file, tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert "syntax of 9 examples" in said
    assert "sentences left out, too long or with a word of no token: 2" in said
    numbers = json.loads((tmp_path / "out" / "syntax.json").read_text())
    assert (numbers["left_out"], numbers["n"]) == (2, 9)
    file.write_text(conllu([long, long]))
    assert call(folder, "syntax", "encoder", file, tmp_path / "none") == 2
    assert "each of its 2 sentences is longer than 72 tokens" in capsys.readouterr().err


def test_nothing_is_replaced(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert call(folder, "attention", "encoder", "lines.txt", tmp_path / "out") == 2
    assert "out: exists already; expected a new or an empty directory" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for link, target in (("link", "empty"), ("dangling", "new")):
        (tmp_path / link).symlink_to(tmp_path / target)
        assert call(folder, "attention", "encoder", "lines.txt", tmp_path / link) == 0
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target / "attention.json").is_file()


def test_a_name_that_is_not_utf8(folder, tmp_path):
    """Of the file that is read: JSON and page hold it as an escape."""
    file = tmp_path / os.fsdecode(b"\xff.txt")
    file.write_text("the cat sat on the mat .\n" * 6)
    for kind in ("attention", "report"):
        assert call(folder, kind, "encoder", file, tmp_path / kind) == 0
        assert json.loads((tmp_path / kind / f"{kind}.json").read_text())["input"] == str(file)


def test_a_full_disk_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(results.np, "savez_compressed", mock.Mock(side_effect=full))
    assert call(folder, "attention", "encoder", "lines.txt", tmp_path / "out") == 2
    assert f"{tmp_path / 'out'}: could not be written: OSError: [Errno 28] No sp" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_one_example(folder, tmp_path, capsys):
    """Heads have no interval over one example; the rest is there."""
    more = ("--labels", "class", "--max-examples", "1")
    assert call(folder, "heads", "classes", "rows.jsonl", tmp_path / "out", *more) == 0
    assert "significant" not in json.loads((tmp_path / "out" / "heads.json").read_text())
    assert call(folder, "fixed", "classes", "rows.jsonl", tmp_path / "fixed", *more) == 0
    assert "interval" not in json.loads((tmp_path / "fixed" / "fixed.json").read_text())["patterns"]


# --- probes and links --------------------------------------------------------------------------------------


PROBES = {
    "edge": (["layers", "weights"], "F1: "),
    "mdl": (["layers"], "compression: "),
    "control": (["layers"], "selectivity: "),
    "structural": (["layers", "correlation"], "UUAS: "),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", PROBES)
def test_a_probe(folder, tmp_path, capsys, kind):
    pictures, says = PROBES[kind]
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


@pytest.mark.sweep
def test_the_numbers_of_a_probe(folder, tmp_path, capsys):
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
    # every layer distinguishes the words of each target
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


# --- starts ------------------------------------------------------------------------------------------------


SHORT = ["--epochs", "1", "--batch-size", "8", "--lr", "1e-3"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "more", "labels", "score"),
    [
        ("words", ["--labels", "class"], [0, 1, 2], "accuracy"),
        ("classes", ["--labels", "name", "--pairs"], ["x", "y", "z"], "accuracy"),
        ("words", ["--labels", "number"], None, "negative squared error"),
    ],
)
def test_three_starts(folder, tmp_path, capsys, model, more, labels, score):
    """From any directory, also one with a head for other classes."""
    assert call(folder, "starts", model, "starts.jsonl", tmp_path / "out", *more, *SHORT, "--seed", "3") == 0
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
    for name, row in zip(STARTS, arrays["score"], strict=True):
        assert numbers["intervals"][name]["mean"] == pytest.approx(row.mean())
        assert f"  {name}: {score} {estimate(row, seed=3).text('.4f')}\n" in said
    assert numbers["intervals"]["baseline"]["mean"] == pytest.approx(arrays["baseline"].mean())
    assert "MRPC f1 0.0 / 81.2 / 87.9; MRPC accuracy 31.6 / 68.3 / 82.3; STS-B" in said
    assert "intervals over 4 examples, seed 3" in said


@pytest.mark.sweep
def test_one_seed_one_result_of_starts(folder, tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(len(name))
        torch.randn(7 if name == "b" else 3)
        assert (
            call(folder, "starts", "words", "starts.jsonl", tmp_path / name, "--labels", "class", *SHORT) == 0
        )
    one, other = (np.load(tmp_path / name / "starts.npz")["loss"] for name in ("a", "b"))
    np.testing.assert_array_equal(one, other)


def test_a_signal_ends_it_and_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(starts, "starts", mock.Mock(side_effect=Interrupted(15, None)))
    assert call(folder, "starts", "words", "starts.jsonl", tmp_path / "out", "--labels", "class") == 128 + 15
    assert "stopped by SIGTERM" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
