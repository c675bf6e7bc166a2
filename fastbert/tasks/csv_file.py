"""A user's own table: one text or two, and a class or a number per row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.tasks.files import Texts, check_width, column, rows

_MOST = float(np.finfo(np.float32).max)


def read(
    path: str | Path,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    *,
    regression: bool = False,
) -> Texts:
    """The examples of a table with a header.

    Args:
        path: of a UTF-8 file. In a .csv, commas are between the fields, and a field in double quotes may have
            commas and line ends. In a .tsv, tabs are between the fields and a quote is a letter.
        text: the name of the column of texts.
        pair: the name of the column of second texts, or None.
        label: the name of the column of labels, or None.
        regression: whether the labels are numbers; otherwise they are names of classes.

    Returns:
        Texts with the number in the file as id.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    table = _rows(Path(path))
    where, header = next(table, (str(path), []))
    text_place = column(where, header, text)
    pair_place = -1 if pair is None else column(where, header, pair)
    label_place = -1 if label is None else column(where, header, label)
    labels: list[Any] | None = None if label is None else []
    found = Texts([], [], None if pair is None else [], labels)
    for where, fields in table:
        check_width(where, fields, header)
        found.ids.append(str(len(found.ids)))
        found.texts.append(fields[text_place])
        if found.pairs is not None:
            found.pairs.append(fields[pair_place])
        if labels is not None:
            labels.append(_label(where, fields[label_place], regression))
    if not found.ids:
        raise ValueError(f"{path}: expected one example at least, found none")
    return found


def has_labels(path: str | Path, label: str) -> bool:
    """Whether a table has a column of labels that is not all empty."""
    table = _rows(Path(path))
    _, header = next(table, ("", []))
    place = header.index(label) if label in header else len(header)
    return any(fields[place:][:1] not in ([], [""]) for _, fields in table)


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    if path.suffix not in (".csv", ".tsv"):
        raise ValueError(f"path: expected a file that ends in .csv or .tsv, got {path}")
    return rows(path, quoted=path.suffix == ".csv")


def classes(labels: list[str]) -> list[str]:
    """The names of the classes, sorted; if all are numbers, the shorter first.

    Args:
        labels: n names.
    """
    names = set(labels)
    # Not by int: of "1" and "01" the first would depend on the order in the set
    by_size = all(name.isdecimal() for name in names)
    return sorted(names, key=lambda name: (len(name) if by_size else 0, name))


def _label(where: str, value: str, regression: bool) -> str | float:
    if not regression:
        if not value:
            raise ValueError(f"{where}: expected a label, found none")
        return value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not abs(number) <= _MOST:
        raise ValueError(f"{where}: expected a finite float32 as label, found {value!r:.40}")
    return number
