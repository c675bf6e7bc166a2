"""Named entities in CoNLL-2003's columns: the file in, entity F1 and the file with predicted tags out.

A line has a token, other columns, and last its tag; an empty line ends a sentence, and -DOCSTART- begins a
document. Tags in the file are IOB1 or IOB2, and IOB2 from there on: B- begins an entity, I- continues it.

Source: Tjong Kim Sang and De Meulder 2003, "Introduction to the CoNLL-2003 Shared Task".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fastbert.tasks.files import lines

DOCUMENT = "-DOCSTART-"
_TAG = re.compile(r"O|[BI]-.+")


class Sentence(NamedTuple):
    """The words of a sentence.

    Attributes:
        document: the number of its document, from 0.
        words: the first column.
        tags: the last column in IOB2, one per word; none if the file has no tags.
    """

    document: int
    words: list[str]
    tags: list[str]


def read(path: str | Path, *, labelled: bool = True) -> list[Sentence]:
    """The sentences of a file; a sentence without words is left out.

    Args:
        path: of a UTF-8 file with spaces or tabs between the columns.
        labelled: whether the last column is the tag.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    found = list(sentences(path, labelled=labelled))
    if not found:
        raise ValueError(f"{path}: expected one sentence at least, found none")
    return found


def sentences(path: str | Path, *, labelled: bool = True) -> Iterator[Sentence]:
    """The sentences of `read`, one after the other."""
    document, width, count = 0, 0, 0
    words: list[str] = []
    tags: list[str] = []
    for where, fields in chain(_rows(path), [("", [])]):
        if fields and fields[0] != DOCUMENT:
            width = width or len(fields)
            if len(fields) != width or (labelled and width < 2):
                expected = max(width, 2 if labelled else 1)
                raise ValueError(f"{where}: expected {expected} columns, found {len(fields)}")
            if labelled and not _TAG.fullmatch(fields[-1]):
                raise ValueError(f"{where}: expected a tag O, B-… or I-…, found {fields[-1]!r:.40}")
            words.append(fields[0])
            if labelled:
                tags.append(fields[-1])
            continue
        if words:
            yield Sentence(document, words, iob2(tags))
            words, tags, count = [], [], count + 1
        if fields:
            document += bool(count)


def _rows(path: str | Path) -> Iterator[tuple[str, list[str]]]:
    """(the place, the columns or none) of each line; only spaces and tabs are between columns."""
    for where, line in lines(path):
        text = line.strip(" \t\r\n")
        yield where, re.split(r"[ \t]+", text) if text else []


def iob2(tags: Sequence[str]) -> list[str]:
    """The tags of a sentence in IOB2, from IOB1 or IOB2: an I- that begins an entity becomes a B-."""
    found = list(tags)
    for start, _, kind in entities(tags):
        found[start] = f"B-{kind}"
    return found


def entities(tags: Sequence[str], *, strict: bool = False) -> list[tuple[int, int, str]]:
    """(first word, word after the last, type) of each entity of a sentence.

    Args:
        tags: one per word.
        strict: False as `conlleval` does: I- after O or after another type begins an entity. True as IOB2
            says: only B- begins an entity, and an I- that continues none counts as O.
    """
    found: list[tuple[int, int, str]] = []
    start, kind = 0, ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, of_tag = tag.partition("-")
        if prefix == "I" and of_tag == kind:
            continue
        if kind:
            found.append((start, i, kind))
        start, kind = i, of_tag if prefix == "B" or not strict else ""
    return found


def score(
    labels: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]], *, strict: bool = False
) -> dict[str, float]:
    """Precision, recall and F1 of whole entities, in fractions of 1; 0 where there are none.

    Args:
        labels: the tags per sentence.
        predictions: as many tags per sentence.
        strict: see `entities`.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    if len(labels) != len(predictions):
        raise ValueError(
            f"predictions: expected {len(labels)}, one list per sentence, got {len(predictions)}"
        )
    both, true, marked = 0, 0, 0
    for i, (tags, predicted) in enumerate(zip(labels, predictions, strict=True)):
        if len(tags) != len(predicted):
            raise ValueError(f"predictions[{i}]: expected {len(tags)} tags, got {len(predicted)}")
        golds, found = (set(entities(of_side, strict=strict)) for of_side in (tags, predicted))
        both, true, marked = both + len(golds & found), true + len(golds), marked + len(found)
    return {
        "precision": both / marked if marked else 0.0,
        "recall": both / true if true else 0.0,
        "f1": 2 * both / (true + marked) if true + marked else 0.0,
    }


def write(path: str | Path, source: str | Path, predictions: Sequence[Sequence[str]]) -> None:
    """Write a file with a predicted tag as the last column of each word, as `conlleval` reads it.

    Args:
        path: of the new file.
        source: the file that `read` has read.
        predictions: tags per sentence.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    tags = [tag for of_sentence in predictions for tag in of_sentence]
    output, used = [], 0
    for (_, line), (_, fields) in zip(lines(source), _rows(source), strict=True):
        text = line.rstrip(" \t\r\n")
        if fields:
            gap, tag = "\t" if "\t" in text else " ", "O"
            if fields[0] != DOCUMENT:
                tag = tags[used] if used < len(tags) else ""
                used += 1
            text += gap + tag
        output.append(text + "\n")
    if used != len(tags):
        raise ValueError(f"predictions: expected {used} tags, one per word of {source}, got {len(tags)}")
    Path(path).write_text("".join(output), encoding="utf-8", newline="\n")
