"""How the branches of `early_exit.py` are trained, and what their thresholds cost and bring."""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from fastbert.finetuning.encoded import Encoded, Source, has_segments, outputs
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.runtime import expected
from fastbert.tasks.examples import Examples
from fastbert.training.loop import Trainer
from fastbert.training.module import Losses, Results
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage

KINDS = ("fastbert", "deebert")


class Point(NamedTuple):
    """What a threshold costs and brings.

    Attributes:
        threshold: the threshold.
        accuracy: share of right answers.
        layers: mean number of layers per text.
        tokens_per_second: tokens of all texts, over the time that the calls took.
    """

    threshold: float
    accuracy: float
    layers: float
    tokens_per_second: float


class Learns(nn.Module):
    """The part of `EarlyExit` that takes examples."""

    model: BertForSequenceClassification
    config: EncoderConfig
    device: torch.device
    branches: nn.ModuleList
    kind: str
    every: int
    threshold: float

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `EarlyExit`."""
        raise NotImplementedError

    def curve(
        self, examples: Examples, thresholds: Sequence[float], *, batch_tokens: int = 8192
    ) -> list[Point]:
        """What each threshold costs and brings on labelled examples.

        Args:
            examples: with a class per text (`fastbert.tasks.examples.tokenized`).
            thresholds: the thresholds.
            batch_tokens: most tokens at a time.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        texts, labels, before = self._texts(examples), examples.needed_labels, self.threshold
        points = []
        try:
            for threshold in thresholds:
                self.threshold = checked(threshold)
                begin = time.perf_counter()
                fields = outputs(self, texts, ("logits", "layers"), batch_tokens=batch_tokens)
                seconds = time.perf_counter() - begin
                right = fields[0].argmax(-1) == labels
                rate = len(texts.ids) / seconds
                points.append(Point(threshold, float(right.mean()), float(fields[1].mean()), rate))
        finally:
            self.threshold = before
        return points

    def fit(
        self,
        examples: Examples,
        output: str | Path | None = None,
        *,
        epochs: float = 3,
        batch_size: int = 32,
        lr: float = 1e-3,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Train the branches by the loop of `fastbert.training`; returns the exits, in eval mode.

        Args:
            examples: texts (`fastbert.tasks.examples.tokenized`); with classes for "deebert".
            output: directory of the run, which resumes there; None: a temporary one.
            epochs: how often each text is read.
            batch_size: texts per step.
            lr: the largest learning rate; it rises for a tenth of the steps, then falls to 0.
            seed: of the order and of dropout.
            options: of `fastbert.training.loop.Trainer`, such as log_every and progress.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
            Interrupted: a signal came; the same call resumes.
        """
        texts = self._texts(examples)
        if self.kind == "fastbert":
            texts.labels.clear()
        elif not texts.labels:
            raise ValueError("examples: expected classes for kind 'deebert', got none")
        expected.numbers("> 0", epochs=epochs)
        expected.integers(1, batch_size=batch_size)
        steps = max(1, math.ceil(epochs * len(texts) / batch_size))
        stage = Stage(
            steps,
            Source(texts, has_segments(self.config)),
            lambda: ExitLosses(self),
            Schedule("linear", lr, steps, warmup=0.1 if steps > 1 else 0),
            sequences=batch_size,
        )
        config = {"model": self._digest(), "kind": self.kind, "every": self.every}
        config |= {"epochs": epochs, "batch_size": batch_size, "lr": lr}
        with tempfile.TemporaryDirectory() as folder:
            given = {"parallel": Parallel(device=self.device), "save_every": steps, **options}
            Trainer([stage], folder if output is None else output, config, seed=seed, **given).run()
        return self.eval()

    def _digest(self) -> str:
        """Of the model's weights, on which the branches depend."""
        found = hashlib.sha256()
        for t in self.model.state_dict().values():
            found.update(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _texts(self, examples: Examples) -> Encoded:
        if not isinstance(examples, Examples):
            raise TypeError(
                f"examples: expected Examples (`tokenized` makes them), got {type(examples).__name__}"
            )
        examples.check(self.config)
        labels = {}
        if examples.labels is not None:
            given = np.asarray(examples.labels)
            if given.shape != (len(examples),) or given.dtype.kind not in "iu":
                raise ValueError(
                    f"examples: expected a class number per text, got {given.dtype} {given.shape}"
                )
            labels["labels"] = given.astype(np.int64)
        return Encoded(examples.ids, examples.types, examples.starts, labels)


class ExitLosses(Losses):
    """The branches as the training loop takes them; the frozen model is no part of its checkpoints.

    Args:
        exits: whose branches are trained, in place.
    """

    def __init__(self, exits: Learns):
        super().__init__()
        self.branches = exits.branches
        self.exports, self.weights = {}, {}
        self._exits = [exits]

    def forward(self, inputs: dict[str, Any], measure: bool = False) -> Results:
        """({"task": the sum of the branches' mean losses}, {})."""
        return {"task": self._exits[0].loss(**inputs)}, {}


def checked(threshold: object) -> float:
    """A threshold; TypeError or ValueError if it is none."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise TypeError(f"threshold: expected a number, got {threshold!r}")
    if not 0 <= threshold < math.inf:
        raise ValueError(f"threshold: expected a number >= 0, got {threshold!r}")
    return float(threshold)
