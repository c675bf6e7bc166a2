"""Windows over the sentences of `ner`, with the context of their document.

Source: Devlin et al. 2018, "BERT", sec. 5.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from fastbert.tasks.ner import Sentence
from fastbert.tasks.tokens import check_whole


class Window(NamedTuple):
    """Tokens to read, some of which are scored.

    Attributes:
        ids: (n,) int32, special tokens included.
        words: (n,) int64, the number of the word in the file, from 0, at the token where it is scored; -1
            elsewhere.
    """

    ids: np.ndarray
    words: np.ndarray


class Windows(NamedTuple):
    """The windows of a file.

    Attributes:
        windows: in the order of the words that they score.
        unknown: words of which the tokenizer makes nothing, each its unknown token.
        cut: words that lost tokens, because a window does not hold them.
    """

    windows: list[Window]
    unknown: int
    cut: int


def windows(
    sentences: Sequence[Sentence], tokenizer: Tokenizer, *, max_length: int = 512, context: int = 64
) -> Windows:
    """The windows of sentences, in which each word is scored once, at its first token.

    A document that fits is one window. A longer document is cut at the ends of sentences, so that each window
    has room for `context` tokens on each side. A sentence that is too long is cut between words. Then whole
    words of the document, before and after the scored words, fill the window.

    Args:
        sentences: as `read` returns them.
        tokenizer: as `fastbert.sentences.tokenizer.load_tokenizer` returns it. A word that it makes nothing
            of becomes its unknown token.
        max_length: most tokens of a window, special tokens included. A longer word is cut.
        context: least tokens on each side that are left to neighbouring words.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    check_whole(tokenizer)
    frame = tokenizer.encode("a")
    special = [i for i, owner in zip(frame.ids, frame.sequence_ids, strict=True) if owner is None]
    before = special[: frame.sequence_ids.index(0)]
    after = special[len(before) :]
    room = max_length - len(special)
    if not 0 <= context <= (room - 1) // 2:
        raise ValueError(
            f"context: expected 0 to {(room - 1) // 2} for max_length {max_length}, got {context}"
        )
    documents: dict[int, list[list[list[int]]]] = {}
    unknown = cut = 0
    for sentence, pieces in zip(sentences, _pieces(sentences, tokenizer), strict=True):
        unknown += pieces.count([])
        cut += sum(len(word) > room for word in pieces)
        named = zip(pieces, sentence.words, strict=True)
        whole = [word[:room] or _unknown(tokenizer, text) for word, text in named]
        documents.setdefault(sentence.document, []).append(whole)
    found, base = [], 0
    for document in documents.values():
        ids = np.array([i for sentence in document for word in sentence for i in word], np.int32)
        # starts[w] is the first token of word w
        starts = np.cumsum([0, *(len(word) for sentence in document for word in sentence)])
        ends = np.cumsum([len(sentence) for sentence in document])
        for first, last in _scored(starts, ends, room, context):
            low, high = _filled(starts, first, last, room)
            words = np.full(starts[high] - starts[low], -1, np.int64)
            words[starts[first:last] - starts[low]] = base + np.arange(first, last)
            edges = [np.full(len(side), -1, np.int64) for side in (before, after)]
            found.append(
                Window(
                    np.concatenate([before, ids[starts[low] : starts[high]], after]).astype(np.int32),
                    np.concatenate([edges[0], words, edges[1]]),
                )
            )
        base += len(starts) - 1
    return Windows(found, unknown, cut)


def _unknown(tokenizer: Tokenizer, text: str) -> list[int]:
    """The unknown token, for a word that the tokenizer makes nothing of."""
    token = getattr(tokenizer.model, "unk_token", None)
    number = None if token is None else tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"tokenizer: has no token for the word {text!r} and no unknown token")
    return [number]


def _pieces(sentences: Sequence[Sentence], tokenizer: Tokenizer) -> Iterator[list[list[int]]]:
    """The token ids of each word, per sentence."""
    encoded = tokenizer.encode_batch(
        [sentence.words for sentence in sentences], is_pretokenized=True, add_special_tokens=False
    )
    for sentence, encoding in zip(sentences, encoded, strict=True):
        words: list[list[int]] = [[] for _ in sentence.words]
        for i, word in zip(encoding.ids, encoding.word_ids, strict=True):
            if word is not None:
                words[word].append(i)
        yield words


def _scored(starts: np.ndarray, ends: np.ndarray, room: int, context: int) -> Iterator[tuple[int, int]]:
    """(first word, word after the last) of what each window of a document scores."""
    count, first = len(starts) - 1, 0
    most = room if starts[-1] <= room else room - 2 * context
    while first < count:
        # Words that fit, one at least; then back to the end of a sentence, if there is one among them
        last = max(int(np.searchsorted(starts, starts[first] + most, side="right")) - 1, first + 1)
        whole = int(np.searchsorted(ends, last, side="right"))
        if whole and ends[whole - 1] > first:
            last = int(ends[whole - 1])
        yield first, last
        first = last


def _filled(starts: np.ndarray, first: int, last: int, room: int) -> tuple[int, int]:
    """(first word, word after the last) of a window that scores these words."""
    rest = room - int(starts[last] - starts[first])
    left, right = int(starts[first]), int(starts[-1] - starts[last])
    left = min(left, max(rest // 2, rest - right))
    low = int(np.searchsorted(starts, starts[first] - left, side="left"))
    rest -= int(starts[first] - starts[low])
    high = int(np.searchsorted(starts, starts[last] + rest, side="right")) - 1
    return low, high


def tags_of(labels: Sequence[str], sentences: Sequence[Sentence]) -> list[list[str]]:
    """Tags, one per word of a file, as one list per sentence.

    Args:
        labels: in the order of the words, as `Window.words` numbers them.
        sentences: as `read` returns them.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    count = sum(len(sentence.words) for sentence in sentences)
    if len(labels) != count:
        raise ValueError(f"labels: expected {count}, one per word, got {len(labels)}")
    rest = iter(labels)
    return [list(islice(rest, len(sentence.words))) for sentence in sentences]
