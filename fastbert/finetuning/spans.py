"""SQuAD 1.1 and 2.0: answers as spans of a context. Predictions are `squad_answers.Predictions`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModelForQuestionAnswering
from fastbert.tasks import squad, squad_answers
from fastbert.tasks.squad import Question
from fastbert.tasks.squad_answers import Predictions


class Squad(Task):
    """SQuAD of one version: train-v1.1.json and dev-v1.1.json, or train-v2.0.json and dev-v2.0.json.

    Args:
        version: 1 or 2; in version 2 a question may have no answer.
        doc_stride: context tokens from the start of a window to the start of the next.
        max_query: most tokens of a question.
        null_threshold: version 2: "" is answered where no answer scores so much more than the best text;
            None takes the threshold of the best F1 on the dev file, also for a test file.
    """

    head = AutoModelForQuestionAnswering
    fields = ("start_logits", "end_logits")
    metric = "f1"

    def __init__(
        self, version: int, *, doc_stride: int = 128, max_query: int = 64, null_threshold: float | None = None
    ) -> None:
        self.version, self.doc_stride, self.max_query = version, doc_stride, max_query
        self.null_threshold = null_threshold
        self.options = {"null_threshold": null_threshold}
        self._found = 0.0
        self.name = "squad" if version == 1 else "squad2"
        self.defaults = {"lr": 5e-5, "epochs": 3, "batch_size": 32, "max_length": 384}
        if version == 2:
            self.defaults |= {"epochs": 2, "batch_size": 48}

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The files that are there."""
        kinds = ("train", "dev", "test")
        return {kind: [kind] if self._file(data, kind).is_file() else [] for kind in kinds}

    def _file(self, data: Path, split: str) -> Path:
        return data / f"{split}-v{'1.1' if self.version == 1 else '2.0'}.json"

    def read(self, data: Path, split: str) -> list[Question]:
        """The questions of a split; those whose answer is not in its place are left out of training."""
        return squad.read(self._file(data, split), train=split == "train").questions

    def encode(
        self, examples: list[Question], tokenizer: Tokenizer, max_length: int, labelled: bool
    ) -> Encoded:
        """A sequence per window."""
        options = {"max_length": max_length, "doc_stride": self.doc_stride, "max_query": self.max_query}
        windows = squad.windows(examples, tokenizer, **options).windows
        labels = {}
        if labelled:
            labels["start_positions"] = np.array([window.start for window in windows], np.int64)
            labels["end_positions"] = np.array([window.end for window in windows], np.int64)
        return Encoded(
            np.concatenate([window.ids for window in windows]).astype(np.int64),
            np.concatenate([window.types for window in windows]).astype(np.int64),
            np.concatenate([[0], np.cumsum([len(window.ids) for window in windows])]),
            labels,
            windows=windows,
        )

    def predictions(
        self, examples: list[Question], encoded: Encoded, outputs: Sequence[np.ndarray]
    ) -> Predictions:
        """The best answers of all windows of each question."""
        starts, ends = (np.split(scores, encoded.starts[1:-1]) for scores in outputs)
        return squad_answers.predict(examples, encoded.windows, starts, ends, null=self.version == 2)

    def threshold(self, examples: list[Question], predictions: Predictions) -> float:
        """The threshold for no answer; see the class."""
        if self.version == 1:
            return 0.0
        if self.null_threshold is None:
            found = squad_answers.evaluate(examples, predictions.answers, predictions.null_odds)
            return found["best_f1_thresh"]
        return self.null_threshold

    def scores(self, examples: list[Question], predictions: Predictions) -> dict[str, float]:
        """F1 and exact match, in version 2 also of questions with and without an answer."""
        threshold = self.threshold(examples, predictions)
        odds = predictions.null_odds if self.version == 2 else None
        found = squad_answers.evaluate(examples, predictions.answers, odds, threshold)
        shares = {
            name: value / 100
            for name, value in found.items()
            if not name.endswith(("total", "thresh")) and not name.startswith("best")
        }
        more = {"null_threshold": threshold} if self.version == 2 else {}
        return {"f1": shares.pop("f1"), **shares, **more}

    def write(
        self, folder: Path, split: str, examples: list[Question], predictions: Predictions
    ) -> list[Path]:
        """predictions.json, nbest_predictions.json and, in version 2, null_odds.json."""
        if any(question.answers for question in examples):
            self._found = self.threshold(examples, predictions)
        threshold = self._found if self.null_threshold is None else self.null_threshold
        squad_answers.write(folder, predictions, threshold)
        return sorted(folder.glob("*.json"))
