"""`fastbert finetune` and `fastbert predict`: from files to answers, and every mistake is one line."""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import shlex
import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

import fastbert
from fastbert.cli import finetune_arguments
from fastbert.cli.main import build_parser, main
from fastbert.compression.length_drop import LengthDrop
from fastbert.compression.token_search import LearnedSchedule
from fastbert.finetuning import predict as predicting
from fastbert.finetuning import run as finetuning
from fastbert.finetuning import tasks
from fastbert.tasks import inputs
from fastbert.tasks.glue_tasks import TASKS
from tests.cli.conftest import signalled
from tests.support.hf_models import hf_config

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] good bad the cat dog where who sat ran Anna Bob lives here ."
SENTENCES = [f"the {a} {v} {w} ." for w in ("good", "bad") for a in ("cat", "dog") for v in ("sat", "ran")]
CONTEXT = "Anna sat here . Bob ran ."
SQUAD = [("who sat", CONTEXT), ("where ran the dog", "the dog ran here ."), ("who ran", CONTEXT)]
# task -> (transformers' class, options of its config)
HEADS = {
    "csv": ("SequenceClassification", {"num_labels": 3}),
    "stsb": ("SequenceClassification", {"num_labels": 1}),
    "squad": ("QuestionAnswering", {}),
    "ner": ("TokenClassification", {"id2label": {0: "B-PER", 1: "I-PER", 2: "O"}}),
    "swag": ("MultipleChoice", {}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder of tiny models with random weights: `encoder` without a head, and one per task of `HEADS`."""
    root = tmp_path_factory.mktemp("models")
    for name, (head, options) in {"encoder": ("", {}), **HEADS}.items():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
        # Random heads must differ in what they answer
        sizes |= {"max_position_embeddings": 256, "initializer_range": 0.5 if head else 0.02}
        config = hf_config("bert", vocab_size=len(WORDS.split()), **sizes, **options)
        getattr(transformers, f"BertFor{head}" if head else "BertModel")(config).save_pretrained(root / name)
        (root / name / "vocab.txt").write_text(WORDS.replace(" ", "\n"))
        (root / name / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    return root


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    """The files of a task in which "good" and "bad" are the classes."""
    folder = tmp_path_factory.mktemp("table")
    rows = "".join(f"{text},{'pos' if 'good' in text else 'neg'}\n" for text in SENTENCES)
    for split in ("train", "dev"):
        (folder / f"{split}.csv").write_text(f"review,stars\n{rows}")
    (folder / "test.csv").write_text("review\n" + "".join(f"{text}\n" for text in SENTENCES))
    return folder


def command(task: str, models: Path, data: Path, output: Path, *more: str) -> list[str]:
    """The words of a quick finetune command."""
    given = ["finetune", task, "--model", models / "encoder", "--data", data, "--output", output]
    quick = ["--device", "cpu", "--no-progress", "--batch-size", "4", "--max-length", "64"]
    columns = ["--text", "review", "--label", "stars", "--lr", "3e-3,1e-5", "--epochs", "15"]
    return [str(word) for word in (*given, *quick, *(columns if task == "csv" else ()), *more)]


@pytest.fixture(scope="module")
def trained(models, table, tmp_path_factory) -> Path:
    """The output of the command for `table`."""
    output = tmp_path_factory.mktemp("trained") / "out"
    assert main(command("csv", models, table, output)) == 0
    return output


@pytest.fixture
def predict(models, capsys):
    """Call `fastbert predict`: the objects that it prints."""

    def call(task: str, model: Path | str, file: Path, *more: object) -> list[dict]:
        given = ["predict", task, "--model", models / model, "--input", file, "--device", "cpu", *more]
        capsys.readouterr()
        assert main([str(word) for word in given]) == 0, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


# --- finetune -----------------------------------------------------------------------------------------------


def test_a_finished_command_prints_again_what_it_has_found(trained, models, table, capsys):
    results = json.loads((trained / "results.json").read_text())
    assert results["scores"]["dev"]["accuracy"] == 1
    weights = (trained / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main(command("csv", models, table, trained)) == 0
    said = capsys.readouterr()
    assert said.out.startswith("csv: accuracy on dev, in percent\n  lr 0.003, seed 0: 100.0\n")
    assert "fastbert: train: 8 examples\n" in said.err
    assert main(command("csv", models, table, trained, "--json")) == 0
    assert (
        json.loads(capsys.readouterr().out) == json.loads((trained / "results.json").read_text()) == results
    )
    assert (trained / "model.safetensors").read_bytes() == weights
    assert transformers.AutoConfig.from_pretrained(trained).id2label == {0: "neg", 1: "pos"}


def test_files_that_are_added_later_are_predicted_without_a_training(trained, table, tmp_path, capsys):
    data = shutil.copytree(table, tmp_path / "data", ignore=shutil.ignore_patterns("train.csv", "test.csv"))
    output = shutil.copytree(trained, tmp_path / "out", ignore=shutil.ignore_patterns("runs", "dev", "test"))
    rows = (table / "dev.csv").read_text().splitlines()
    # A test file with labels, the last of which is wrong
    (data / "test.csv").write_text("\n".join([*rows[:-1], rows[-1].replace("neg", "pos")]) + "\n")
    words = ["finetune", "csv", "--predict-only", "--data", data, "--output", output, "--device", "cpu"]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr()
    assert "  best, test: accuracy 87.5, macro_f1 " in said.out
    assert f"fastbert: wrote {output}/test/test.csv\n" in said.err
    assert (output / "test/test.csv").read_bytes() == (trained / "test/test.csv").read_bytes()
    assert main([str(word) for word in (*words, "--json")]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads((output / "results.json").read_text())
    assert results["runs"] == json.loads((trained / "results.json").read_text())["runs"]
    assert results["scores"]["test"]["accuracy"] == 0.875


def test_python_finds_what_the_command_finds(trained, models, table, tmp_path):
    options = {"text": "review", "label": "stars", "epochs": 15, "batch_size": 4, "max_length": 64}
    found = fastbert.finetune("csv", models / "encoder", table, tmp_path / "out", lr=3e-3, **options)
    results = json.loads((trained / "results.json").read_text())
    assert found.best.evaluations == results["runs"][0]["evaluations"]
    with pytest.raises(
        TypeError, match="unknown option 'doc_stride': expected a setting, or an option of csv"
    ):
        fastbert.finetune("csv", models / "encoder", table, tmp_path, doc_stride=3)


def test_training_that_rounds(models, table, tmp_path, capsys):
    assert main(command("csv", models, table, tmp_path / "out", "--qat", "int8", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"]["qat"] == "int8"
    assert found["scores"]["dev"]["accuracy"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_same_command_resumes(number, trained, models, table, tmp_path, capsys):
    words = command("csv", models, table, tmp_path / "out")
    with signalled(number, 2):
        assert main(words) == 128 + number
    said = capsys.readouterr()
    assert said.out == ""
    last = said.err.splitlines()[-1]
    assert last.startswith(f"fastbert: stopped by {number.name}; saved {tmp_path}")
    assert last.endswith("; rerun the command to resume")
    assert main(words) == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


def test_movement_pruning_ends_with_a_smaller_model(models, table, tmp_path, capsys):
    more = ["--movement", "hard", "--movement-units", "blocks", "--movement-keep", "0.5", "--lr", "3e-3"]
    assert main(command("csv", models, table, tmp_path / "out", *more)) == 0
    config = fastbert.EncoderConfig.from_pretrained(tmp_path / "out")
    assert sum(2 if kept is None else len(kept) for kept in config.kept_heads()) == 2
    again = ["--predict-only", "--data", table, "--output", tmp_path / "out", "--text", "review"]
    words = ["finetune", "csv", *again, "--label", "stars", "--device", "cpu"]
    assert main([str(word) for word in words]) == 0
    (log,) = (tmp_path / "out" / "runs").glob("*/results.json")
    method = json.loads(log.read_text())["config"]["method"]
    assert (method["name"], method["units"], method["keep"]) == ("movement", "blocks", 0.5)


def test_methods_that_drop_tokens(models, table, tmp_path):
    for name, more, expected in (
        ("some", ["--length-drop", "0.3", "--length-drop-models", "1"], LengthDrop(0.3, 1)),
        ("two", ["--length-drop", "0.2", "--layerdrop", "0.2"], LengthDrop(0.2, 2)),
        ("found", ["--token-search", "0.5", "--lr", "3e-3"], LearnedSchedule(0.5)),
    ):
        assert main(command("csv", models, table, tmp_path / name, *more)) == 0
        log = tmp_path / name / "runs" / "lr-0.003-seed-0" / "results.json"
        config = json.loads(log.read_text())["config"]
        assert config["method"] == expected.to_dict()
        assert config["settings"]["layerdrop"] == (0.2 if name == "two" else 0)
        schedule = fastbert.EncoderConfig.from_pretrained(tmp_path / name).token_schedule
        assert (schedule is None) == (name != "found")
    assert schedule[-1] < 1


def test_a_signal_outside_of_training_ends_the_command(models, table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        finetuning, "finetune", lambda *given, **options: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert main(command("csv", models, table, tmp_path / "out")) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "fastbert: stopped by SIGTERM; rerun the command to resume\n"


def test_glue_trains_the_tasks_that_are_there(models, tmp_path, capsys):
    rows = "".join(f"{i}\tthe cat sat\tthe dog ran\tentailment\n" for i in range(3))
    (tmp_path / "RTE").mkdir()
    for split in ("train", "dev"):
        header = "index\tsentence1\tsentence2\tlabel\n"
        (tmp_path / f"RTE/{split}.tsv").write_text(f"{header}{rows}3\tthe\tcat\tnot_entailment\n")
    (tmp_path / "WNLI").mkdir()
    assert main(command("glue", models, tmp_path, tmp_path / "out", "--epochs", "1", "--json")) == 0
    said = capsys.readouterr()
    assert list(json.loads(said.out)) == ["rte"]
    assert (tmp_path / "out/rte/model.safetensors").is_file()
    assert "no submission.zip, because test predictions are missing: CoLA, SST-2, MRPC" in said.err


@pytest.mark.parametrize("wnli", [False, True])
def test_glue_writes_one_submission(wnli, models, tmp_path, capsys, monkeypatch):
    for form in TASKS.values():
        (tmp_path / "data" / form.folder).mkdir(parents=True, exist_ok=True)

    def finetune(name, model, data, output, **options):
        (output / "test").mkdir(parents=True)
        (output / "results.json").write_text("{}")
        for task in (name, *(["ax"] if name == "mnli" else [])):
            for file in TASKS[task].submissions.values():
                (output / "test" / f"{file}.tsv").write_text(file)

    monkeypatch.setattr(finetuning, "finetune", finetune)
    more = ["--json", *(["--wnli"] if wnli else [])]
    assert main(command("glue", models, tmp_path / "data", tmp_path / "out", *more)) == 0
    said = capsys.readouterr()
    assert len(json.loads(said.out)) == 8 + wnli
    with zipfile.ZipFile(tmp_path / "out/submission.zip") as archive:
        files = {f"{file}.tsv" for form in TASKS.values() for file in form.submissions.values()}
        assert {*archive.namelist()} == (files if wnli else files - {"WNLI.tsv"})
        assert archive.read("AX.tsv") == b"AX"
    assert ("lacks WNLI.tsv" in said.err) is not wnli


# --- predict ------------------------------------------------------------------------------------------------


def test_predictions_are_those_of_the_training(trained, table, predict, tmp_path, monkeypatch):
    """In the order of the file, of any kind, and however few examples are in memory at a time."""
    with open(trained / "test/test.csv", newline="") as file:
        official = [row["prediction"] for row in csv.DictReader(file)]
    found = predict("csv", trained, table / "test.csv")  # whose column is that of the training
    assert [each["label"] for each in found] == official == ["pos"] * 4 + ["neg"] * 4
    monkeypatch.setattr(predicting, "CHUNK", 3)
    lines, objects = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    lines.write_text("\r\n".join([*SENTENCES, ""]))
    objects.write_text("".join(json.dumps({"review": text}) + "\n\n" for text in SENTENCES))
    assert [text for (text,) in inputs.texts(lines)] == SENTENCES
    for task, file, more in (
        ("csv", lines, ()),
        ("sst2", objects, ("--text", "review")),
        ("csv", lines, ("--batch-tokens", "1")),
    ):
        again = predict(task, trained, file, *more)
        assert [each["label"] for each in again] == official
        scores = [each["score"] for each in again]
        assert scores == pytest.approx([each["score"] for each in found], abs=2e-6)
    assert list(fastbert.predict("csv", trained, iter(SENTENCES), device="cpu")) == again


def test_stdin_is_read_as_it_comes(trained, models, predict, tmp_path, monkeypatch, capsys):
    def piped(task, model, text, *more):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return predict(task, model, "-", *more)

    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in SENTENCES))
    found = predict("csv", trained, file)
    assert piped("csv", trained, file.read_text()) == found
    objects = "".join(json.dumps({"review": text}) + "\n" for text in SENTENCES)
    assert piped("csv", trained, objects, "--input-format", "jsonl") == found
    file = file.rename(tmp_path / "texts.log")
    assert predict("csv", trained, file, "--input-format", "txt", "--progress") == found
    rows = [{"question": question, "context": context} for question, context in SQUAD]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    assert piped("squad", "squad", lines) == list(
        fastbert.predict("squad", models / "squad", SQUAD, device="cpu")
    )
    # One chunk is answered before the next is read
    monkeypatch.setattr(predicting, "CHUNK", 2)
    read = []
    given = (read.append(text) or text for text in SENTENCES)
    answers = fastbert.predict("csv", trained, given, device="cpu")
    next(answers)
    assert len(read) == 2


def test_an_output_file_is_whole_and_not_replaced(trained, predict, tmp_path, capsys):
    lines, output = tmp_path / "texts.txt", tmp_path / "out.jsonl"
    lines.write_text("the cat\n\nthe dog\n")
    assert predict("csv", trained, lines, "--output", output) == []
    assert len(output.read_text().splitlines()) == 3
    assert (
        main(["predict", "csv", "--model", str(trained), "--input", str(lines), "--output", str(output)]) == 2
    )
    assert "exists; --overwrite replaces it" in capsys.readouterr().err


def test_texts_without_names_of_classes_and_numbers(models, predict, tmp_path):
    """As transformers computes them; of pairs the second text counts."""
    path = tmp_path / "pairs.txt"
    path.write_text("".join(f"{text}\tthe cat .\n" for text in SENTENCES))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "csv")
    given = tokenizer(SENTENCES, ["the cat ."] * len(SENTENCES), return_tensors="pt", padding=True)
    stock = transformers.AutoModelForSequenceClassification
    with torch.no_grad():
        logits, values = (stock.from_pretrained(models / n)(**given).logits for n in ("csv", "stsb"))
    expected = logits.softmax(1).max(1)
    found = predict("csv", "csv", path, "--pair", "pair")
    assert [each["label"] for each in found] == [f"LABEL_{i}" for i in expected.indices]
    assert [each["score"] for each in found] == pytest.approx(expected.values.tolist(), abs=1e-5)
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(["sentence2\tsentence1", *(f"the cat .\t{text}" for text in SENTENCES)]))
    found = predict("stsb", "stsb", path)
    assert [each["value"] for each in found] == pytest.approx(values[:, 0].tolist(), abs=1e-4)


def test_texts_are_cut_as_in_training(models, predict, tmp_path):
    """[CLS] the cat [SEP] is what four tokens hold."""
    path = tmp_path / "texts.txt"
    path.write_text("the cat sat bad\nthe cat ran good\n")
    first, second = predict("csv", "csv", path)
    assert first != second
    first, second = predict("csv", "csv", path, "--max-length", 4)
    assert first == second
    (models / "csv/results.json").write_text('{"best": {"max_length": 4}}')
    try:
        assert predict("csv", "csv", path) == [first, second]
    finally:
        (models / "csv/results.json").unlink()


def test_answers_of_questions(models, predict, tmp_path):
    rows = [{"question": question, "context": context} for question, context in SQUAD]
    lines, official = tmp_path / "questions.jsonl", tmp_path / "questions.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paragraphs = [
        {"context": row["context"], "qas": [{"id": str(i), "question": row["question"]}]}
        for i, row in enumerate(rows)
    ]
    official.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    found = predict("squad", "squad", lines)
    assert found == predict("squad", "squad", official)
    assert found == list(fastbert.predict("squad", models / "squad", SQUAD, device="cpu"))
    for answer, (_, context) in zip(found, SQUAD, strict=True):
        assert answer["answer"], answer
        assert answer["answer"] in context
        assert 0 < answer["score"] <= 1
    texts = [answer["answer"] for answer in found]
    for threshold, expected in (("1e9", texts), ("-1e9", [""] * 3)):
        found = predict("squad2", "squad", lines, f"--null-threshold={threshold}")
        assert [answer["answer"] for answer in found] == expected
    # the threshold of the training, which results.json has
    results = {"scores": {"dev": {"f1": 0.5, "null_threshold": -1e9}}, "best": {"max_length": 200}}
    (models / "squad/results.json").write_text(json.dumps(results))
    try:
        assert [answer["answer"] for answer in predict("squad2", "squad", lines)] == [""] * 3
    finally:
        (models / "squad/results.json").unlink()


@pytest.mark.parametrize(
    ("task", "stored"),
    [
        ("squad2", {"doc_stride": 3, "max_query": 5, "null_threshold": 1.5}),
        ("squad", {"doc_stride": 3, "max_query": 5}),
        ("ner", {"context": 7, "strict": True}),
        ("csv", {"text": "a", "pair": "b", "label": "c", "regression": True}),
    ],
)
def test_options_of_the_training_are_remembered_and_arguments_override_them(task, stored):
    assert [*stored] == [*tasks.OPTIONS[task]]
    assert predicting._reader_of(task, {"options": stored}, {}).task.options == stored
    (name, value), *_ = stored.items()
    other = predicting._reader_of(task, {"options": stored}, {name: value * 2}).task
    assert other.options == {**stored, name: value * 2}


def test_entities(models, predict, tmp_path):
    lines, columns = tmp_path / "lines.txt", tmp_path / "columns.txt"
    lines.write_text("Anna sat here .\n\nBob ran .\n")
    columns.write_text(
        "-DOCSTART- -X-\n\nAnna NNP\nsat VBD\nhere RB\n. .\n\n-DOCSTART- -X-\n\nBob NNP\nran VBD\n. .\n"
    )
    found = predict("ner", "ner", lines)
    assert [each["words"] for each in found] == [["Anna", "sat", "here", "."], ["Bob", "ran", "."]]
    tokenizer = transformers.AutoTokenizer.from_pretrained(models / "ner")
    stock = transformers.AutoModelForTokenClassification.from_pretrained(models / "ner")
    for each in found:
        given = tokenizer(each["words"], is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            best = stock(**given).logits[0, 1:-1].argmax(1)
        assert each["tags"] == [stock.config.id2label[int(i)] for i in best]
        for entity in each["entities"]:
            assert entity["type"] == "PER"
            assert entity["text"].split() == each["words"][entity["start"] : entity["end"]]
    assert any(each["entities"] for each in found)
    assert predict("ner", "ner", columns, "--columns") == found
    given = [each["words"] for each in found]
    assert list(fastbert.predict("ner", models / "ner", given, device="cpu")) == found


def test_choices(models, predict, tmp_path):
    file = tmp_path / "val.csv"
    header = "video-id,sent1,sent2,ending0,ending1,ending2,ending3\n"
    file.write_text(header + "a,the cat sat,the dog,ran,sat,ran here,sat .\n" * 3)
    found = predict("swag", "swag", file)
    ends = [f"the dog {ending}" for ending in ("ran", "sat", "ran here", "sat .")]
    assert found == list(fastbert.predict("swag", models / "swag", [("the cat sat", ends)] * 3, device="cpu"))
    assert {each["text"] for each in found} == {ends[found[0]["choice"]]}
    folder = tmp_path / "test/high"
    folder.mkdir(parents=True)
    article = {
        "article": "the cat sat",
        "questions": ["who"],
        "options": [["a", "b", "c", "d"]],
        "answers": ["A"],
    }
    (folder / "1.txt").write_text(json.dumps(article))
    (answer,) = predict("race", "swag", folder.parent)
    assert answer["text"] == f"who {'abcd'[answer['choice']]}"


# --- mistakes -----------------------------------------------------------------------------------------------

FINETUNE = "finetune csv --model {models}/encoder --data {data} --output {place}/out"
PREDICT = "predict csv --model {models}/csv --input {place}/in.txt"
MISTAKES = [
    (
        f"{FINETUNE} --doc-stride 3",
        "--doc-stride: csv does not take it; its options: --text, --pair, --label",
    ),
    (f"{FINETUNE} --wnli", "--wnli: is an option of glue, not of csv"),
    (f"{FINETUNE} --ouput x", "unknown option --ouput; did you mean --output?"),
    (f"{FINETUNE} --lr=1e-5,x", "argument --lr: expected numbers with commas between, got '1e-5,x'"),
    (f"{FINETUNE} --lr 1,1", "lr: expected different learning rates"),
    (f"{FINETUNE} --epochs 0", "epochs: expected a finite number > 0"),
    (f"{FINETUNE} --restarts 0", "restarts: expected an integer >= 1, got 0"),
    (f"{FINETUNE} --reinit 9", "reinit: the model has 2 layers, got 9"),
    (f"{FINETUNE} --freeze --reinit 1", "freeze: a frozen encoder has no use for reinit"),
    (f"{FINETUNE} --predict-only", "model: expected none with predict_only, which trains nothing"),
    (
        "finetune csv --data {data} --output {place}/out --predict-only",
        "that finetune has written, found no {place}/out/results.json",
    ),
    (
        "finetune csv --data {data} --output {place}/out --predict-only --restarts 2",
        "restarts: expected none with predict_only",
    ),
    ("finetune rte --data x --output x", "--model: is required for a training"),
    (f"{FINETUNE} --null-threshold x", "--null-threshold: expected auto or a number, got 'x'"),
    (f"{FINETUNE} --text no", "expected one column 'no', found 'review', 'stars'"),
    (f"{FINETUNE} --device toaster", "--device toaster"),
    ("finetune glu --model x --data x --output x", "did you mean 'glue'?"),
    (f"{FINETUNE} --freelb 0", "freelb steps: expected an integer >= 1, got 0"),
    (f"{FINETUNE} --smart 1,x", "argument --smart"),
    (f"{FINETUNE} --movement-keep 0.5", "--movement-keep: needs --movement"),
    (f"{FINETUNE} --length-drop 1", "drop: expected a number in (0, 1), got 1.0"),
    (f"{FINETUNE} --length-drop-models 1", "--length-drop-models: needs --length-drop"),
    (f"{FINETUNE} --token-search -1", "weight: expected a finite number >= 0"),
    (f"{FINETUNE} --token-search 1 --layerdrop 0.1", "layerdrop: expected none with token-search"),
    (f"{FINETUNE} --movement soft --length-drop 0.2", "--length-drop: expected none with --movement"),
    (f"{FINETUNE} --token-search 1 --length-drop 0.2", "--token-search: expected none with --length-drop"),
    (f"{FINETUNE} --movement soft --movement-keep 0.5", "keep: expected None, as it is for kind 'hard'"),
    (f"{FINETUNE} --movement hard --mixout 0.5", "mixout: expected none with movement"),
    (f"{FINETUNE} --intermediate-task mnli", "--intermediate-task: needs --intermediate"),
    (f"{FINETUNE.replace('csv', 'glue')} --intermediate x", "--intermediate: is for one task"),
    ("finetune glue --model x --data {place} --output x", "expected one of the folders CoLA, SST-2"),
    ("finetune rte --model {models}/encoder --data {data} --output {place}/out", "has no train file of rte"),
    (f"{PREDICT} --columns", "--columns: csv does not take it; its options: --text, --pair"),
    (f"{PREDICT} --input-format json", "input_format: expected txt, csv, tsv, jsonl, got 'json'"),
    (
        "predict swag --model {models}/swag --input x --input-format csv",
        "input_format: expected None for the task's official files, got 'csv'",
    ),
    (f"{PREDICT} --max-length 300", "max_length: the model reads at most 256 tokens, got 300"),
    (f"{PREDICT} --batch-tokens 0", "batch_tokens: expected an integer >= 1, got 0"),
    (f"{PREDICT} --pair x", "in.txt, line 1: expected two texts with a tab between, found 1"),
    (f"{PREDICT} --output {{place}}/in.txt --overwrite", "is the input file"),
    (f"{PREDICT} --output {{place}}/none/out", "none does not exist"),
    (
        "predict csv --model {models}/csv --input {place}/none.txt",
        "No such file or directory: '{place}/none.txt'",
    ),
    ("predict csv --model {models}/csv --input {place}/in.pdf", "expected a file that ends in .txt, .csv"),
    (
        "predict csv --model {models}/csv --input {place}/in.jsonl",
        "in.jsonl, line 2: expected an object with a",
    ),
    (
        "predict squad --model {models}/squad --input {place}/in.txt",
        "expected a file that ends in .jsonl, .json",
    ),
    ("predict squad --model {models}/csv --input x --null-threshold 1", "--null-threshold: squad does not"),
    ("predict csv --model {models}/encoder --input {place}/in.txt", "has no trained head for csv"),
    ("predict ner --model {models}/csv --input {place}/in.txt", "has no trained head for ner"),
    ("predict ner --model {models}/ner --input {place}/conll.txt", "has CoNLL's columns, which only"),
    ("predict race --model {models}/swag --input {place}", "no .txt in {place}/middle"),
]


@pytest.mark.parametrize(("line", "expected"), MISTAKES)
def test_a_mistake_is_one_line(line, expected, models, table, tmp_path, capsys):
    (tmp_path / "in.txt").write_text("the cat\n")
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n{"txt": "the cat"}\n')
    (tmp_path / "in.pdf").touch()
    (tmp_path / "conll.txt").write_text("-DOCSTART- -X-\n\nAnna NNP\n")
    if "--text" not in line and line.startswith("finetune csv"):
        line += " --text review --label stars"
    places = {"models": models, "data": table, "place": tmp_path}
    assert main(line.format(**places).split()) == 2
    said = [each for each in capsys.readouterr().err.splitlines() if "examples" not in each]
    assert len(said) == 1, said
    assert said[0].startswith("fastbert: error: ")
    assert expected.format(**places) in said[0]


@pytest.mark.parametrize(
    ("task", "examples", "expected"),
    [
        ("csv", ["a", ("a", "b")], "examples: expected texts, or pairs of texts, got ..a"),
        ("csv", [3], "examples: expected texts, or pairs of texts, got 3"),
        ("squad", ["who"], "examples: expected a question and a context, got 'who'"),
        ("ner", ["Anna sat"], "examples: expected a list of words, got 'Anna sat'"),
        ("swag", [("a", ["b"])], "examples: expected a text and four choices"),
    ],
)
def test_examples_of_another_kind_are_named(task, examples, expected, models):
    with pytest.raises((ValueError, TypeError), match=expected):
        list(fastbert.predict(task, models / task, examples, device="cpu"))


# --- the command line ---------------------------------------------------------------------------------------


def test_values_that_look_like_options_are_values():
    words = ["--model", "x", "--input", "x", "--output", "x", "--prompt", "--inputs x"]
    assert build_parser().parse_args(["encode", *words]).prompt == "--inputs x"
    assert build_parser().parse_args(["bench", "encoder", "--hepl"]).arguments == ["--hepl"]


def test_the_command_line_has_the_tasks_and_their_options():
    assert {*finetune_arguments.TASKS} == {*tasks.NAMES}
    assert {*finetune_arguments.GLUE} == {*tasks.GLUE}
    for task, options in finetune_arguments._OPTIONS["finetune"].items():
        assert {*options} == {*tasks.OPTIONS[task]} - {"max_query"}


def test_each_command_has_one_line_of_help_and_an_example():
    """The example is a command that parses."""
    parser = build_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    lines = {action.dest: action.help for action in commands._choices_actions}
    assert {*lines} == {*commands.choices}
    for name, each in {"": parser, **commands.choices}.items():
        assert len(lines.get(name, "")) <= 56, name
        example = each.format_help().rstrip().splitlines()[-1]
        assert re.match(rf"  fastbert {name}\b", example), name
        parser.parse_args(shlex.split(example)[1:])
