"""The tasks of GLUE as a table, and published scores.

Source: Wang et al. 2018, "GLUE", table 1; Devlin et al. 2018, "BERT", table 1 (test); Clark et al. 2020,
"ELECTRA", table 2 (dev), which says that its STS-B is Spearman and, except for CoLA, all else is accuracy.
"""

from __future__ import annotations

from typing import NamedTuple

_USUAL = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}


class Task(NamedTuple):
    """One task: where its columns are, what its labels mean, and how it is scored.

    Attributes:
        folder: of the official download.
        texts: the names of the one or two columns of text.
        places: the places of these columns in a file with labels, from 0.
        test_places: their places in the test file.
        label: the name of the label's column.
        label_place: its place; -1 is the last column.
        labels: label in the files -> name of its class, in the order of the classes. Empty for a regression.
        metrics: names of functions of `fastbert.tasks.metrics`, the main metric first.
        submissions: test split -> name of its file in a submission, without ".tsv".
        files: split -> file name.
        headless: splits without a header.
    """

    folder: str
    texts: tuple[str, ...]
    places: tuple[int, ...]
    test_places: tuple[int, ...]
    label: str
    label_place: int
    labels: dict[str, str]
    metrics: tuple[str, ...]
    submissions: dict[str, str]
    files: dict[str, str] = _USUAL
    headless: tuple[str, ...] = ()

    @property
    def regression(self) -> bool:
        """Whether the labels are numbers."""
        return not self.labels

    @property
    def positive(self) -> str:
        """The class that F1 is computed for: the last."""
        return list(self.labels.values())[-1]


def _inference(folder: str, texts: tuple[str, ...] = ("sentence1", "sentence2")) -> Task:
    """A task of two texts in columns 1 and 2, whose labels are entailment or not."""
    labels = {"entailment": "entailment", "not_entailment": "not_entailment"}
    return Task(folder, texts, (1, 2), (1, 2), "label", -1, labels, ("accuracy",), {"test": folder})


_MNLI = Task(
    folder="MNLI",
    texts=("sentence1", "sentence2"),
    places=(8, 9),
    test_places=(8, 9),
    label="gold_label",
    label_place=-1,
    labels={name: name for name in ("contradiction", "entailment", "neutral")},
    metrics=("accuracy",),
    submissions={"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"},
    files={"train": "train.tsv"}
    | {
        f"{split}_{kind}": f"{split}_{kind}.tsv"
        for split in ("dev", "test")
        for kind in ("matched", "mismatched")
    },
)

TASKS = {
    "cola": Task(
        folder="CoLA",
        texts=("sentence",),
        places=(3,),
        test_places=(1,),
        label="label",
        label_place=1,
        labels={"0": "unacceptable", "1": "acceptable"},
        metrics=("matthews",),
        submissions={"test": "CoLA"},
        headless=("train", "dev"),
    ),
    "sst2": Task(
        folder="SST-2",
        texts=("sentence",),
        places=(0,),
        test_places=(1,),
        label="label",
        label_place=1,
        labels={"0": "negative", "1": "positive"},
        metrics=("accuracy",),
        submissions={"test": "SST-2"},
    ),
    "mrpc": Task(
        folder="MRPC",
        texts=("#1 String", "#2 String"),
        places=(3, 4),
        test_places=(3, 4),
        label="Quality",
        label_place=0,
        labels={"0": "not_equivalent", "1": "equivalent"},
        metrics=("f1", "accuracy"),
        submissions={"test": "MRPC"},
    ),
    "stsb": Task(
        folder="STS-B",
        texts=("sentence1", "sentence2"),
        places=(7, 8),
        test_places=(7, 8),
        label="score",
        label_place=-1,
        labels={},
        metrics=("spearman", "pearson"),
        submissions={"test": "STS-B"},
    ),
    "qqp": Task(
        folder="QQP",
        texts=("question1", "question2"),
        places=(3, 4),
        test_places=(1, 2),
        label="is_duplicate",
        label_place=5,
        labels={"0": "not_duplicate", "1": "duplicate"},
        metrics=("f1", "accuracy"),
        submissions={"test": "QQP"},
    ),
    "mnli": _MNLI,
    "qnli": _inference("QNLI", ("question", "sentence")),
    "rte": _inference("RTE"),
    "wnli": _inference("WNLI")._replace(labels={"0": "not_entailment", "1": "entailment"}),
    # The diagnostic set, which the model of MNLI predicts
    "ax": _MNLI._replace(
        folder="diagnostic",
        places=(1, 2),
        test_places=(1, 2),
        metrics=("matthews",),
        submissions={"test": "AX"},
        files={"test": "diagnostic.tsv"},
    ),
}

# Columns of the scores below: a task, or the kind of MNLI's files; the metric per split
COLUMNS = {
    "mnli_matched": {"test": "accuracy", "dev": "accuracy"},
    "mnli_mismatched": {"test": "accuracy", "dev": "accuracy"},
    "qqp": {"test": "f1", "dev": "accuracy"},
    "qnli": {"test": "accuracy", "dev": "accuracy"},
    "sst2": {"test": "accuracy", "dev": "accuracy"},
    "cola": {"test": "matthews", "dev": "matthews"},
    "stsb": {"test": "spearman", "dev": "spearman"},
    "mrpc": {"test": "f1", "dev": "accuracy"},
    "rte": {"test": "accuracy", "dev": "accuracy"},
}


class Published(NamedTuple):
    """The scores of a published model, in percent.

    Attributes:
        model: as the paper names it.
        split: test or dev.
        scores: one per column of `COLUMNS`, or None.
        average: the mean of the columns as the paper prints it, or None.
    """

    model: str
    split: str
    scores: tuple[float | None, ...]
    average: float | None = None


PUBLISHED = (
    Published("before OpenAI", "test", (80.6, 80.1, 66.1, 82.3, 93.2, 35.0, 81.0, 86.0, 61.7), 74.0),
    Published("BiLSTM+ELMo+Attn", "test", (76.4, 76.1, 64.8, 79.8, 90.4, 36.0, 73.3, 84.9, 56.8), 71.0),
    Published("OpenAI GPT", "test", (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0), 75.1),
    Published("BERT base", "test", (84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4), 79.6),
    Published("BERT large", "test", (86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1), 82.1),
    Published("BERT large", "dev", (86.6, None, 91.3, 92.3, 93.2, 60.6, 90.0, 88.0, 70.4)),
    Published("RoBERTa large", "dev", (90.2, None, 92.2, 94.7, 96.4, 68.0, 92.4, 90.9, 86.6)),
)
