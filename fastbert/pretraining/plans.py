"""What all formats of sequences share: see `formats.py`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import numpy as np

from fastbert.pretraining.corpus import Corpus
from fastbert.runtime import expected
from fastbert.training.draws import key_of

NO_LABEL = -100
# Sentences that are planned at a time, with a stream of draws of their own; a change would change the pairs
BLOCK = 1 << 16


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence, not masked.

    Attributes:
        ids: (length,) int64, with [CLS] and [SEP].
        word_starts: (length,) bool; true at special tokens.
        token_types: (length,) int64: 0, and 1 from the second segment's first token on.
        label: the class of the pair of segments; `NO_LABEL` if the format has no classes.
        spans: (n, 3) int64, first token, end and kind of the corpus's spans in the sequence; None if the
            corpus was made without spans.
    """

    ids: np.ndarray
    word_starts: np.ndarray
    token_types: np.ndarray
    label: int
    spans: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """The sequences of one epoch, in the order of the text.

    Attributes:
        lengths: (n,) int32, tokens of each sequence, special ones included.
        epoch: number of the epoch.
    """

    lengths: np.ndarray
    epoch: int = field(kw_only=True)

    def __len__(self) -> int:
        return len(self.lengths)


PlanT = TypeVar("PlanT", bound=Plan)


@dataclass(frozen=True)
class Format(ABC, Generic[PlanT]):
    """What all formats share.

    Attributes:
        corpus: the text.
        max_length: most tokens of a sequence, special ones included.
        seed: seed of all draws, an integer.

    Raises:
        TypeError, ValueError: naming the attribute.
    """

    corpus: Corpus
    max_length: int
    seed: int

    _least: ClassVar[int] = 3  # [CLS], a token, [SEP]
    _plan: ClassVar[type[Plan]] = Plan

    def __post_init__(self) -> None:
        if not isinstance(self.corpus, Corpus):
            raise TypeError(f"corpus: expected a Corpus, got {type(self.corpus).__name__}")
        expected.integers(self._least, max_length=self.max_length)
        if self.max_length + self.corpus.longest_sentence >= 1 << 31:
            raise ValueError(
                f"max_length: with {self.corpus.directory}'s longest sentence of "
                f"{self.corpus.longest_sentence} tokens expected less than 2**31, got {self.max_length}"
            )
        if type(self.seed) is not int:
            raise ValueError(f"seed: expected an integer, got {self.seed!r}")

    @property
    def num_labels(self) -> int:
        """Number of classes of `Example.label`; 0 if it has none."""
        return 0

    @abstractmethod
    def plan(self, epoch: int) -> PlanT:
        """The sequences of an epoch, an integer in [0, 2**64)."""

    @abstractmethod
    def build(self, plan: PlanT, index: int) -> Example:
        """The sequence with a number in [0, len(plan)), of a plan of this format.

        Raises:
            IndexError: the number is outside.
            TypeError: the plan is of another format.
        """

    def statistics(self, plan: PlanT) -> dict[str, float]:
        """An epoch's values for a log: sequences, their mean length, and its share of max_length."""
        mean = float(plan.lengths.mean())
        return {"sequences": float(len(plan)), "mean_length": mean, "filled": mean / self.max_length}

    def _key(self, purpose: str) -> int:
        return key_of(self.corpus.hash, self.seed, purpose)

    def _check(self, plan: Plan, index: int) -> None:
        if type(plan) is not self._plan:
            expected = f"a {self._plan.__name__} of {type(self).__name__}.plan"
            raise TypeError(f"plan: expected {expected}, got {type(plan).__name__}")
        if not 0 <= index < len(plan):
            raise IndexError(f"index: expected an integer in [0, {len(plan)}), got {index!r}")

    def _example(self, pieces: list[tuple[int, int]], second: int | None, label: int) -> Example:
        """[CLS] piece [SEP] piece [SEP] …; pieces are ranges of tokens, of type 1 from piece `second` on."""
        special, length = self.corpus.special_ids, 1 + sum(end - begin + 1 for begin, end in pieces)
        ids = np.full(length, special["sep"], np.int64)
        ids[0] = special["cls"]
        starts, types = np.ones(length, bool), np.zeros(length, np.int64)
        at, spans = 1, []
        for i, (begin, end) in enumerate(pieces):
            if i == second:
                types[at:] = 1
            ids[at : at + end - begin] = self.corpus.tokens(begin, end)
            starts[at : at + end - begin] = self.corpus.word_starts(begin, end)
            if self.corpus.span_kinds:
                spans.append(self.corpus.spans(begin, end) + np.array([at - begin, at - begin, 0]))
            at += end - begin + 1
        return Example(ids, starts, types, label, np.concatenate(spans) if spans else None)


def checked_epoch(value: int) -> int:
    """An epoch as a plain integer; ValueError if it is no integer in [0, 2**64)."""
    try:
        value = operator.index(value)
    except TypeError:
        raise ValueError(f"epoch: expected an integer, got {value!r}") from None
    if not 0 <= value < 1 << 64:
        raise ValueError(f"epoch: expected an integer in [0, 2**64), got {value!r}")
    return value


def chain(after: np.ndarray, at: int) -> tuple[np.ndarray, int]:
    """(the places at, after[at], after[after[at]], … below len(after); the first place not below it)."""
    jumps, found = after.tolist(), []
    while at < len(jumps):
        found.append(at)
        at = jumps[at]
    return np.array(found, np.int64), at
