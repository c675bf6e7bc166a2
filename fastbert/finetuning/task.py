"""What a task is: its files, its examples as tokens, its head, its metric and its prediction files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from tokenizers import Tokenizer

from fastbert.checkpoint import hub
from fastbert.finetuning import trained
from fastbert.finetuning.encoded import Encoded, Rows, has_segments
from fastbert.finetuning.heads import Head
from fastbert.finetuning.settings import Settings
from fastbert.models.base import PreTrainedModel
from fastbert.models.config import EncoderConfig
from fastbert.sentences.tokenizer import load_tokenizer


class Task(ABC):
    """A task of a user's data.

    Attributes:
        name: as on the command line.
        head: the Auto class of the model.
        defaults: lr, epochs, batch_size and max_length of `Settings`.
        metric: the main metric, the first of `scores`.
        fields: fields of the model's output that predictions are made of.
        classes: names of the head's classes, in the order of its outputs; empty if the head has none.
        labels: outputs of the head; 0 if it has a fixed number.
        options: what the scores depend on besides the files and the settings; JSON values.
    """

    name: str
    head: ClassVar[type[PreTrainedModel]]
    defaults: Mapping[str, float]
    metric: str
    fields: ClassVar[tuple[str, ...]] = ("logits",)
    classes: Sequence[str] = ()
    labels: int = 0
    options: Mapping[str, Any] = {}

    @abstractmethod
    def splits(self, data: Path) -> dict[str, list[str]]:
        """ "train", "dev" and "test" -> the splits of that kind that the data have, the main one first."""

    @abstractmethod
    def read(self, data: Path, split: str) -> Any:
        """The examples of a split. Raises ValueError and OSError, naming the file and the line."""

    def adopt(self, config: EncoderConfig) -> None:  # noqa: B027 - most tasks have nothing to adopt
        """Take the order of the classes from a checkpoint that knows them by name."""

    def check(self, settings: Settings, head: Head) -> None:
        """Raise a ValueError that names a setting which the task or the head has no use for."""
        head.check(settings)

    def first(self, place: Path, settings: Settings, head: Head) -> Any:
        """The model of a run, with its first weights, on the CPU in float32."""
        return trained.first(self.head, place, settings, self.classes, self.labels, head)

    def complete(self, place: Path, output: Path) -> None:  # noqa: B027 - most tasks have written all
        """Write what the model of a run lacks.

        Args:
            place: the directory of the model that the run began with.
            output: the directory of the best model.
        """

    def load(self, place: Path, device: torch.device | str | None) -> Any:
        """A trained model. Raises ValueError if it has no head for the task."""
        return trained.load(self.head, place, device, self.name)

    @abstractmethod
    def encode(self, examples: Any, tokenizer: Tokenizer, max_length: int, labelled: bool) -> Encoded:
        """The examples as tokens; with labels if `labelled`."""

    def dataset(
        self, data: str | Path, model: str | Path, split: str = "train", max_length: int | None = None
    ) -> Rows:
        """The examples of a split for `transformers.Trainer`; `classes` and `labels` are known afterwards.

        Args:
            data: the directory of the task's official files.
            model: a HuggingFace directory or a name on the hub, whose tokenizer and names of classes count.
            split: of `splits`. A test split has no labels.
            max_length: most tokens per sequence; None is the task's default.

        Returns:
            A list-like of dicts; see `Rows`. SQuAD has one per window.

        Raises:
            ValueError, OSError: naming the argument, or the file and the line.
        """
        place, data = hub.resolve(model), Path(data)
        config = EncoderConfig.from_pretrained(place)
        kinds = {name: kind for kind, names in self.splits(data).items() for name in names}
        for name in ("train", split):
            if name not in kinds:
                raise ValueError(f"split: {data} has {', '.join(kinds) or 'none'}, got {name!r}")
        # The training file says which classes there are
        examples = self.read(data, "train")
        self.adopt(config)
        if split != "train":
            examples = self.read(data, split)
        most = int(self.defaults["max_length"]) if max_length is None else max_length
        encoded = self.encode(examples, load_tokenizer(place), most, kinds[split] != "test")
        return Rows(encoded, has_segments(config))

    def counts(self, examples: Any, encoded: Encoded) -> dict[str, int]:
        """The number of examples, and how many a reader left out, cut or mended; the names are for people."""
        return {"examples": len(encoded), **encoded.counts}

    def prepared(
        self,
        encoded: Encoded,
        examples: Any,
        place: Path,
        device: torch.device,
        dtype: torch.dtype,
        batch_tokens: int,
        folder: Path | None = None,
    ) -> Encoded:
        """What the model reads of encoded examples, if that is more than their tokens.

        Args:
            encoded, examples: what `encode` returned, and what it was given.
            place: the model's directory.
            device, dtype, batch_tokens: as `encoded.outputs` takes them.
            folder: a folder for large results; None keeps them in memory.
        """
        return encoded

    @abstractmethod
    def predictions(self, examples: Any, encoded: Encoded, outputs: Sequence[np.ndarray]) -> Any:
        """What a model's outputs for `fields` mean."""

    def tune(self, examples: Any, predictions: Any) -> None:  # noqa: B027 - most tasks have nothing to tune
        """Choose on a dev split what `scores` and `write` then use for all splits, such as a threshold."""

    def recall(self, results: Mapping[str, Any]) -> None:
        """Take over what a training found out, from its results.json; its options are the task's already."""
        self.classes = results.get("classes", self.classes)

    @abstractmethod
    def scores(self, examples: Any, predictions: Any) -> dict[str, float]:
        """Metric -> score, in fractions of 1; the main metric first; empty if the examples have no labels."""

    @abstractmethod
    def write(self, folder: Path, split: str, examples: Any, predictions: Any) -> list[Path]:
        """Write the task's official prediction files; returns them."""

    def constant(self, train: Any, dev: Any) -> float | None:
        """The main score on `dev` of one answer for all, the most frequent of `train`; None if unknown."""
        return None
