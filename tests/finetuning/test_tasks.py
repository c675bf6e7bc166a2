"""Each kind of task is learnt from its official files, and what is written is right and loads elsewhere."""

import csv
import dataclasses
import json
import shutil
import zipfile
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors

from fastbert.finetuning.encoded import outputs
from fastbert.finetuning.run import Result, finetune
from fastbert.finetuning.sequences import Table
from fastbert.finetuning.tagging import Ner
from fastbert.finetuning.tasks import NAMES, task_of
from fastbert.models.labels import IGNORED
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks import squad, squad_answers
from fastbert.tasks.files import Texts
from fastbert.tasks.ner import Sentence
from fastbert.tasks.published import PUBLISHED
from fastbert.tasks.squad import Answer, Question
from tests.support.rule_tasks import files, quick, tiny_model, written

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


# ModernBERT's tokens see eight others on each side, in every second layer
OTHERS = {
    "ModernBert": {"pad_token_id": 0, "local_attention": 16, "global_attn_every_n_layers": 2},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
}


@pytest.mark.parametrize("task", ["squad2", "ner"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_learn(memory, family, task):
    model = tiny_model(memory / family, kind=f"{family}Model", **OTHERS[family])
    how = TASKS[task]
    data = written(task, memory / f"for-{family}-{task}", how.train, DEV)
    options = {"lr": 2e-3, "epochs": how.epochs, "batch_size": how.batch_size}
    result = quick(made(task), model, data, memory / f"{family}-{task}", **options)
    assert result.best.score > (1 + how.constant) / 2
    theirs = {
        "squad2": transformers.AutoModelForQuestionAnswering,
        "ner": transformers.AutoModelForTokenClassification,
    }
    assert type(theirs[task].from_pretrained(result.output)).__name__.startswith(family)


@pytest.mark.parametrize("task", TASKS)
def test_results_are_those_of_the_saved_model(learnt, task):
    own, data, result = learnt(task)
    constant = own.constant(own.read(data, "train"), own.read(data, next(iter(result.scores))))
    assert constant == (None if task == "squad2" else pytest.approx(TASKS[task].constant))
    content = json.loads((result.output / "results.json").read_text())
    assert content["task"] == task
    assert content["metric"] == result.metric == own.metric
    assert content["scores"] == result.scores
    first = "dev_matched" if task == "mnli" else "dev"
    assert result.best.score == max(entry[first][own.metric] for entry in result.best.evaluations)
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
        assert header == ["", "pred"] if task == "swag" else "prediction" in header
        assert len(rows) == {"dev": DEV, "AX": 4, "MNLI-m": 5, "MNLI-mm": 5}.get(path.stem.split("_")[0], 7)
        if "label" in header:
            said, labels = ([row[header.index(name)] for row in rows] for name in ("prediction", "label"))
            if task == "stsb":
                said, labels = ([float(value) for value in side] for side in (said, labels))
            if path.stem in ("dev", "dev_matched"):
                examples = own.read(data, path.stem)
                assert labels == examples.labels
                assert own.scores(examples, said) == next(iter(result.scores.values()))
    if "test/submission.zip" in found:
        with zipfile.ZipFile(result.output / "test" / "submission.zip") as archive:
            names = sorted(archive.namelist())
        assert names == sorted(
            path.removeprefix("test/") for path in found if path.startswith("test") and path.endswith(".tsv")
        )


def again(task, data, output, **options):
    return finetune(task, None, data, output, predict_only=True, progress=False, **options)


@pytest.mark.parametrize("task", TASKS)
def test_predictions_are_the_same_again(tmp_path, learnt, task):
    """From the saved model alone, with the classes and the options of the training."""
    _, data, result = learnt(task)
    shutil.copytree(result.output, tmp_path / "run", ignore=shutil.ignore_patterns("runs", "dev", "test"))
    found = again(task, data, tmp_path / "run")
    assert found == dataclasses.replace(result, output=tmp_path / "run")
    # a .zip has the times of its files
    for name in ("results.json", *(name for name in TASKS[task].predictions if not name.endswith("zip"))):
        assert (tmp_path / "run" / name).read_bytes() == (result.output / name).read_bytes(), name


def test_another_threshold(tmp_path, learnt):
    """It is of the prediction files and of results.json; without a dev file it is that of the training."""
    _, data, result = learnt("squad2")
    copy = shutil.copytree(result.output, tmp_path / "run", ignore=shutil.ignore_patterns("runs"))

    def answers(split):
        return json.loads((copy / split / "predictions.json").read_text())

    first = answers("test")
    found = again("squad2", data, copy, null_threshold=-1e9)
    assert found.scores["dev"]["null_threshold"] == -1e9
    assert found.scores["dev"]["HasAns_f1"] == 0 < result.scores["dev"]["HasAns_f1"]
    assert found.runs == result.runs
    assert not any(answers("dev").values())
    (tmp_path / "data").mkdir()
    shutil.copy(data / "test-v2.0.json", tmp_path / "data")
    again("squad2", tmp_path / "data", copy)
    assert not any(answers("test").values())
    again("squad2", data, copy, null_threshold="auto")
    again("squad2", tmp_path / "data", copy)
    assert answers("test") == first
    assert any(first.values())


def test_predictions_need_a_trained_model(tmp_path, learnt):
    _, data, result = learnt("csv")
    (tmp_path / "data").mkdir()
    for task, folder, output, message in (
        (
            "csv",
            data,
            tmp_path / "none",
            r"^output: expected a directory that finetune has written, found no .*none",
        ),
        ("cola", data, result.output, r"^task: \S+ was trained on csv, got cola$"),
        ("csv", tmp_path / "data", result.output, r"^data: \S+ has no dev file and no test file of csv$"),
    ):
        with pytest.raises(ValueError, match=message):
            again(task, folder, output)


def test_predicted_answers_are_scored_as_reported(learnt):
    _, data, result = learnt("squad2")
    questions = squad.read(data / "dev-v2.0.json", train=False).questions
    answers = json.loads((result.output / "dev" / "predictions.json").read_text())
    found = squad_answers.evaluate(questions, answers)
    assert found["f1"] == pytest.approx(100 * result.best.score)


@pytest.mark.parametrize(("threshold", "answered"), [("auto", "abcd"), (5.5, "abc"), (0.0, "")])
def test_a_test_file_has_the_threshold_of_the_dev_file(tmp_path, threshold, answered):
    """By the dev file's F1, questions with odds of 6 have an answer; by its exact match, of 5 only."""
    own = task_of("squad2", null_threshold=threshold)
    for split, odds in (("dev", [5.0, 6.0, 7.0]), ("test", [4.0, 4.5, 5.0, 6.0, 8.0])):
        names = "abcde"[: len(odds)]
        texts = {"a": "cat", "b": "cat sat"} if split == "dev" else {}
        gold = {name: (Answer(texts[name], 4),) if name in texts else () for name in names}
        questions = [Question(name, "what ?", "the cat sat", gold[name]) for name in names]
        questions = squad.Questions(questions, labelled=split == "dev")
        answers, nbest = dict.fromkeys(names, "cat"), {name: [] for name in names}
        said = squad_answers.Predictions(answers, nbest, dict(zip(names, odds, strict=True)))
        if split == "dev":
            own.tune(questions, said)
        assert own.scores(questions, said).get("null_threshold") == (
            own.threshold if split == "dev" else None
        )
        own.write(tmp_path / split, split, questions, said)
    found = json.loads((tmp_path / "test" / "predictions.json").read_text())
    assert "".join(name for name, text in found.items() if text) == answered


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
        if row.task == "mrpc" and "f1" in row.scores and row.start == "pre-trained"
    ]
    assert 0 < len(shown) < sum(row.task == "mrpc" for row in PUBLISHED)
    assert "published" not in learnt("csv")[2].table()


@pytest.mark.parametrize(
    ("task", "changes", "row"),
    [
        ("mrpc", {"freeze": True}, "BERT base, not fine-tuned, Kovaleva et al. 2019 (dev, published): 0.0"),
        (
            "stsb",
            {"random_init": True},
            "BERT base, random weights, Kovaleva et al. 2019, perhaps Pearson (dev, published): 2.9",
        ),
    ],
)
def test_another_start_has_rows_of_that_start_only(tmp_path, model, task, changes, row):
    result = quick(
        task, model, written(task, tmp_path / "data", 16, 8), tmp_path / "run", epochs=1, **changes
    )
    assert [line for line in result.table().splitlines() if "published" in line] == [f"  {row}"]


def test_scores_of_classes_that_are_not_balanced():
    own = Table()
    own.classes = ["a", "b", "c"]
    train, dev = (Texts([""] * 4, [""] * 4, None, list(labels)) for labels in ("aabc", "bbba"))
    # F1 is 2/3 of a, 1/2 of b and 0 of c
    assert own.scores(train, list("abbb")) == {"accuracy": 0.5, "macro_f1": pytest.approx(7 / 18)}
    assert own.constant(train, dev) == 0.25


# -- kinds that are not learnt above -------------------------------------------------------------------------


def test_a_table_of_pairs_and_numbers(tmp_path, model):
    """Columns of any name, in a .tsv, and a regression."""
    written("stsb", tmp_path / "data", 24, 12)
    task = Table("sentence1", "sentence2", "score", regression=True)
    result = quick(task, model, tmp_path / "data", tmp_path / "run")
    assert [*result.scores["dev"]] == ["spearman", "pearson"]
    same = quick("stsb", model, tmp_path / "data", tmp_path / "same")
    assert result.best.evaluations == same.best.evaluations
    with open(tmp_path / "run" / "test" / "test.csv", newline="") as file:
        assert len([float(row["prediction"]) for row in csv.DictReader(file)]) == 7


def test_squad_1(tmp_path, model):
    """The same questions with answers as version 2.0; no threshold and no odds."""
    written("squad2", tmp_path / "data", 24, 12)
    for split in ("train", "dev"):
        content = json.loads((tmp_path / "data" / f"{split}-v2.0.json").read_text())
        content["data"] = [
            article for article in content["data"] if article["paragraphs"][0]["qas"][0]["answers"]
        ]
        (tmp_path / "data" / f"{split}-v1.1.json").write_text(json.dumps(content))
    task = task_of("squad", max_query=10, doc_stride=8)
    result = quick(task, model, tmp_path / "data", tmp_path / "run")
    assert [*result.scores["dev"]] == ["f1", "exact", "HasAns_exact", "HasAns_f1"]
    assert not (tmp_path / "run" / "dev" / "null_odds.json").exists()
    assert all(json.loads((tmp_path / "run" / "dev" / "predictions.json").read_text()).values())


def test_positions_are_those_of_the_answers(learnt):
    own, data, result = learnt("squad2")
    questions, tokenizer = own.read(data, "train"), load_tokenizer(result.output)
    encoded = own.encode(questions, tokenizer, 32, True)
    questions = questions.questions
    found = [
        tokenizer.decode(ids[start : end + 1]) if start else ""
        for ids, start, end in zip(
            np.split(encoded.ids, encoded.starts[1:-1]), *encoded.labels.values(), strict=True
        )
    ]
    assert found == [next((answer.text for answer in each.answers), "") for each in questions]
    assert result.scores["dev"]["HasAns_exact"] > 0.5


def test_race(tmp_path, model):
    for split, level in (("train", "high"), ("dev", "high"), ("dev", "middle"), ("test", "middle")):
        folder = tmp_path / "data" / split / level
        folder.mkdir(parents=True)
        for i in range(8):
            entry = {
                "id": f"{level}{i}.txt",
                "article": "the red cat sees the dog .",
                "questions": ["where is the _ ?"],
                "options": [["cat", "dog", "fox", "hen"]],
                "answers": ["ABCD"[i % 4]],
            }
            (folder / f"{i}.txt").write_text(json.dumps(entry))
    result = quick("race", model, tmp_path / "data", tmp_path / "run")
    assert [*result.scores["dev"]] == ["accuracy", "accuracy_middle", "accuracy_high"]
    rows = (tmp_path / "run" / "dev" / "dev.csv").read_text().splitlines()
    assert rows[0] == "id,prediction"
    assert len(rows) == 17


def test_entities_of_iob2_alone():
    sentences = [Sentence(0, ["anna", "bert"], ["B-PER", "O"])]
    said = [["I-PER", "O"]]
    assert Ner().scores(sentences, said)["f1"] == 1.0
    assert Ner(strict=True).scores(sentences, said)["f1"] == 0.0
    assert Ner().scores(sentences, [["B-PER", "B-PER"]]) == {"f1": 2 / 3, "precision": 0.5, "recall": 1.0}


def test_windows_have_context(tmp_path, model):
    data = written("ner", tmp_path / "data", 9, 3)
    tokenizer = load_tokenizer(model)
    scored = {}
    for context in (0, 4):
        task = Ner(context=context)
        encoded = task.encode(task.read(data, "train"), tokenizer, 24, True)
        labels = np.split(encoded.labels["labels"], encoded.starts[1:-1])
        scored[context] = max(int((part != IGNORED).sum()) for part in labels)
    # documents of three sentences are cut: 22 tokens less twice the context are left for what is scored
    assert scored[4] <= 14 < scored[0] <= 22


def _spoilt_mrpc(data):
    written("mrpc", data, 16, 8)


def _spoilt_qqp(data):
    """Line ends within a question split two rows."""
    data.mkdir()
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    rows = "".join(f"{i}\t1\t2\tthe cat\tthe dog\t{i % 2}\n" for i in range(8))
    (data / "train.tsv").write_text(f"{header}{rows}8\t1\t2\tthe\ncat\tthe dog\t1\n")
    (data / "dev.tsv").write_text(header + rows)


def _spoilt_squad2(data):
    """An answer out of place, one that begins within a word, and a question of more than ten words."""
    written("squad2", data, 9, 9)
    file = data / "train-v2.0.json"
    content = json.loads(file.read_text())
    entries = [article["paragraphs"][0]["qas"][0] for article in content["data"]]
    answers = [entry["answers"][0] for entry in entries if entry["answers"]]
    answers[0]["answer_start"] += 1
    answers[1] |= {"text": answers[1]["text"][1:], "answer_start": answers[1]["answer_start"] + 1}
    entries[-1]["question"] += " and" * 11
    file.write_text(json.dumps(content))


def _spoilt_ner(data):
    """A word of which the tokenizer makes nothing."""
    written("ner", data, 8, 8)
    with open(data / "train.txt", "a", encoding="utf-8") as file:
        file.write("\u200b O\n")


@pytest.mark.parametrize(
    ("task", "spoil", "said", "counts"),
    [
        (
            "mrpc",
            _spoilt_mrpc,
            "16 examples, 16 sequences cut to 9 tokens",
            {"examples": 16, "malformed_rows_skipped": 0, "sequences_cut": 16},
        ),
        (
            "qqp",
            _spoilt_qqp,
            "8 examples, 2 malformed rows skipped",
            {"examples": 8, "malformed_rows_skipped": 2, "sequences_cut": 0},
        ),
        (
            "squad2",
            _spoilt_squad2,
            "8 questions, 8 windows, 1 misplaced answers skipped, 1 inexact answers, 1 questions cut",
            {
                **{"questions": 8, "windows": 8, "misplaced_answers_skipped": 1},
                **{"inexact_answers": 1, "questions_cut": 1},
            },
        ),
        (
            "ner",
            _spoilt_ner,
            "9 sentences, 3 windows, 1 words without tokens",
            {"sentences": 9, "windows": 3, "words_without_tokens": 1, "words_cut": 0},
        ),
    ],
)
def test_what_is_left_out_cut_or_mended_is_counted(tmp_path, model, task, spoil, said, counts):
    spoil(tmp_path / "data")
    length = {"mrpc": 9}.get(task, 32)
    lines, own = [], made(task)
    quick(own, model, tmp_path / "data", tmp_path / "run", max_length=length, epochs=0.1, say=lines.append)
    assert lines[0] == f"train: {said}"
    assert json.loads((tmp_path / "run" / "results.json").read_text())["counts"]["train"] == counts


def test_of_a_pair_the_longer_text_loses_tokens(tmp_path, model):
    own, data = task_of("mrpc"), written("mrpc", tmp_path / "data", 8, 8)
    examples, tokenizer = own.read(data, "dev"), load_tokenizer(model)
    encoded = own.encode(examples, tokenizer, 9, False)
    assert encoded.ids[:4].tolist() == tokenizer.encode(examples.texts[0]).ids[:4]
    # three tokens are left of each
    assert {tuple(types) for types in np.split(encoded.types, encoded.starts[1:-1])} == {(0,) * 5 + (1,) * 4}
    # RoBERTa's four special tokens
    tokenizer.post_processor = processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2))
    with pytest.raises(ValueError, match=r"^max_length: expected at least 4, the special tokens, got 3$"):
        own.encode(examples, tokenizer, 3, False)


@pytest.mark.parametrize("labelled", [True, False])
def test_a_test_file_with_labels_is_scored(tmp_path, model, labelled):
    data = written("csv", tmp_path / "data", 24, 12)
    if labelled:
        (data / "test.csv").write_bytes((data / "dev.csv").read_bytes())
    result = quick("csv", model, data, tmp_path / "run", epochs=1)
    assert result.scores.get("test") == (result.scores["dev"] if labelled else None)
    assert ("best, test: accuracy" in result.table()) is labelled
