"""SWAG and RACE: which of four texts follows, or answers. Predictions are numbers of choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from fastbert.finetuning.encoded import Encoded, joined
from fastbert.finetuning.sequences import pairs_encoded
from fastbert.finetuning.task import Task
from fastbert.models.auto import AutoModelForMultipleChoice
from fastbert.tasks import metrics, race, swag
from fastbert.tasks.files import Choices

_SWAG_FILES = {"train": "train.csv", "dev": "val.csv", "test": "test.csv"}


class ChoiceTask(Task):
    """Four sequences per example, whose scores compete; a subclass reads the files.

    Attributes:
        columns: header of the prediction files.
    """

    head = AutoModelForMultipleChoice
    metric = "accuracy"
    columns = "id,prediction"

    def encode(self, examples: Choices, tokenizer: Tokenizer, max_length: int, labelled: bool) -> Encoded:
        """Four pairs per example: the shared text first."""
        pairs = [(a, b) for a, bs in zip(examples.firsts, examples.seconds, strict=True) for b in bs]
        labels = {"labels": np.asarray(examples.labels, np.int64)} if labelled else {}
        return joined(pairs_encoded(tokenizer, pairs, max_length), labels, swag.CHOICES)

    def predictions(self, examples: Choices, encoded: Encoded, outputs: Sequence[np.ndarray]) -> list[int]:
        """The number of the best choice per example, 0 to 3."""
        return outputs[0].argmax(1).tolist()

    def scores(self, examples: Choices, predictions: list[int]) -> dict[str, float]:
        """Accuracy; of RACE also of each level."""
        if examples.labels is None:
            return {}
        found = {"accuracy": metrics.accuracy(predictions, examples.labels)}
        for level in race.LEVELS:
            chosen = [i for i, name in enumerate(examples.ids) if name.startswith(f"{level}/")]
            if chosen:
                sides = [[side[i] for i in chosen] for side in (predictions, examples.labels)]
                found[f"accuracy_{level}"] = metrics.accuracy(*sides)
        return found

    def write(self, folder: Path, split: str, examples: Choices, predictions: list[int]) -> list[Path]:
        """SPLIT.csv with the id and the number of the choice per example."""
        folder.mkdir(parents=True, exist_ok=True)
        rows = zip(examples.ids, predictions, strict=True)
        path = folder / f"{split}.csv"
        path.write_text(
            "".join([f"{self.columns}\n", *(f"{i},{said}\n" for i, said in rows)]), encoding="utf-8"
        )
        return [path]

    def constant(self, train: Choices, dev: Choices) -> float:
        """The accuracy on `dev` of the most frequent place of the right choice in `train`."""
        assert train.labels is not None
        return self.scores(dev, [Counter(train.labels).most_common(1)[0][0]] * len(dev.ids))["accuracy"]


class Swag(ChoiceTask):
    """SWAG: the files train.csv, val.csv and test.csv of the official repository.

    The prediction files are those of its csv_predict.py: the number of the row, then the column pred.
    """

    name = "swag"
    columns = ",pred"

    def __init__(self) -> None:
        self.defaults = {"lr": 2e-5, "epochs": 3, "batch_size": 16, "max_length": 80}

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The files that are there."""
        return {kind: [kind] if (data / file).is_file() else [] for kind, file in _SWAG_FILES.items()}

    def read(self, data: Path, split: str) -> Choices:
        """The examples of a split."""
        return swag.read(data / _SWAG_FILES[split], labelled=split != "test")


class Race(ChoiceTask):
    """RACE: the folders train, dev and test of the official archive."""

    name = "race"

    def __init__(self) -> None:
        self.defaults = {"lr": 2e-5, "epochs": 3, "batch_size": 16, "max_length": 512}

    def splits(self, data: Path) -> dict[str, list[str]]:
        """The folders that are there."""
        return {kind: [kind] if (data / kind).is_dir() else [] for kind in ("train", "dev", "test")}

    def read(self, data: Path, split: str) -> Choices:
        """The questions of a split, of the levels that it has."""
        levels = tuple(level for level in race.LEVELS if (data / split / level).is_dir())
        return race.read(data / split, levels or race.LEVELS)
