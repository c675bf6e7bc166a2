"""Lines and rows of text files, each with its place for messages, and what readers make of them."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


class Texts(NamedTuple):
    """Examples of one text or two.

    Attributes:
        ids: n names of the examples; the number in the file, from 0, where the file has none.
        texts: n texts.
        pairs: n second texts, or None.
        labels: n class names, or n floats, or None where the file has none.
        skipped: malformed rows that were left out.
    """

    ids: list[str]
    texts: list[str]
    pairs: list[str] | None
    labels: list[Any] | None
    skipped: int = 0


class Choices(NamedTuple):
    """Examples with four choices each, of which one is right.

    Attributes:
        ids: n names of the examples.
        firsts: n first texts, which the choices of an example share.
        seconds: n times four second texts.
        labels: n numbers of the right choice, 0 to 3, or None where the file has none.
    """

    ids: list[str]
    firsts: list[str]
    seconds: list[tuple[str, ...]]
    labels: list[int] | None


def lines(path: str | Path) -> Iterator[tuple[str, str]]:
    r"""Read a UTF-8 file by line; only "\n" ends a line, and a byte order mark is dropped.

    Args:
        path: of the file; "-" is stdin.

    Yields:
        (the file and the line's number from 1, for messages; the line with its end).

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    # Not as text: that would end a line at a lone "\r" too
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{'stdin' if str(path) == '-' else path}, line {number}"
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where}: not UTF-8 (byte {line[error.start]:#x})") from None
            yield where, text.removeprefix("\ufeff") if number == 1 else text


def filled_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """The lines of `lines` that are not empty, without their ends."""
    for where, line in lines(path):
        if line.strip():
            yield where, line.rstrip("\r\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; "-" is stdin. Raises a ValueError or an OSError that names the file."""
    with _opened(path) as file:
        return parsed(str(path), file.read())


def _opened(path: str | Path) -> contextlib.AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if str(path) == "-" else open(path, "rb")


def parsed(where: str, text: str | bytes) -> Any:
    """The value of a text in JSON; ValueErrors begin with `where`."""
    try:
        found = json.loads(text)
        escaped = rb"\ud" in text.lower() if isinstance(text, bytes) else r"\ud" in text.lower()
        if escaped:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: a text has half of a surrogate pair, which is no character") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    return found


def rows(path: str | Path, *, quoted: bool) -> Iterator[tuple[str, list[str]]]:
    """Read a table by row, the header included; empty lines are left out.

    Args:
        path: of a UTF-8 file.
        quoted: True for commas, where a field in double quotes may have commas and line ends; False for tabs,
            where a quote is a letter like any other.

    Yields:
        (the file and the row's first line, for messages; the fields).

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    if not quoted:
        for where, line in lines(path):
            text = line.removesuffix("\n").removesuffix("\r")
            if text:
                yield where, text.split("\t")
        return
    # Python's limit, 131,072 characters, is less than a long document
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line for _, line in lines(path)), strict=True)
    while True:
        where = f"{path}, line {reader.line_num + 1}"
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(f"{where}: no CSV ({error})") from None
        if fields:
            yield where, fields


def column(where: str, header: Sequence[str], name: str) -> int:
    """The place of a column, by its name in the header. Raises a ValueError that begins with `where`."""
    if header.count(name) != 1:
        found = "found it twice" if name in header else f"found {', '.join(map(repr, header)) or 'none':.200}"
        raise ValueError(f"{where}: expected one column {name!r}, {found}")
    return header.index(name)


def check_width(where: str, fields: Sequence[str], header: Sequence[str]) -> None:
    """Raise a ValueError that begins with `where`, unless the row has a field per column."""
    if len(fields) != len(header):
        raise ValueError(f"{where}: expected {len(header)} fields, as in the header, found {len(fields)}")
