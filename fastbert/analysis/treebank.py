"""Sentences with trees: files in the CoNLL-U format, and the examples made of them.

A line per word has ten columns with tabs between: ID, FORM, LEMMA, UPOS, XPOS, FEATS, HEAD, DEPREL, DEPS,
MISC. An empty line ends a sentence; "#" starts a comment. Lines that are no word of the tree are skipped:
ranges of multi-word tokens (3-4) and empty nodes (3.1).

We do not use the package conllu, because it names no lines in errors, accepts lines with fewer columns, and
checks neither the range of HEAD nor circles.

Words are numbered from 0. A head is 0 for the root, else the number of its word plus 1, as in the file.

Source: https://universaldependencies.org/format.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer

from fastbert.runtime import expected
from fastbert.tasks.examples import Examples, of_encodings

COLUMNS = 10
_SKIPPED = re.compile(r"[0-9]+[-.][0-9]+")
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, eq=False)
class Sentence:
    """A tree over the words of a sentence; each attribute has one entry per word.

    Attributes:
        words: as written.
        upos: universal parts of speech, such as "NOUN".
        heads: (words,) int64: 0 for the root, else the number of the head's word plus 1.
        relations: relations to the head, such as "nsubj:pass".
        lemmas: "_" if the file has none.
        features: such as "Number=Sing|Polarity=Neg"; "_" if the file has none.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    heads: np.ndarray
    relations: tuple[str, ...]
    lemmas: tuple[str, ...]
    features: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.words)


def read_conllu(path: str | Path, max_sentences: int | None = None) -> list[Sentence]:
    """The sentences of a file in the CoNLL-U format.

    Args:
        path: path of the file, in UTF-8.
        max_sentences: most sentences, from the start; the rest of the file is not read. None: all.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    path = Path(path)
    if max_sentences is not None:
        expected.integers(1, max_sentences=max_sentences)
    found: list[Sentence] = []
    for lines in blocks_of(path):
        found.append(_sentence(path, lines))
        if len(found) == max_sentences:
            break
    if not found:
        raise ValueError(f"{path}: expected one sentence at least, found none")
    return found


def blocks_of(path: str | Path) -> Iterator[list[tuple[int, str]]]:
    """For each sentence, (number, text) of its lines, without comments.

    Raises:
        ValueError, OSError: naming the file and the line.
    """
    block: list[tuple[int, str]] = []
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 ({error})") from None
            if line.startswith("#"):
                continue
            if line.strip():
                block.append((number, line))
            elif block:
                yield block
                block = []
    if block:
        yield block


def _sentence(path: Path, lines: list[tuple[int, str]]) -> Sentence:
    rows: list[list[str]] = []
    numbers: list[int] = []
    for number, line in lines:
        where = f"{path}, line {number}"
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise ValueError(f"{where}: expected {COLUMNS} columns with tabs between, found {len(columns)}")
        word = columns[0]
        if _SKIPPED.fullmatch(word):
            continue
        if not _NUMBER.fullmatch(word) or int(word) != len(rows) + 1:
            raise ValueError(f"{where}: ID: expected {len(rows) + 1}, the next of the sentence, got {word!r}")
        for name, column in (("FORM", 1), ("UPOS", 3), ("DEPREL", 7)):
            if not columns[column].strip():
                raise ValueError(f"{where}: {name}: expected a text, got {columns[column]!r}")
        rows.append(columns)
        numbers.append(number)
    if not rows:
        raise ValueError(f"{path}, line {lines[0][0]}: expected a sentence with a word at least")
    heads = _heads(path, rows, numbers)
    _, words, lemmas, upos, _, features, _, relations, _, _ = (
        tuple(columns) for columns in zip(*rows, strict=True)
    )
    return Sentence(words, upos, heads, relations, lemmas, features)


def _heads(path: Path, rows: list[list[str]], numbers: list[int]) -> np.ndarray:
    """The heads of a sentence, which form one tree."""
    count = len(rows)
    for columns, number in zip(rows, numbers, strict=True):
        head = columns[6]
        if not _NUMBER.fullmatch(head) or int(head) > count:
            raise ValueError(
                f"{path}, line {number}: HEAD: expected 0 to {count}, a word of the sentence, got {head!r}"
            )
    heads = np.array([int(columns[6]) for columns in rows], np.int64)
    roots = np.flatnonzero(heads == 0)
    if len(roots) != 1:
        number = numbers[roots[1] if len(roots) else 0]
        raise ValueError(f"{path}, line {number}: HEAD: expected one root in a sentence, found {len(roots)}")
    # each round doubles how far up the tree `above` reaches; words that never reach the root are in a circle
    above = np.concatenate([[0], heads])
    for _ in range(count.bit_length()):
        above = above[above]
    circle = np.flatnonzero(above[1:])
    if len(circle):
        number = numbers[circle[0]]
        raise ValueError(f"{path}, line {number}: HEAD: the heads from here go in a circle, not to the root")
    return heads


# -- examples ------------------------------------------------------------------------------------------------


class _Words(Protocol):
    """A `Sentence`, or a `LabelledText` of `targets`."""

    @property
    def words(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...


_W = TypeVar("_W", bound=_Words)


def as_examples(tokenizer: Tokenizer, sentences: Sequence[_Words], max_length: int | None = None) -> Examples:
    """One example per sentence; `Examples.words` has the numbers of the sentence's own words.

    Each word is tokenized by itself. A byte-level tokenizer, such as RoBERTa's, reads each word with a space
    before it, the first word too, as transformers does with `add_prefix_space`.

    Args:
        tokenizer: what `fastbert.sentences.tokenizer.load_tokenizer` returns.
        sentences: what `read_conllu` or `targets.read_edges` returns.
        max_length: most tokens of an example, special ones included; None: any number.

    Raises:
        ValueError: naming a sentence that is longer, or has a word for which the tokenizer has no token; see
            `fitting`.
    """
    own, encoded = _encoded(tokenizer, sentences, max_length)
    for number, (sentence, encoding) in enumerate(zip(sentences, encoded, strict=True)):
        problem = _problem(sentence, encoding, max_length)
        if problem is not None:
            raise ValueError(f"sentences[{number}]: {problem}")
    return of_encodings(own, encoded)


def fitting(tokenizer: Tokenizer, sentences: Sequence[_W], max_length: int | None = None) -> list[_W]:
    """The sentences without those that `as_examples` refuses.

    Args:
        tokenizer, sentences, max_length: see `as_examples`.
    """
    _, encoded = _encoded(tokenizer, sentences, max_length)
    both = zip(sentences, encoded, strict=True)
    return [sentence for sentence, encoding in both if _problem(sentence, encoding, max_length) is None]


def _encoded(
    tokenizer: Tokenizer, sentences: Sequence[_Words], max_length: int | None
) -> tuple[Tokenizer, list[Encoding]]:
    """(the tokenizer without padding and truncation, each sentence encoded)."""
    if max_length is not None:
        expected.integers(1, max_length=max_length)
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    space = " " if _is_byte_level(json.loads(own.to_str())["pre_tokenizer"]) else ""
    words = [[space + word for word in sentence.words] for sentence in sentences]
    return own, own.encode_batch(words, is_pretokenized=True)


def _is_byte_level(step: Any) -> bool:
    """Whether a pre-tokenizer, described by its JSON, turns spaces into letters of words."""
    if isinstance(step, list):
        return any(_is_byte_level(each) for each in step)
    if not isinstance(step, dict):
        return False
    return step.get("type") == "ByteLevel" or _is_byte_level(step.get("pretokenizers"))


def _problem(sentence: _Words, encoding: Encoding, max_length: int | None) -> str | None:
    if max_length is not None and len(encoding) > max_length:
        return f"{len(encoding)} tokens, expected {max_length} at most: {_start(sentence)}"
    kept = {word for word in encoding.word_ids if word is not None}
    lost = next((i for i in range(len(sentence)) if i not in kept), None)
    if lost is not None:
        return f"the tokenizer leaves nothing of word {lost}, {sentence.words[lost]!r}: {_start(sentence)}"
    return None


def _start(sentence: _Words) -> str:
    """A sentence's first words, for messages."""
    return repr(" ".join(sentence.words[:6]) + (" …" if len(sentence) > 6 else ""))


def pieces_of(examples: Examples) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of each word, for all words of all examples in their order.

    Args:
        examples: any examples, such as `as_examples` returns.

    Returns:
        (starts, ends), each (words,) int64: the tokens of a word are rows starts[w] to ends[w] of the arrays
        of `examples`; the last of them is ends[w] - 1.
    """
    rows = np.flatnonzero(examples.words >= 0)
    example = np.repeat(np.arange(len(examples)), examples.lengths)[rows]
    words = examples.words[rows]
    new = np.ones(len(rows), bool)
    new[1:] = (words[1:] != words[:-1]) | (example[1:] != example[:-1])
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(rows))[: len(first)] - 1
    return rows[first], rows[last] + 1
