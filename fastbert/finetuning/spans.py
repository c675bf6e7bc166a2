"""SQuAD 1.1 and 2.0: answers as spans of a context. Predictions are `squad_answers.Predictions`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModelForQuestionAnswering
from fastbert.tasks import squad, squad_answers
from fastbert.tasks.squad import Questions
from fastbert.tasks.squad_answers import Predictions


class Squad(Task):
    """SQuAD of one version: train-v1.1.json and dev-v1.1.json, or train-v2.0.json and dev-v2.0.json.

    Examples are `squad.Questions`.

    Args:
        version: 1 or 2; in version 2 a question may have no answer.
        doc_stride: context tokens from the start of a window to the start of the next.
        max_query: most tokens of a question.
        null_threshold: version 2: "" is answered where no answer scores so much more than the best text;
            "auto" takes the threshold of the best F1 on the dev file, also for a test file.

    Attributes:
        threshold: the threshold in use.
    """

    head = AutoModelForQuestionAnswering
    fields = ("start_logits", "end_logits")
    metric = "f1"

    def __init__(
        self,
        version: int,
        *,
        doc_stride: int = 128,
        max_query: int = 64,
        null_threshold: float | str = "auto",
    ) -> None:
        self.version, self.doc_stride, self.max_query = version, doc_stride, max_query
        self.null_threshold = null_threshold
        self.options = {"doc_stride": doc_stride, "max_query": max_query}
        self.name = "squad" if version == 1 else "squad2"
        self.defaults = {"lr": 5e-5, "epochs": 3, "batch_size": 32, "max_length": 384}
        self.threshold = 0.0
        if version == 2:
            self.options["null_threshold"] = null_threshold
            self.defaults |= {"epochs": 2, "batch_size": 48}
        if null_threshold == "auto":
            return
        if isinstance(null_threshold, (bool, str)) or not math.isfinite(null_threshold):
            raise ValueError(f"null_threshold: expected 'auto' or a finite number, got {null_threshold!r}")
        self.threshold = float(null_threshold)

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The files that are there."""
        kinds = ("train", "dev", "test")
        return {kind: [kind] if self._file(data, kind).is_file() else [] for kind in kinds}

    def _file(self, data: Path, split: str) -> Path:
        return data / f"{split}-v{'1.1' if self.version == 1 else '2.0'}.json"

    def read(self, data: Path, split: str) -> Questions:
        """The questions of a split; those whose answer is not in its place are left out of training."""
        found = squad.read(self._file(data, split), train=split == "train")
        if split == "dev" and not found.labelled:
            raise ValueError(f"{self._file(data, split)}: expected questions with answers, found none")
        return found

    def encode(self, examples: Questions, tokenizer: Tokenizer, max_length: int, labelled: bool) -> Encoded:
        """A sequence per window."""
        options = {"max_length": max_length, "doc_stride": self.doc_stride, "max_query": self.max_query}
        windows, inexact, cut = squad.windows(examples.questions, tokenizer, **options)
        labels = {}
        if labelled:
            labels["start_positions"] = np.array([window.start for window in windows], np.int64)
            labels["end_positions"] = np.array([window.end for window in windows], np.int64)
        return Encoded(
            np.concatenate([window.ids for window in windows]).astype(np.int64),
            np.concatenate([window.types for window in windows]).astype(np.int64),
            np.concatenate([[0], np.cumsum([len(window.ids) for window in windows])]),
            labels,
            counts={"inexact_answers": len(inexact), "questions_cut": len(cut)},
            windows=windows,
        )

    def counts(self, examples: Questions, encoded: Encoded) -> dict[str, int]:
        """Questions and windows; answers that are not in their place or that tokens do not cover exactly."""
        return {
            "questions": len(examples.questions),
            "windows": len(encoded),
            "misplaced_answers_skipped": len(examples.misplaced),
            **encoded.counts,
        }

    def predictions(
        self, examples: Questions, encoded: Encoded, outputs: Sequence[np.ndarray]
    ) -> Predictions:
        """The best answers of all windows of each question."""
        starts, ends = (np.split(scores, encoded.starts[1:-1]) for scores in outputs)
        null = self.version == 2
        return squad_answers.predict(examples.questions, encoded.windows, starts, ends, null=null)

    def tune(self, examples: Questions, predictions: Predictions) -> None:
        """Take the threshold of the best F1, unless it is given."""
        if self.version == 2 and self.null_threshold == "auto":
            found = squad_answers.evaluate(examples.questions, predictions.answers, predictions.null_odds)
            self.threshold = found["best_f1_thresh"]

    def recall(self, results: Mapping[str, Any]) -> None:
        """Take the threshold of the training, unless another is given."""
        super().recall(results)
        if self.version == 2 and self.null_threshold == "auto":
            self.threshold = results.get("scores", {}).get("dev", {}).get("null_threshold", self.threshold)

    def scores(self, examples: Questions, predictions: Predictions) -> dict[str, float]:
        """F1 and exact match, in version 2 also of questions with and without an answer."""
        if not examples.labelled:
            return {}
        odds = predictions.null_odds if self.version == 2 else None
        found = squad_answers.evaluate(examples.questions, predictions.answers, odds, self.threshold)
        shares = {
            name: value / 100
            for name, value in found.items()
            if not name.endswith(("total", "thresh")) and not name.startswith("best")
        }
        more = {"null_threshold": self.threshold} if self.version == 2 else {}
        return {"f1": shares.pop("f1"), **shares, **more}

    def write(self, folder: Path, split: str, examples: Questions, predictions: Predictions) -> list[Path]:
        """predictions.json, nbest_predictions.json and, in version 2, null_odds.json."""
        squad_answers.write(folder, predictions, self.threshold)
        return sorted(folder.glob("*.json"))
