"""Tokenized texts: ids, and the word, the segment and the kind of each token."""

from __future__ import annotations

import operator
import reprlib
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from fastbert.models.config import EncoderConfig
from fastbert.models.labels import IGNORED
from fastbert.runtime import expected

# kinds of tokens that attention may go to
KINDS = ("the first token", "separators", "periods and commas", "other punctuation", "words")
FIRST, SEPARATOR, STOP, PUNCTUATION, WORD = range(len(KINDS))


@dataclass(frozen=True)
class Examples:
    """Tokenized texts, one after the other; example i is rows starts[i] to starts[i + 1].

    Attributes:
        ids: (total,) int64, special tokens included.
        starts: (n + 1,) int64.
        types: (total,) int64, the tokenizer's token types.
        segments: (total,) int64: 0 in the first text of an example, 1 in the second. A special token belongs
            to the text before it.
        kinds: (total,) int8, an index into `KINDS`.
        words: (total,) int64, the number of the word in its example; -1 for a special token.
        labels: (n, …) for examples, (total,) for tokens, or None. `fastbert.models.labels.IGNORED` (-100)
            does not count. `fastbert.analysis.measures` lists what each kind of model needs.
    """

    ids: np.ndarray
    starts: np.ndarray
    types: np.ndarray
    segments: np.ndarray
    kinds: np.ndarray
    words: np.ndarray
    labels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """(n,) int64, tokens of each example."""
        return np.diff(self.starts)

    @property
    def needed_labels(self) -> np.ndarray:
        """`labels`; ValueError if there are none."""
        if self.labels is None:
            raise ValueError("labels: the examples have none")
        return self.labels

    @property
    def labels_tokens(self) -> bool:
        """Whether there is a label per token."""
        return self.labels is not None and len(self.labels) != len(self)

    def chosen(self, numbers: Sequence[int] | np.ndarray) -> Examples:
        """The examples with these numbers, in this order."""
        numbers = np.asarray(numbers, np.int64)
        rows = self.rows(numbers)
        labels = self.labels
        if labels is not None:
            labels = labels[rows] if self.labels_tokens else labels[numbers]
        starts = np.concatenate([[0], np.cumsum(self.lengths[numbers])])
        of_tokens = (t[rows] for t in (self.ids, self.types, self.segments, self.kinds, self.words))
        ids, types, segments, kinds, words = of_tokens
        return Examples(ids, starts, types, segments, kinds, words, labels)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The rows of the tokens of these examples, one example after the other."""
        if not len(numbers):
            return np.zeros(0, np.int64)
        ranges = zip(self.starts[numbers].tolist(), self.starts[numbers + 1].tolist(), strict=True)
        return np.concatenate([np.arange(*each) for each in ranges])

    def check(self, config: EncoderConfig) -> None:
        """Raise a ValueError that names the first example that a model of this config cannot read."""
        if not len(self):
            raise ValueError("examples: expected one at least, got none")
        empty = np.flatnonzero(self.lengths < 1)
        if len(empty):
            raise ValueError(f"examples[{empty[0]}]: expected one token at least, got none")
        long = np.flatnonzero(self.lengths > config.max_tokens)
        if len(long):
            raise ValueError(
                f"examples[{long[0]}]: {self.lengths[long[0]]} tokens; the model reads at most "
                f"{config.max_tokens}"
            )
        bad = np.flatnonzero(self.ids >= config.vocab_size)
        if len(bad):
            number = int(np.searchsorted(self.starts, bad[0], side="right")) - 1
            raise ValueError(
                f"examples[{number}]: token id {self.ids[bad[0]]}, but the model knows "
                f"{config.vocab_size} tokens: the tokenizer is another model's"
            )


def tokenized(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    labels: Any = None,
    *,
    answers: Sequence[tuple[int, int] | None] | None = None,
    max_length: int | None = None,
) -> Examples:
    """The examples of texts, with the special tokens that the tokenizer adds.

    Args:
        tokenizer: as `fastbert.sentences.tokenizer.load_tokenizer` returns it.
        texts: one per example.
        pairs: the second text of each example, or None.
        labels: one per example, or None.
        answers: in place of labels, the (start, end) of an answer per example, in characters of the second
            text, if there are pairs, else of the text; None for an example without an answer. They become
            labels (n, 2), the first and the last token. Without an answer, or if it was cut off, both are 0.
        max_length: most tokens of an example; a longer example is cut, a pair at its longer text. None: no
            limit.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    count = len(texts)
    if answers is not None and labels is not None:
        raise ValueError("labels: expected None beside answers, which become the labels")
    for name, given in (("pairs", pairs), ("labels", labels), ("answers", answers)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name}: expected {count}, one per text, got {len(given)}")
    for name, given in (("texts", texts), ("pairs", pairs or ())):
        wrong = next((i for i, text in enumerate(given) if not isinstance(text, str)), None)
        if wrong is not None:
            raise ValueError(f"{name}[{wrong}]: expected a str, got {type(given[wrong]).__name__}")
    answers = (
        None if answers is None else [_trimmed(i, a, (pairs or texts)[i]) for i, a in enumerate(answers)]
    )
    own = Tokenizer.from_str(tokenizer.to_str())
    own.no_padding()
    own.no_truncation()
    if max_length is not None:
        least = own.num_special_tokens_to_add(pairs is not None) + 1
        if not isinstance(max_length, int) or max_length < least:
            raise ValueError(f"max_length: expected an integer >= {least}, got {max_length!r}")
        own.enable_truncation(max_length)
    encoded = own.encode_batch(list(texts) if pairs is None else list(zip(texts, pairs, strict=True)))
    if answers is not None:
        owner = int(pairs is not None)
        labels = [_tokens_of(i, e, answers[i], owner) for i, e in enumerate(encoded)]
    return of_encodings(own, encoded, labels)


def of_encodings(tokenizer: Tokenizer, encoded: Sequence[Encoding], labels: Any = None) -> Examples:
    """The examples of encoded texts.

    Args:
        tokenizer: the tokenizer that has encoded the texts.
        encoded: one per example.
        labels: one per example, or None.
    """
    frame = tokenizer.encode("").ids
    starts = np.concatenate([[0], np.cumsum([len(e) for e in encoded])]).astype(np.int64)
    parts = [_places(e, frame[0] if frame else -1) for e in encoded]
    segments, kinds, words = (
        np.concatenate([part[i] for part in parts]) if parts else np.zeros(0, np.int64) for i in range(3)
    )
    return Examples(
        np.array([i for e in encoded for i in e.ids], np.int64),
        starts,
        np.array([i for e in encoded for i in e.type_ids], np.int64),
        segments,
        kinds.astype(np.int8),
        words,
        None if labels is None else _as_array(labels),
    )


def _as_array(labels: Any) -> np.ndarray:
    """Labels of one kind, one per example."""
    if isinstance(labels, np.ndarray):
        return labels
    first = None
    for i, label in enumerate(labels):
        try:
            one = np.asarray(label)
        except ValueError:  # lists of several lengths
            one = np.asarray(None)
        if one.dtype.kind not in "biufU" or (one.dtype.kind == "U" and one.ndim):
            raise ValueError(
                f"labels[{i}]: expected a number, a text, or a list of numbers, got {reprlib.repr(label)}"
            )
        kind = one.dtype.kind == "U", one.shape
        first = first or kind
        if kind != first:
            raise ValueError(
                f"labels[{i}]: expected a label like labels[0], {reprlib.repr(labels[0])}, got "
                f"{reprlib.repr(label)}"
            )
    return np.asarray(labels)


def paired(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pairs: Sequence[str],
    labels: Sequence[float] | None = None,
    *,
    max_length: int | None = None,
) -> Examples:
    """Pairs of texts for an encoder that reads each text alone: examples 2i and 2i + 1 are pair i.

    Args:
        tokenizer: see `tokenized`.
        texts: the first text of each pair.
        pairs: the second text of each pair.
        labels: one per pair, or None.
        max_length: see `tokenized`.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    for name, given in (("pairs", pairs), ("labels", labels)):
        if given is not None and len(given) != len(texts):
            raise ValueError(f"{name}: expected {len(texts)}, one per text, got {len(given)}")
    both = [text for pair in zip(texts, pairs, strict=True) for text in pair]
    of_both = None if labels is None else np.repeat(np.asarray(labels), 2)
    return tokenized(tokenizer, both, labels=of_both, max_length=max_length)


def _trimmed(number: int, answer: Any, text: str) -> tuple[int, int] | None:
    """An answer without the white space at its ends."""
    if answer is None:
        return None
    try:
        start, end = map(operator.index, answer)
    except (TypeError, ValueError):
        raise ValueError(f"answers[{number}]: expected a start and an end, got {answer!r}") from None
    if not 0 <= start < end <= len(text) or text[start:end].isspace():
        raise ValueError(
            f"answers[{number}]: {start} to {end} are no words of a text of {len(text)} characters"
        )
    words = text[start:end]
    return start + len(words) - len(words.lstrip()), end - len(words) + len(words.rstrip())


def _tokens_of(number: int, encoding: Any, answer: tuple[int, int] | None, owner: int) -> tuple[int, int]:
    """The first and the last token of an answer in text `owner` of an example."""
    if answer is None:
        return 0, 0
    start, end = answer
    places = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence == owner]
    offsets = encoding.offsets
    if encoding.overflowing and (not places or offsets[places[-1]][1] < end):
        return 0, 0
    inside = [i for i in places if offsets[i][0] < end and offsets[i][1] > start]
    if not inside:
        raise ValueError(f"answers[{number}]: no token has any of the characters {start} to {end}")
    return inside[0], inside[-1]


def _places(encoding: Any, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(segment, kind, word) of each token of one example."""
    length = len(encoding)
    segments, kinds = np.zeros(length, np.int64), np.full(length, WORD, np.int64)
    words = np.full(length, -1, np.int64)
    segment, base, last = 0, 0, -1
    for i, (sequence, word) in enumerate(zip(encoding.sequence_ids, encoding.word_ids, strict=True)):
        if sequence is None or word is None:
            kinds[i] = FIRST if i == 0 and encoding.ids[i] == first else SEPARATOR
        else:
            if sequence != segment:
                segment, base = sequence, last + 1
            words[i] = last = base + word
            text = encoding.tokens[i].strip("▁Ġ")
            if text and all(letter in string.punctuation for letter in text):
                kinds[i] = STOP if text in (".", ",") else PUNCTUATION
        segments[i] = segment
    return segments, kinds, words


def masked(examples: Examples, mask_id: int, *, share: float = 0.15, seed: int = 0) -> Examples:
    """The examples with some tokens masked and their ids as labels, for a masked-LM loss.

    Of each example's tokens that are not special, ceil(share x their number) are drawn without replacement
    and replaced by `mask_id`. The draw depends on the seed and the example's number alone.

    Args:
        examples: without labels of tokens.
        mask_id: the id of the mask token.
        share: share of the tokens that is masked, in (0, 1].
        seed: seed of the draws.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    expected.numbers("in (0, 1]", share=share)
    ids, labels = examples.ids.copy(), np.full(len(examples.ids), IGNORED, np.int64)
    for number in range(len(examples)):
        start, end = examples.starts[number : number + 2]
        usual = start + np.flatnonzero(examples.words[start:end] >= 0)
        if not len(usual):
            raise ValueError(f"examples[{number}]: has no token to mask")
        draw = np.random.default_rng((seed, number))
        places = draw.choice(usual, int(np.ceil(share * len(usual))), replace=False)
        labels[places] = ids[places]
        ids[places] = mask_id
    return replace(examples, ids=ids, labels=labels)
