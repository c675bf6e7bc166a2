"""Each kind of task is learnt from its official files, and what is written is right and loads elsewhere."""

import csv
import json
import zipfile
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers

from fastbert.finetuning.encoded import outputs
from fastbert.finetuning.run import Result
from fastbert.finetuning.tasks import NAMES, task_of
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import squad, squad_answers
from fastbert.tasks.published import PUBLISHED
from tests.support.rule_tasks import files, quick, written

DEV = 60


class Learnt(NamedTuple):
    """How a task is learnt: examples, epochs, examples per step, and the score of one answer for all."""

    train: int
    epochs: int
    batch_size: int
    constant: float
    predictions: tuple[str, ...]


TASKS = {
    "cola": Learnt(256, 3, 16, 0.0, ("dev/dev.tsv", "test/CoLA.tsv", "test/submission.zip")),
    "stsb": Learnt(512, 8, 16, 0.0, ("dev/dev.tsv", "test/STS-B.tsv", "test/submission.zip")),
    "mrpc": Learnt(512, 8, 16, 0.8, ("dev/dev.tsv", "test/MRPC.tsv", "test/submission.zip")),
    "mnli": Learnt(
        96,
        4,
        16,
        1 / 3,
        (
            "dev/dev_matched.tsv",
            "dev/dev_mismatched.tsv",
            *(f"test/{name}" for name in ("AX.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "submission.zip")),
        ),
    ),
    "squad2": Learnt(
        256,
        2,
        16,
        1 / 3,
        tuple(
            f"{split}/{name}.json"
            for split in ("dev", "test")
            for name in ("nbest_predictions", "null_odds", "predictions")
        ),
    ),
    "swag": Learnt(256, 4, 16, 0.25, ("dev/dev.csv", "test/test.csv")),
    "ner": Learnt(96, 4, 4, 0.0, ("dev/dev.txt", "test/test.txt")),
    "csv": Learnt(96, 3, 16, 1 / 3, ("dev/dev.csv", "test/test.csv")),
}


def made(task):
    options = {"max_query": 10, "doc_stride": 8} if task == "squad2" else {}
    return task_of(task, **options)


@pytest.fixture(scope="module")
def learnt(memory, model):
    """task -> (its object, its data, the result of fine-tuning), made once."""
    found = {}

    def of(task) -> tuple:
        if task not in found:
            how = TASKS[task]
            data, own = written(task, memory / task, how.train, DEV), made(task)
            options = {"lr": 2e-3, "epochs": how.epochs, "batch_size": how.batch_size}
            found[task] = own, data, quick(own, model, data, memory / f"of-{task}", **options)
        return found[task]

    return of


@pytest.mark.parametrize("task", TASKS)
def test_is_learnt(learnt, task):
    _, _, result = learnt(task)
    assert result.best.score > (1 + TASKS[task].constant) / 2
    assert not result.best.failed


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_the_saved_model(learnt, task):
    own, data, result = learnt(task)
    constant = own.constant(own.read(data, "train"), own.read(data, next(iter(result.scores))))
    assert constant == (None if task == "squad2" else pytest.approx(TASKS[task].constant))
    content = json.loads((result.output / "results.json").read_text())
    assert content["task"] == task
    assert content["metric"] == result.metric == own.metric
    assert content["scores"] == result.scores
    assert content["best"] == content["runs"][0]["settings"]
    assert content["runs"][0]["evaluations"] == result.best.evaluations
    model = own.head.from_pretrained(result.output)
    for split, scores in result.scores.items():
        examples = own.read(data, split)
        encoded = own.encode(examples, load_tokenizer(result.output), 32, False)
        said = own.predictions(examples, encoded, outputs(model, encoded, own.fields))
        assert own.scores(examples, said) == scores


@pytest.mark.parametrize("task", TASKS)
def test_prediction_files(learnt, task):
    own, data, result = learnt(task)
    found = [
        path.relative_to(result.output).as_posix()
        for split in ("dev", "test")
        for path in files(result.output / split)
    ]
    assert found == sorted(TASKS[task].predictions)
    tables = [path for path in files(result.output) if path.suffix in (".tsv", ".csv")]
    for path in tables:
        with open(path, newline="") as file:
            header, *rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        assert "prediction" in header
        assert len(rows) == {"dev": DEV, "AX": 4, "MNLI-m": 5, "MNLI-mm": 5}.get(path.stem.split("_")[0], 7)
        if "label" in header:
            said, labels = ([row[header.index(name)] for row in rows] for name in ("prediction", "label"))
            if task == "stsb":
                said, labels = ([float(value) for value in side] for side in (said, labels))
            if path.stem in ("dev", "dev_matched"):
                assert own.scores(own.read(data, path.stem)._replace(labels=labels), said) == next(
                    iter(result.scores.values())
                )
    if "test/submission.zip" in found:
        with zipfile.ZipFile(result.output / "test" / "submission.zip") as archive:
            names = sorted(archive.namelist())
        assert names == sorted(
            path.removeprefix("test/") for path in found if path.startswith("test") and path.endswith(".tsv")
        )


def test_predicted_answers_are_scored_as_reported(learnt):
    _, data, result = learnt("squad2")
    questions = squad.read(data / "dev-v2.0.json", train=False).questions
    answers = json.loads((result.output / "dev" / "predictions.json").read_text())
    found = squad_answers.evaluate(questions, answers)
    assert found["f1"] == pytest.approx(100 * result.best.score)
    threshold = result.scores["dev"]["null_threshold"]
    odds = json.loads((result.output / "test" / "null_odds.json").read_text())
    answers = json.loads((result.output / "test" / "predictions.json").read_text())
    assert threshold != 0
    assert {name for name, text in answers.items() if not text} == {
        name for name, value in odds.items() if value > threshold
    }


def test_predicted_tags_are_a_column_of_the_file(learnt):
    _, data, result = learnt("ner")
    theirs = (data / "valid.txt").read_text().splitlines()
    ours = (result.output / "dev" / "dev.txt").read_text().splitlines()
    assert [line.rpartition(" ")[0] if line else "" for line in ours] == theirs


AUTO = {
    "squad2": transformers.AutoModelForQuestionAnswering,
    "swag": transformers.AutoModelForMultipleChoice,
    "ner": transformers.AutoModelForTokenClassification,
}


@pytest.mark.parametrize("task", TASKS)
def test_transformers_loads_the_model(learnt, task):
    own, data, result = learnt(task)
    theirs = AUTO.get(task, transformers.AutoModelForSequenceClassification)
    theirs, loading = theirs.from_pretrained(result.output, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    if own.classes:
        assert [*theirs.config.id2label.values()] == [*own.classes]
        assert theirs.config.label2id == {name: i for i, name in enumerate(own.classes)}
    if task in ("cola", "stsb"):
        problem = "regression" if task == "stsb" else "single_label_classification"
        assert theirs.config.problem_type == problem
    examples = own.read(data, "dev_matched" if task == "mnli" else "dev")
    encoded = own.encode(examples, load_tokenizer(result.output), 32, False)
    ours = own.head.from_pretrained(result.output)
    arrays = {"input_ids": encoded.ids, "token_type_ids": encoded.types}
    first = {key: torch.from_numpy(array[None, : encoded.starts[1]]) for key, array in arrays.items()}
    if task == "swag":
        first = {key: value[None] for key, value in first.items()}
    with torch.no_grad():
        expected = theirs.eval()(**first)
    for name, actual in zip(own.fields, outputs(ours, encoded, own.fields), strict=True):
        # the first sequence's
        rows = actual.ravel()[: expected[name].numel()]
        np.testing.assert_allclose(rows, expected[name].ravel().numpy(), atol=2e-5, rtol=2e-5)


def test_published_rows_have_the_task_and_the_metric():
    for name in NAMES:
        rows = [row for row in PUBLISHED if row.task == name]
        assert bool(rows) is (name not in ("race", "csv", "wnli"))
        assert not rows or any(task_of(name).metric in row.scores for row in rows)


def test_table_has_rows_of_its_metric_only(learnt):
    _, _, result = learnt("mrpc")
    assert isinstance(result, Result)
    shown = [line for line in result.table().splitlines() if "published" in line]
    assert shown == [
        f"  {row.model} ({row.split}, published): {row.scores['f1']:.1f}"
        for row in PUBLISHED
        if row.task == "mrpc" and "f1" in row.scores
    ]
    assert 0 < len(shown) < sum(row.task == "mrpc" for row in PUBLISHED)
    assert "published" not in learnt("csv")[2].table()
