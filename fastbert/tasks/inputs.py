"""Examples without labels, one after the other: what a trained model predicts for.

Files are read by line, but SQuAD's .json is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastbert.tasks import squad
from fastbert.tasks.files import check_width, column, lines, parsed, rows


def texts(path: str | Path, text: str = "text", pair: str | None = None) -> Iterator[tuple[str, ...]]:
    """The texts of a file, or its pairs of texts.

    Args:
        path: .txt, an example per line, an empty line included, and of a pair two texts with a tab between;
            .csv or .tsv, a table with a header; or .jsonl, an object per line.
        text: the column or the key of texts.
        pair: the column or the key of second texts, or None.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    path = Path(path)
    names = (text,) if pair is None else (text, pair)
    if path.suffix in (".csv", ".tsv"):
        table = rows(path, quoted=path.suffix == ".csv")
        where, header = next(table, (str(path), []))
        places = [column(where, header, name) for name in names]
        for where, fields in table:
            check_width(where, fields, header)
            yield tuple(fields[place] for place in places)
        return
    if path.suffix == ".jsonl":
        yield from _objects(path, names)
        return
    _check_kind(path, ".txt", ".csv", ".tsv", ".jsonl")
    for where, line in lines(path):
        line = line.removesuffix("\n").removesuffix("\r")
        parts = line.split("\t") if pair is not None else [line]
        if len(parts) != len(names):
            raise ValueError(f"{where}: expected two texts with a tab between, found {len(parts)}")
        yield tuple(parts)


def questions(path: str | Path) -> Iterator[tuple[str, ...]]:
    """(question, context) of each question of a file.

    Args:
        path: .jsonl, objects with "question" and "context"; or SQuAD's .json.

    Raises:
        ValueError, OSError: naming the file and the place in it.
    """
    path = Path(path)
    _check_kind(path, ".jsonl", ".json")
    if path.suffix == ".jsonl":
        yield from _objects(path, ("question", "context"))
        return
    for each in squad.read(path, train=False).questions:
        yield each.question, each.context


def _check_kind(path: Path, *kinds: str) -> None:
    if path.suffix not in kinds:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(kinds)}")


def _objects(path: Path, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts of some keys of the object in each line; empty lines are left out."""
    for where, line in lines(path):
        if line.strip():
            found: Any = parsed(where, line)
            for name in names:
                if not isinstance(found, dict) or not isinstance(found.get(name), str):
                    raise ValueError(f"{where}: expected an object with a text as {name!r}")
            yield tuple(found[name] for name in names)
