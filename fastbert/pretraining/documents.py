"""Text files -> documents, each a list of sentences.

Formats:

    text     google-research/bert's: one sentence per line, an empty line between documents
    jsonl    one JSON object per line, {"text": …}: a document, split into sentences by rule
    parquet  a column "text" of documents, likewise (needs pyarrow)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fastbert.checkpoint.files import parse_json
from fastbert.runtime import expected

FORMATS = ("text", "jsonl", "parquet")
_SUFFIXES = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}

# The end of a sentence: its mark and closing quotes, then white space, then what can begin a sentence
_END = re.compile(r"[.!?…][\"'”’»)\]]*(?=\s+[\"'“‘«(\[]?[^\Wa-z_])|[。！？]+[」』”’]*")
# Words before a full stop that ends no sentence; after a single letter (initials, "U.S.") it ends none either
_SHORT = (
    r"mr|mrs|ms|dr|prof|rev|gen|col|lt|sgt|capt|st|sr|jr|vs|etc|eg|ie|cf|al|figs?|nos?|vol|pp|ed|eds|dept|"
    r"univ|inc|ltd|co|corp|approx|est|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec"
)
_ABBREVIATION = re.compile(rf"{_SHORT}|[^\W\d_]|(?:\w\.)+\w+", re.IGNORECASE)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_OPENING = "([\"'“‘"  # what a word can follow without white space


def split_sentences(text: str) -> list[str]:
    """Sentences of a text. A line break ends a sentence, and so does a mark before a capital or a digit.

    A full stop after a title, a month, a single letter or another common abbreviation ends no sentence.
    """
    sentences = []
    for line in text.splitlines():
        start = 0
        for end in _END.finditer(line):
            if end[0].startswith(".") and _ABBREVIATION.fullmatch(_last_word(line, start, end.start())):
                continue
            sentences.append(line[start : end.end()].strip())
            start = end.end()
        sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _last_word(line: str, start: int, end: int) -> str:
    """The last word of line[start:end]; reads only that word, as a line without sentence ends can be long."""
    begin = end
    while begin > start and not (line[begin - 1].isspace() or line[begin - 1] in _OPENING):
        begin -= 1
    return line[begin:end]


def format_of(path: Path, chosen: str | None = None) -> str:
    """The format of a file: the chosen format, or the format of its suffix.

    Raises:
        ValueError: there is no such format, or none with this suffix.
    """
    if chosen is not None:
        expected.one_of(FORMATS, format=chosen)
        return chosen
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise ValueError(
            f"{path}: no format has this suffix; name the format ({', '.join(FORMATS)}), "
            f"or use {', '.join(_SUFFIXES)}"
        )
    return found


def documents(
    files: Sequence[str | Path], format: str | None = None, seen: Callable[[int], None] | None = None
) -> Iterator[list[str]]:
    """The documents of files, in order; a document is a list of at least one sentence.

    Args:
        files: paths.
        format: format of all files; None: by each file's suffix.
        seen: called with the bytes of each piece of input, for progress.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file does not match its format; the message names file and line.
    """
    if isinstance(files, (str, Path)) or not files:
        raise ValueError(f"files: expected a list of at least one path, got {files!r}")
    paths = [(Path(path), format_of(Path(path), format)) for path in files]
    for path, _ in paths:  # an error here comes before hours of work
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        if path.is_dir():
            raise ValueError(f"{path}: is a directory; expected files")
    for path, kind in paths:
        read = {"text": _of_lines, "jsonl": _of_json, "parquet": _of_parquet}[kind]
        for document in read(path, seen or _ignore):
            if document:
                yield document


def _ignore(size: int) -> None:
    pass


def lines(path: Path, seen: Callable[[int], None] = _ignore) -> Iterator[tuple[int, str]]:
    """(number from 1, text without its end) of each line; a BOM is dropped.

    Raises:
        ValueError: a line is not UTF-8; the message names file and line.
    """
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}: line {number}: not UTF-8 (byte {error.start + 1} is 0x{raw[error.start]:02x})"
                ) from None
            seen(len(raw))
            yield number, (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")


def _of_lines(path: Path, seen: Callable[[int], None]) -> Iterator[list[str]]:
    document: list[str] = []
    for _, line in lines(path, seen):
        sentence = line.strip()
        if sentence:
            document.append(sentence)
        elif document:
            yield document
            document = []
    yield document


def _of_json(path: Path, seen: Callable[[int], None]) -> Iterator[list[str]]:
    for number, line in lines(path, seen):
        if not line.strip():
            continue
        text = parse_json(line, f"{path}: line {number}").get("text")
        if not isinstance(text, str):
            raise ValueError(f'{path}: line {number}: expected an object with a text in "text"')
        if _HALF_PAIR.search(text):
            raise ValueError(f"{path}: line {number}: half of a surrogate pair is no valid Unicode")
        yield split_sentences(text)


def _of_parquet(path: Path, seen: Callable[[int], None]) -> Iterator[list[str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ImportError(f"{path}: reading Parquet needs pyarrow (pip install pyarrow)") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from None
    with file:
        if "text" not in file.schema_arrow.names:
            raise ValueError(f'{path}: expected a column "text", got {", ".join(file.schema_arrow.names)}')
        row, size = 0, path.stat().st_size
        batches = file.iter_batches(1024, columns=["text"])
        while True:
            try:
                batch = next(batches, None)
                texts = [] if batch is None else batch.column(0).to_pylist()
            except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: after row {row}: damaged ({error})") from None
            if batch is None:
                break
            for text in texts:
                row += 1
                if not isinstance(text, str):
                    raise ValueError(f'{path}: row {row}: expected a text in "text", got {text!r}')
                yield split_sentences(text)
            seen(size * len(batch) // max(file.metadata.num_rows, 1))
