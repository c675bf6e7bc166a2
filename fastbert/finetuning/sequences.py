"""GLUE's tasks, and a user's own tables: one class or one number per text, or per pair of texts."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded, joined
from fastbert.finetuning.start import classes_of
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.config import EncoderConfig
from fastbert.tasks import csv_file, glue, glue_tasks, metrics
from fastbert.tasks.files import Texts


def pairs_encoded(tokenizer: Tokenizer, texts: Sequence[Any], max_length: int) -> Any:
    """Encodings of texts or pairs; of a pair that is too long the longer text loses tokens."""
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    # With less room than this, the tokenizer cuts nothing
    least = own.num_special_tokens_to_add(not isinstance(texts[0], str))
    if max_length < least:
        raise ValueError(f"max_length: expected at least {least}, the special tokens, got {max_length}")
    own.enable_truncation(max_length, strategy="longest_first")
    return own.encode_batch(list(texts))


class SequenceTask(Task):
    """One label per example. A subclass says how files are read, scored and written.

    Predictions are names of classes, or floats for a regression.
    """

    head = AutoModelForSequenceClassification

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return not self.classes

    def adopt(self, config: EncoderConfig) -> None:
        """Take the order of the classes from a checkpoint that knows them by name."""
        self.classes = classes_of(config, self.classes)

    def encode(self, examples: Texts, tokenizer: Tokenizer, max_length: int, labelled: bool) -> Encoded:
        """The examples as tokens; with labels if `labelled`."""
        pairs = examples.pairs
        texts = examples.texts if pairs is None else list(zip(examples.texts, pairs, strict=True))
        labels = {}
        if labelled:
            assert examples.labels is not None
            ids = {name: i for i, name in enumerate(self.classes)}
            values = examples.labels if self.regression else [ids[label] for label in examples.labels]
            labels = {"labels": np.asarray(values, np.float32 if self.regression else np.int64)}
        return joined(pairs_encoded(tokenizer, texts, max_length), labels)

    def counts(self, examples: Texts, encoded: Encoded) -> dict[str, int]:
        """Examples, malformed rows and cut sequences."""
        return {"examples": len(encoded), "malformed_rows_skipped": examples.skipped, **encoded.counts}

    def predictions(self, examples: Texts, encoded: Encoded, outputs: Sequence[np.ndarray]) -> list[Any]:
        """The most likely class of each example, or its number."""
        (logits,) = outputs
        if self.regression:
            return logits[:, 0].tolist()
        return [self.classes[i] for i in logits.argmax(1)]

    def constant(self, train: Texts, dev: Texts) -> float:
        """The main score on `dev` of the most frequent class of `train`, or of its mean."""
        assert train.labels is not None
        one = np.mean(train.labels) if self.regression else Counter(train.labels).most_common(1)[0][0]
        return self.scores(dev, [one] * len(dev.texts))[self.metric]


class Glue(SequenceTask):
    """A task of GLUE.

    Args:
        name: a key of `glue_tasks.TASKS`, but ax, which MNLI's model predicts.
    """

    def __init__(self, name: str) -> None:
        self.defaults = {"lr": 3e-5, "epochs": 3, "batch_size": 32, "max_length": 128}
        form = glue_tasks.TASKS[name]
        self.name, self.form = name, form
        self._submitted: dict[str, dict[str, Any]] = {}
        self.classes = list(form.labels.values())
        self.labels = len(self.classes) or 1
        self.metric = form.metrics[0]

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The splits whose files are there."""

        def has(form: glue_tasks.Task, split: str) -> bool:
            return any((folder / form.files[split]).is_file() for folder in (data, data / form.folder))

        there = [split for split in self.form.files if has(self.form, split)]
        kinds = {kind: [s for s in there if s.startswith(kind)] for kind in ("train", "dev", "test")}
        if self.name == "mnli" and has(glue_tasks.TASKS["ax"], "test"):
            kinds["test"].append("ax")
        return kinds

    def read(self, data: Path, split: str) -> Texts:
        """The examples of a split."""
        return glue.read("ax", data, "test") if split == "ax" else glue.read(self.name, data, split)

    def scores(self, examples: Texts, predictions: list[Any]) -> dict[str, float]:
        """The official metrics."""
        if examples.labels is None:
            return {}
        return glue.score(self.name, predictions, examples.labels)

    def write(self, folder: Path, split: str, examples: Texts, predictions: list[Any]) -> list[Path]:
        """A test split's file and submission.zip; for a dev split index, prediction and label."""
        found = dict(zip(examples.ids, predictions, strict=True))
        form = glue_tasks.TASKS["ax"] if split == "ax" else self.form
        name = form.submissions.get("test" if split == "ax" else split)
        if name is not None:
            # MNLI has three test files, and one submission has all of them
            self._submitted[name] = found
            archive = glue.write_submission(folder, self._submitted)
            return [folder / f"{name}.tsv", archive]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{split}.tsv"
        rows = zip(examples.ids, predictions, examples.labels or (), strict=True)
        lines = ["index\tprediction\tlabel\n", *(f"{i}\t{said}\t{label}\n" for i, said, label in rows)]
        path.write_text("".join(lines), encoding="utf-8")
        return [path]


class Table(SequenceTask):
    """A user's own table: train.csv, dev.csv and test.csv, or the same in .tsv.

    Args:
        text: the name of the column of texts.
        pair: the name of the column of second texts, or None.
        label: the name of the column of labels.
        regression: whether the labels are numbers; otherwise they are names of classes.
    """

    name = "csv"

    def __init__(
        self, text: str = "text", pair: str | None = None, label: str = "label", regression: bool = False
    ) -> None:
        self.columns, self.of_numbers = (text, pair, label), regression
        self.options = {"text": text, "pair": pair, "label": label, "regression": regression}
        self.metric = "spearman" if regression else "accuracy"
        self.labels = 1
        self.defaults = {"lr": 3e-5, "epochs": 3, "batch_size": 32, "max_length": 128}

    @property
    def regression(self) -> bool:
        """Whether the label is a number."""
        return self.of_numbers

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The files that are there."""
        return {kind: [kind] if _table(data, kind) else [] for kind in ("train", "dev", "test")}

    def read(self, data: Path, split: str) -> Texts:
        """The examples of a split. The training file says which classes there are."""
        path = _table(data, split)
        if path is None:
            raise ValueError(f"data: {data} has no {split}.csv and no {split}.tsv")
        text, pair, label = self.columns
        is_labelled = split != "test" or csv_file.has_labels(path, label)
        found = csv_file.read(path, text, pair, label if is_labelled else None, regression=self.regression)
        if split == "train" and not self.regression:
            self.classes = csv_file.classes(found.labels or [])
            self.labels = len(self.classes)
            if self.labels < 2:
                raise ValueError(f"{path}: expected two labels or more, found only {self.classes[0]!r}")
        unknown = {*(found.labels or [])} - {*self.classes} if not self.regression else ()
        if unknown:
            raise ValueError(f"{path}: {min(unknown)!r} is no label of the training file")
        return found

    def scores(self, examples: Texts, predictions: list[Any]) -> dict[str, float]:
        """Accuracy and the mean F1 of all classes; or Spearman and Pearson."""
        labels = examples.labels
        if labels is None:
            return {}
        if self.regression:
            return {name: getattr(metrics, name)(predictions, labels) for name in ("spearman", "pearson")}
        each = [metrics.f1(predictions, labels, name) for name in self.classes]
        return {"accuracy": metrics.accuracy(predictions, labels), "macro_f1": float(np.mean(each))}

    def write(self, folder: Path, split: str, examples: Texts, predictions: list[Any]) -> list[Path]:
        """SPLIT.csv with the row's number and its prediction."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{split}.csv"
        with open(path, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["row", "prediction"])
            rows.writerows(zip(examples.ids, predictions, strict=True))
        return [path]


def _table(data: Path, split: str) -> Path | None:
    files = (data / f"{split}.csv", data / f"{split}.tsv")
    return next((file for file in files if file.is_file()), None)
