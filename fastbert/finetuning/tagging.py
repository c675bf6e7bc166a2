"""Named entities in CoNLL's columns: one tag per word. Predictions are tags per sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded
from fastbert.finetuning.start import classes_of
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModelForTokenClassification
from fastbert.models.config import EncoderConfig
from fastbert.models.labels import IGNORED
from fastbert.tasks import ner, ner_windows
from fastbert.tasks.ner import Sentence

_FILES = {
    "train": ("train.txt", "eng.train"),
    "dev": ("valid.txt", "dev.txt", "eng.testa"),
    "test": ("test.txt", "eng.testb"),
}


class Ner(Task):
    """Entities: train.txt, valid.txt (or dev.txt) and test.txt, or eng.train, eng.testa and eng.testb.

    Args:
        context: tokens of the document on each side of what a window scores, at least.
        strict: whether entities are IOB2's, and not `conlleval`'s.
    """

    name = "ner"
    head = AutoModelForTokenClassification
    metric = "f1"

    def __init__(self, *, context: int = 64, strict: bool = False) -> None:
        self.context, self.strict = context, strict
        self.options = {"context": context, "strict": strict}
        self.defaults = {"lr": 5e-5, "epochs": 3, "batch_size": 32, "max_length": 512}
        self._source: dict[str, Path] = {}

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The files that are there."""
        return {kind: [kind] if self._file(data, kind) else [] for kind in _FILES}

    def _file(self, data: Path, split: str) -> Path | None:
        return next((data / name for name in _FILES[split] if (data / name).is_file()), None)

    def read(self, data: Path, split: str) -> list[Sentence]:
        """The sentences of a split. The training file says which tags there are."""
        path = self._file(data, split)
        if path is None:
            raise ValueError(f"data: {data} has none of {', '.join(_FILES[split])}")
        self._source[split] = path
        sentences = ner.read(path)
        if split == "train":
            self.classes = sorted({tag for sentence in sentences for tag in sentence.tags})
            self.labels = len(self.classes)
        return sentences

    def adopt(self, config: EncoderConfig) -> None:
        """Take the order of the tags from a checkpoint that knows them by name."""
        self.classes = classes_of(config, self.classes)

    def encode(
        self, examples: list[Sentence], tokenizer: Tokenizer, max_length: int, labelled: bool
    ) -> Encoded:
        """A sequence per window; labels at the first token of each word that the window scores."""
        context = min(self.context, (max_length - 3) // 4)
        windows, unknown, cut = ner_windows.windows(
            examples, tokenizer, max_length=max_length, context=context
        )
        ids = np.concatenate([window.ids for window in windows]).astype(np.int64)
        labels = {}
        if labelled:
            numbers = {tag: i for i, tag in enumerate(self.classes)}
            tags = np.array([numbers[tag] for sentence in examples for tag in sentence.tags], np.int64)
            words = np.concatenate([window.words for window in windows])
            labels["labels"] = np.where(words < 0, IGNORED, tags[words])
        starts = np.concatenate([[0], np.cumsum([len(window.ids) for window in windows])])
        counts = {"words_without_tokens": unknown, "words_cut": cut}
        return Encoded(
            ids, np.zeros_like(ids), starts, labels, token_labels=True, counts=counts, windows=windows
        )

    def counts(self, examples: list[Sentence], encoded: Encoded) -> dict[str, int]:
        """Sentences and windows; words that the tokenizer makes nothing of or that a window does not hold."""
        return {"sentences": len(examples), "windows": len(encoded), **encoded.counts}

    def predictions(
        self, examples: list[Sentence], encoded: Encoded, outputs: Sequence[np.ndarray]
    ) -> list[list[str]]:
        """The most likely tag of each word, per sentence."""
        words = np.concatenate([window.words for window in encoded.windows])
        # the windows score the words in the order of the file
        tags = [str(self.classes[i]) for i in outputs[0].argmax(1)[words >= 0]]
        return ner_windows.tags_of(tags, examples)

    def scores(self, examples: list[Sentence], predictions: list[list[str]]) -> dict[str, float]:
        """F1, precision and recall of whole entities."""
        found = ner.score([sentence.tags for sentence in examples], predictions, strict=self.strict)
        return {"f1": found["f1"], "precision": found["precision"], "recall": found["recall"]}

    def constant(self, train: list[Sentence], dev: list[Sentence]) -> float:
        """0: without entities there is no score."""
        return 0.0

    def write(
        self, folder: Path, split: str, examples: list[Sentence], predictions: list[list[str]]
    ) -> list[Path]:
        """The input file with a predicted column, as `conlleval` reads it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{split}.txt"
        ner.write(path, self._source[split], predictions)
        return [path]
