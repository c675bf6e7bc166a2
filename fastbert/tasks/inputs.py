"""Files of examples of a user's own: what a trained model predicts for, and labelled examples.

Files are read by line, but SQuAD's .json is read whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fastbert.tasks import squad
from fastbert.tasks.files import check_width, column, filled_lines, lines, parsed, rows

# Keys of an answer in SQuAD's files
_ANSWER = ("text", "answer_start")


def texts(
    path: str | Path, text: str = "text", pair: str | None = None, kind: str | None = None
) -> Iterator[tuple[str, ...]]:
    """The texts of a file, or its pairs of texts.

    Args:
        path: .txt, an example per line, an empty line included, and of a pair two texts with a tab between;
            .csv or .tsv, a table with a header; or .jsonl, an object per line. "-" is stdin.
        text: the column or the key of texts.
        pair: the column or the key of second texts, or None.
        kind: txt, csv, tsv or jsonl; None is what the name ends in, and txt for stdin.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    names = (text,) if pair is None else (text, pair)
    kind = _kind(path, kind, "txt", "csv", "tsv", "jsonl")
    if kind in ("csv", "tsv"):
        table = rows(path, quoted=kind == "csv")
        where, header = next(table, (str(path), []))
        places = [column(where, header, name) for name in names]
        for where, fields in table:
            check_width(where, fields, header)
            yield tuple(fields[place] for place in places)
        return
    if kind == "jsonl":
        yield from _objects(path, names)
        return
    for where, line in lines(path):
        yield _parts(where, line.removesuffix("\n").removesuffix("\r"), pair is not None)


def questions(path: str | Path, kind: str | None = None) -> Iterator[tuple[str, ...]]:
    """(question, context) of each question of a file.

    Args:
        path: .jsonl, objects with "question" and "context"; or SQuAD's .json. "-" is stdin.
        kind: jsonl or json; None is what the name ends in, and jsonl for stdin.

    Raises:
        ValueError, OSError: naming the file and the place in it.
    """
    if _kind(path, kind, "jsonl", "json") == "jsonl":
        yield from _objects(path, ("question", "context"))
        return
    for each in squad.read(path, train=False).questions:
        yield each.question, each.context


def read(path: str | Path, *, pairs: bool = False, labels: str | None = None) -> dict[str, list[Any]]:
    """The texts of a file, as the arguments of `fastbert.tasks.examples.tokenized`.

    Args:
        path: .txt or .tsv, an example per line (a pair: two texts with a tab between); or .jsonl, objects
            with a "text" (a pair: also a "pair"), or SQuAD's "question" and "context". Empty lines are left
            out.
        pairs: whether each example is a pair of texts.
        labels: the key of the labels in a .jsonl file, or None.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    kind = _kind(path, None, "txt", "tsv", "jsonl")
    if labels is not None and kind != "jsonl":
        raise ValueError(f"labels: {path} has none; expected a .jsonl file with {labels!r}")
    found: list[tuple[Any, ...]] = []
    for where, line in filled_lines(path):
        if kind != "jsonl":
            found.append(_parts(where, line, pairs))
            continue
        values = parsed(where, line)
        of_squad = pairs and isinstance(values, dict) and "text" not in values and "question" in values
        names = ("question", "context") if of_squad else ("text", "pair")
        texts = _texts(where, values, names if pairs else names[:1])
        if labels is not None and labels not in values:
            raise ValueError(f"{where}: expected an object with {labels!r}")
        found.append(texts if labels is None else (*texts, values[labels]))
    if not found:
        raise ValueError(f"{path}: expected one example at least, found none")
    kinds = ["texts", *["pairs"] * pairs, *["labels"] * (labels is not None)]
    return {kind: list(column) for kind, column in zip(kinds, zip(*found, strict=True), strict=True)}


def spans_of(answers: Sequence[Any], contexts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Answers as SQuAD's files have them -> `answers` of `tokenized`; the first of several answers.

    Args:
        answers: each {"text": […], "answer_start": […]}, or a list of {"text": …, "answer_start": …}, or a
            start and an end in characters. No answer is an empty list, empty lists in the object, or None.
        contexts: the text of each answer.

    Raises:
        ValueError: naming the answer, what came and what was expected.
    """
    return [_span_of(f"answers[{i}]", a, c) for i, (a, c) in enumerate(zip(answers, contexts, strict=True))]


def _span_of(where: str, answer: Any, context: str) -> tuple[int, int] | None:
    if answer is None or answer == []:
        return None
    if isinstance(answer, list) and len(answer) == 2 and all(type(number) is int for number in answer):
        return answer[0], answer[1]
    of_one = isinstance(answer, list) and isinstance(answer[0], dict)
    columns = {name: [value] for name, value in answer[0].items()} if of_one else answer
    found: list[Any] = [columns.get(name) if isinstance(columns, dict) else None for name in _ANSWER]
    if found == [[], []]:
        return None
    if not all(isinstance(column, list) and column for column in found):
        raise ValueError(
            f'{where}: expected {{"text": […], "answer_start": […]}}, or a start and an end, got {answer!r}'
        )
    text, start = (column[0] for column in found)
    known = isinstance(text, str) and type(start) is int and start >= 0
    if not known or not context.startswith(text, start):
        raise ValueError(f"{where}: {text!r} is not at character {start!r} of its context")
    return start, start + len(text)


def _kind(path: str | Path, kind: str | None, *kinds: str) -> str:
    """What a file has, by its name if `kind` is None; the first of `kinds` for stdin."""
    if kind is not None and kind not in kinds:
        raise ValueError(f"input_format: expected {', '.join(kinds)}, got {kind!r}")
    found = kind or (kinds[0] if str(path) == "-" else Path(path).suffix.removeprefix("."))
    if found not in kinds:
        raise ValueError(f"{path}: expected a file that ends in {', '.join(f'.{each}' for each in kinds)}")
    return found


def _parts(where: str, line: str, pair: bool) -> tuple[str, ...]:
    """The text of a line, or its two texts."""
    parts = line.split("\t") if pair else [line]
    if len(parts) != 1 + pair:
        raise ValueError(f"{where}: expected two texts with a tab between, found {len(parts)}")
    return tuple(parts)


def _objects(path: str | Path, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The texts of some keys of the object in each line; empty lines are left out."""
    for where, line in filled_lines(path):
        yield _texts(where, parsed(where, line), names)


def _texts(where: str, values: Any, names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(values, dict) or not isinstance(values.get(name), str):
            raise ValueError(f"{where}: expected an object with a text as {name!r}")
    return tuple(values[name] for name in names)
