"""The tasks of GLUE as a table.

Source: Wang et al. 2018, "GLUE", table 1 and the official download.
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
