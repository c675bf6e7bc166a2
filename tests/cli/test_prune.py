"""`fastbert prune`: a smaller directory that loads, what it prints, and every mistake in one line."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers

import fastbert
from fastbert.cli.analyses.loading import model_of
from fastbert.cli.main import main
from fastbert.compression.schedule_search import search_schedules, within
from fastbert.compression.size import size_of
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import tokenized
from fastbert.tasks.inputs import read
from tests.cli.conftest import call
from tests.support.analysis import losses


def prune(folder, model, output, *more):
    given = ["prune", "--model", folder / model, "--output", output, "--device", "cpu", *more]
    return main([*map(str, given)])


@pytest.mark.parametrize("dense", [False, True])
def test_a_smaller_model(folder, tmp_path, capsys, dense):
    given = ["--heads", "0.34", "--neurons", "0.5", "--multiple", "16", *(["--dense"] if dense else [])]
    rows = ["--input", folder / "rows.jsonl", "--labels", "class"]
    assert prune(folder, "classes", tmp_path / "out", *given, *rows) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out'}: without 3 heads, 112 neurons" in said
    for name in ("parameters", "size, MB", "MFLOP per token, 128 tokens", "tokens per second", "accuracy"):
        assert re.search(rf"\n  {name} +\S+.* -> +\S+", said), name
    model = model_of(str(folder / "classes"), "cpu")
    examples = tokenized(load_tokenizer(folder / "classes"), **read(folder / "rows.jsonl", labels="class"))
    how = {"heads": 0.34, "neurons": 0.5, "multiple": 16}
    expected = fastbert.prune(model, **how, examples=examples).model.state_dict()
    # What is printed is of the model that was saved
    kept = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").num_parameters()
    assert re.search(rf"\n  parameters +{model.num_parameters():,} -> +{kept:,} ", said)
    if not dense:  # The smaller model may become dense afterwards
        assert prune(tmp_path, "out", tmp_path / "whole", "--dense") == 0
    stock = transformers.BertForSequenceClassification.from_pretrained(
        tmp_path / ("out" if dense else "whole")
    )
    assert stock.num_parameters() == model.num_parameters()
    if dense:
        return
    found = model_of(str(tmp_path / "out"), "cpu").state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(t, expected[key]) for key, t in found.items())
    assert load_tokenizer(tmp_path / "out").get_vocab() == load_tokenizer(folder / "classes").get_vocab()


def test_what_a_training_found_out_stays(folder, tmp_path):
    """`predict` reads its options, such as SQuAD's doc_stride, beside the model."""
    shutil.copytree(folder / "classes", tmp_path / "classes")
    found = json.dumps({"options": {"doc_stride": 24}})
    (tmp_path / "classes" / "results.json").write_text(found)
    assert prune(tmp_path, "classes", tmp_path / "small", "--layers", "0") == 0
    given = ["--model", tmp_path / "small", "--output", tmp_path / "int8"]
    assert main([*map(str, ["quantize", *given])]) == 0
    assert (tmp_path / "int8" / "results.json").read_text() == found


def test_a_sentence_encoder_stays_one(folder, tmp_path, capsys):
    SentenceEncoder.from_pretrained(folder / "encoder", pooling="cls").save_pretrained(tmp_path / "whole")
    shutil.copy(folder / "pairs.tsv", tmp_path / "pairs.tsv")
    rows = ["--input", tmp_path / "pairs.tsv", "--pairs"]
    assert prune(tmp_path, "whole", tmp_path / "out", "--layers", "0,2", "--heads", "0.2", *rows) == 0
    said = capsys.readouterr().out
    assert "without 1 heads, 1 of 3 layers" in said
    assert "\n  cosine " in said
    found = SentenceEncoder.from_pretrained(tmp_path / "out")
    assert found.pooling == "cls"
    assert len(found.model.base_model.layer_list()) == 2
    assert found.encode(["the cat sat"]).shape == (1, 48)


def test_an_encoder_keeps_its_pooler(folder, tmp_path, recwarn):
    assert prune(folder, "encoder", tmp_path / "out", "--layers", "0,2") == 0
    whole, found = (fastbert.BertModel.from_pretrained(p) for p in (folder / "encoder", tmp_path / "out"))
    assert torch.equal(found.pooler.dense.weight, whole.pooler.dense.weight)
    whole = fastbert.BertModel.from_pretrained(folder / "encoder", add_pooling_layer=False)
    whole.save_pretrained(tmp_path / "bare")
    assert prune(tmp_path, "bare", tmp_path / "smaller", "--layers", "0,2") == 0
    assert not recwarn.list


def test_numbers_of_a_file(folder, tmp_path, capsys):
    (tmp_path / "heads.json").write_text(json.dumps({"0": [0, 1, 2], "2": [1]}))
    assert prune(folder, "encoder", tmp_path / "out", "--heads", tmp_path / "heads.json") == 0
    assert "without 4 heads" in capsys.readouterr().out
    assert fastbert.EncoderConfig.from_pretrained(tmp_path / "out").kept_heads() == [(), None, (0, 2)]


def test_unused_word_pieces_go(folder, tmp_path, capsys):
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat .\n\na dog\n")
    rows = ["--input", folder / "rows.jsonl", "--labels", "class", "--vocabulary", tmp_path / "corpus.txt"]
    assert prune(folder, "classes", tmp_path / "out", *rows) == 0
    said = capsys.readouterr().out
    # Of 120 rows, 31 have word pieces
    tokenizer = load_tokenizer(tmp_path / "out")
    assert f"without {120 - tokenizer.get_vocab_size()} word pieces" in said
    assert "house" not in tokenizer.get_vocab()
    model = model_of(str(tmp_path / "out"), "cpu")
    whole = model_of(str(folder / "classes"), "cpu")
    found, expected = (
        model(torch.tensor([load_tokenizer(place).encode("a dog sat").ids])).logits
        for model, place in ((model, tmp_path / "out"), (whole, folder / "classes"))
    )
    torch.testing.assert_close(found, expected)
    stock = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert stock("a dog sat").input_ids == tokenizer.encode("a dog sat").ids


def test_small_weights_become_zeros(folder, tmp_path, capsys):
    assert prune(folder, "encoder", tmp_path / "out", "--weights", "0.9", "--layers", "0,2") == 0
    said = capsys.readouterr().out
    assert "without 1 of 3 layers, 90.0% of the weights" in said
    found = re.search(r"size after gzip, MB +(\S+) -> +(\S+)  (\S+) x\n.*save no time", said)
    assert found is not None
    assert float(found[3]) > 1.5
    expected = fastbert.prune(
        model_of(str(folder / "encoder"), "cpu", pooler=True), layers=[0, 2], weights=0.9
    )
    made = model_of(str(tmp_path / "out"), "cpu", pooler=True).state_dict()
    assert all(torch.equal(t, made[key]) for key, t in expected.model.state_dict().items())


def test_papers_are_quoted_for_what_was_pruned(folder, tmp_path, capsys):
    rows = {}
    for name, given in {
        "heads": ["--heads", "0.4"],
        "neurons": ["--neurons", "0.5", "--multiple", "16"],
        "weights": ["--weights", "0.5"],
        "layers": ["--layers", "0"],
    }.items():
        assert prune(folder, "encoder", tmp_path / name, *given, "--score", "magnitude") == 0
        rows[name] = re.findall("published, for comparison: (.*)", capsys.readouterr().out)
    assert rows["heads"] == ["Michel 2019, half of BERT base's heads removed: 1.175 x as fast"]
    assert len(rows["neurons"]) == 3
    assert rows["neurons"][0] == "nn_pruning 2021, BERT base: SQuAD F1 88.5 -> 88.7, 1.84 x as fast"
    assert len(rows["weights"]) == 4
    assert rows["weights"][1] == "Sanh 2020, movement, 10% of weights: SQuAD F1 88.1 -> 84.3"
    assert rows["layers"] == []


def test_a_model_in_a_subfolder(folder, tmp_path, capsys):
    """As older sentence-transformers wrote it: 0_Transformer/."""
    SentenceEncoder.from_pretrained(folder / "encoder", pooling="cls").save_pretrained(tmp_path / "flat")
    shutil.copytree(tmp_path / "flat", tmp_path / "old")
    inner = tmp_path / "old" / "0_Transformer"
    inner.mkdir()
    for path in [*(tmp_path / "old").iterdir()]:
        if path.is_file() and not path.name.startswith(("modules", "config_sentence")):
            path.rename(inner / path.name)
    content = json.loads((tmp_path / "old" / "modules.json").read_text())
    content[0]["path"] = inner.name
    (tmp_path / "old" / "modules.json").write_text(json.dumps(content))
    shutil.copy(folder / "pairs.tsv", tmp_path / "pairs.tsv")
    (tmp_path / "corpus.txt").write_text("the cat sat on the mat . a dog ran to a house\n")
    given = ["--heads", "0.4", "--input", tmp_path / "pairs.tsv", "--pairs"]
    for name in ("flat", "old"):
        assert prune(tmp_path, name, tmp_path / f"{name}-out", *given) == 0
        vocabulary = ["--vocabulary", tmp_path / "corpus.txt"]
        assert prune(tmp_path, name, tmp_path / f"{name}-words", *vocabulary) == 0
        assert call(tmp_path, "importance", name, "pairs.tsv", tmp_path / f"{name}-map", "--pairs") == 0
    for kind in ("out", "words"):
        vectors = [
            SentenceEncoder.from_pretrained(tmp_path / f"{name}-{kind}").encode(["the cat sat", "a dog"])
            for name in ("flat", "old")
        ]
        assert np.array_equal(*vectors)
    arrays = [np.load(tmp_path / f"{name}-map" / "importance.npz")["derivatives"] for name in ("flat", "old")]
    assert np.array_equal(*arrays)


def test_pruned_models_are_analysed(folder, tmp_path, capsys):
    """A removed head is worth nothing; another is worth what a model without both loses."""
    (tmp_path / "heads.json").write_text(json.dumps({"0": [0, 1, 2], "2": [1]}))
    assert prune(folder, "classes", tmp_path / "small", "--heads", tmp_path / "heads.json") == 0
    shutil.copy(folder / "rows.jsonl", tmp_path / "rows.jsonl")
    rows = "rows.jsonl", tmp_path / "out", "--labels", "class"
    assert call(tmp_path, "heads", "small", *rows) == 0
    assert "pruned heads: 4; here they have zeros" in capsys.readouterr().out
    found = np.load(tmp_path / "out" / "heads.npz")
    change = found["loss"] - found["base_loss"][:, None, None]
    gone = np.zeros((3, 3), bool)
    gone[0], gone[2, 1] = True, True
    assert np.abs(change[:, gone]).max() < 1e-6 < np.abs(change[:, ~gone]).max()
    small = model_of(str(tmp_path / "small"), "cpu")
    examples = tokenized(load_tokenizer(tmp_path / "small"), **read(tmp_path / "rows.jsonl", labels="class"))
    smaller = fastbert.prune(small, heads={2: [1]})  # the whole model's head 2 of this layer
    np.testing.assert_allclose(losses(smaller.model, examples), found["loss"][:, 2, 2], rtol=1e-5)
    for kind in ("attention", "importance", "patterns"):
        more = ["--labels", "class"] if kind == "importance" else []
        assert call(tmp_path, kind, "small", "rows.jsonl", tmp_path / kind, *more) == 0
    importance = np.load(tmp_path / "importance" / "importance.npz")["derivatives"]
    assert not importance[:, gone].any()
    more = ["--against", tmp_path / "small"]
    assert call(folder, "change", "classes", "lines.txt", tmp_path / "change", *more) == 0
    assert json.loads((tmp_path / "out" / "heads.json").read_text())["pruned_heads"] == 4


@torch.no_grad()
def test_the_table_of_words_is_factored(folder, tmp_path, capsys):
    ids = torch.arange(5, 29).view(2, 12)
    for name, more in (("small", []), ("dense", ["--dense"])):
        assert prune(folder, "classes", tmp_path / name, "--embedding-rank", "8", *more) == 0
        assert "nothing was removed; words in a table of rank 8" in capsys.readouterr().out
    small = model_of(str(tmp_path / "small"), "cpu")
    assert small.get_input_embeddings().weight.shape[1] == 8
    stock = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(small(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-5)


def test_tokens_leave_within_a_budget(folder, tmp_path, capsys):
    rows = ["--input", folder / "rows.jsonl", "--labels", "class"]
    given = ["--tokens", "0.6", "--rounds", "1", "--layers", "0,2", "--seed", "3"]
    assert prune(folder, "classes", tmp_path / "out", *given, *rows) == 0
    said = capsys.readouterr()
    model = model_of(str(folder / "classes"), "cpu")
    examples = tokenized(load_tokenizer(folder / "classes"), **read(folder / "rows.jsonl", labels="class"))
    shorter = fastbert.prune(model, layers=[0, 2]).model
    points = search_schedules(shorter, examples, rounds=1, seed=3)
    schedule, cost, score = within(points, 0.6)
    found = model_of(str(tmp_path / "out"), "cpu")
    assert found.config.token_schedule == [*schedule]
    assert cost <= 0.6
    share = round(100 - 50 * sum(schedule))
    assert f"without 1 of 3 layers, {share}% of the layers' tokens" in said.out
    flops = [size_of(each).flops / 1e6 for each in (model, found)]
    assert re.search(rf"MFLOP per token, 128 tokens +{flops[0]:.1f} -> +{flops[1]:.1f} ", said.out)
    assert re.search(rf"accuracy .* -> +{score:.4f}", said.out)
    assert "Goyal 2020, PoWER-BERT, trained with fewer tokens: MNLI 84.6 -> 83.8, 2.6 x as fast" in said.out
    assert re.findall("fastbert: round 1 of 1: [0-9]+ schedules, [0-9]+ kept", said.err)
    # A schedule that was there is searched anew, and stays without --tokens
    assert prune(tmp_path, "out", tmp_path / "half", "--heads", "0.5", "--score", "magnitude") == 0
    assert "layers' tokens" not in capsys.readouterr().out
    assert model_of(str(tmp_path / "half"), "cpu").config.token_schedule == [*schedule]
    assert prune(tmp_path, "out", tmp_path / "again", *given[:4], *rows) == 0
    points = search_schedules(shorter, examples, rounds=1)
    again = model_of(str(tmp_path / "again"), "cpu").config.token_schedule
    assert again == [*within(points, 0.6).schedule]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "encoder",
            "--heads, --neurons, --layers, --vocabulary, --weights, --embedding-rank, --tokens, --dense: ",
        ),
        ("encoder --tokens 0", r"--tokens 0: expected a share in \(0, 1\]"),
        ("encoder --tokens .5 --dense --input lines.txt", "--dense: expected none with --tokens"),
        (
            "encoder --tokens .5 --vocabulary lines.txt --input lines.txt",
            "--vocabulary: expected none with --tokens",
        ),
        ("encoder --tokens .5", "--input: --tokens needs examples"),
        ("encoder --layers 0 --rounds 2", "--rounds: needs --tokens"),
        (
            "classes --tokens .01 --rounds 0 --input rows.jsonl --labels class",
            r"--tokens 0.01: cost: expected at least 0\.\d+, got 0.01",
        ),
        (
            "classes --tokens .5 --rounds -1 --input rows.jsonl --labels class",
            "rounds: expected an integer >= 0",
        ),
        ("encoder --weights 1", r"weights: expected a share in \[0, 1\), got 1.0"),
        ("encoder --embedding-rank 0", "embedding_rank: expected an integer from 1 to 48, got 0"),
        ("encoder --heads half", "--heads half: expected a share, or a .json file"),
        ("encoder --neurons 1", r"neurons: expected a share in \[0, 1\), got 1.0"),
        ("encoder --layers 0,x", "argument --layers: expected numbers with commas between, got '0,x'"),
        ("encoder --layers 0,7", r"layers: expected ascending numbers of 3 layers, got \[0, 7\]"),
        ("encoder --heads nothing.json", "nothing.json"),
        ("classes --heads .5", "examples: expected labelled examples for score 'taylor', got None"),
        ("classes --heads .5 --input rows.jsonl", "--labels: prune of BertForSequenceClassification needs"),
        (
            "encoder --heads .5 --input lines.txt",
            "--model .*: prune of BertModel, which has no head, .*--pairs",
        ),
    ],
)
def test_mistakes_leave_nothing(folder, tmp_path, capsys, monkeypatch, given, message):
    monkeypatch.chdir(folder)
    model, *more = given.split()
    assert prune(folder, model, tmp_path / "out", *more) == 2
    assert re.search(f"fastbert: error: {message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", ["[1]", '{"x": [0]}', '{"0": 1}'])
def test_lists_in_a_file_are_checked(folder, tmp_path, capsys, content):
    (tmp_path / "heads.json").write_text(content)
    assert prune(folder, "encoder", tmp_path / "out", "--heads", tmp_path / "heads.json") == 2
    assert re.search(
        "heads.json: expected (an object of lists by layer|a JSON object)", capsys.readouterr().err
    )
