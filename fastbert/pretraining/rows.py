"""Rows of whole sentences, within a document or across documents: see `formats.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.plans import BLOCK, NO_LABEL, Example, Format, Plan, chain, checked_epoch
from fastbert.training.draws import Order, key_of


@dataclass(frozen=True, eq=False)
class RowPlan(Plan):
    """The rows of an epoch, each within a document.

    Attributes:
        begins: (n,) int64, first token of each row.
    """

    begins: np.ndarray


@dataclass(frozen=True, eq=False)
class FullPlan(Plan):
    """The rows of an epoch that may cross documents.

    Attributes:
        begins: (n,) int64, first token of each row.
        order: (documents,) int32 or int64, the documents in the epoch's order.
        places: (n,) of the same type, the place in `order` at which each row begins.
    """

    begins: np.ndarray
    order: np.ndarray
    places: np.ndarray


@dataclass(frozen=True)
class DocSentences(Format[RowPlan]):
    """Rows of whole sentences of one document, as many as fit: [CLS] … [SEP], at least 3 tokens.

    The last row of a document is shorter. A sentence that is longer than a row fills rows of its own, and
    its rest starts the next row. Every token occurs once per epoch. Nothing is random: all seeds and epochs
    have the same rows, which the stream orders and masking masks anew. (RoBERTa)
    """

    _plan: ClassVar[type[Plan]] = RowPlan

    def plan(self, epoch: int) -> RowPlan:
        """The rows of an epoch, an integer in [0, 2**64); all epochs have the same rows."""
        epoch, room = checked_epoch(epoch), self.max_length - 2
        # the separator fills a row, so no row crosses documents
        lengths, begins, _ = _rows(self.corpus, room, np.arange(self.corpus.num_documents), separator=room)
        return RowPlan(lengths, begins, epoch=epoch)

    def build(self, plan: RowPlan, index: int) -> Example:
        """The row with a number in [0, len(plan))."""
        self._check(plan, index)
        begin = int(plan.begins[index])
        return self._example([(begin, begin + int(plan.lengths[index]) - 2)], None, NO_LABEL)


@dataclass(frozen=True)
class FullSentences(Format[FullPlan]):
    """Rows of whole sentences, as many as fit, across documents: [CLS] … [SEP] … [SEP], at least 3 tokens.

    A further [SEP] separates two documents of a row. A sentence that is longer than a row fills rows of its
    own, and its rest starts the next row. Every token occurs once per epoch. Each epoch has its own random
    order of documents. (RoBERTa)
    """

    _plan: ClassVar[type[Plan]] = FullPlan

    def plan(self, epoch: int) -> FullPlan:
        """The rows of an epoch, an integer in [0, 2**64)."""
        epoch, count = checked_epoch(epoch), self.corpus.num_documents
        documents = Order(count, key_of(self.corpus.hash, self.seed, "documents", epoch))
        order = np.empty(count, np.int32 if count < (1 << 31) - 1 else np.int64)
        for begin in range(0, count, BLOCK):
            places = np.arange(begin, min(begin + BLOCK, count))
            order[places] = documents[places]
        lengths, begins, places = _rows(self.corpus, self.max_length - 2, order, separator=1)
        return FullPlan(lengths, begins, order, places, epoch=epoch)

    def build(self, plan: FullPlan, index: int) -> Example:
        """The row with a number in [0, len(plan))."""
        self._check(plan, index)
        sentences, documents = self.corpus.sentence_starts, self.corpus.document_starts
        at, place, left = int(plan.begins[index]), int(plan.places[index]), int(plan.lengths[index]) - 2
        pieces = []
        while True:
            end = min(at + left, int(sentences[documents[int(plan.order[place]) + 1]]))
            pieces.append((at, end))
            left -= end - at + 1
            if left <= 0:
                return self._example(pieces, None, NO_LABEL)
            place += 1
            at = int(sentences[documents[plan.order[place]]])


def _rows(
    corpus: Corpus, room: int, order: np.ndarray, separator: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(lengths, first tokens, places in `order`) of the rows of all documents, one after the other.

    For a block of sentences at once it computes where a row that starts there would end. The rows that do
    occur are then a chain. Sentences after the last whole row go into the next block.

    Args:
        corpus: the text.
        room: most tokens of a row; separators count, other special tokens do not.
        order: (documents,) the documents in order.
        separator: number of tokens between two documents of a row.
    """
    documents = corpus.document_starts
    ends = np.cumsum(documents[order + 1] - documents[order])
    rows = []
    left = [np.empty(0, np.int64)] * 4
    for start in range(0, int(ends[-1]), BLOCK):
        stop = min(start + BLOCK, int(ends[-1]))
        low, high = np.searchsorted(ends, [start, stop - 1], "right")
        borders = np.concatenate([[start], np.minimum(ends[low : high + 1], stop)])
        place = np.repeat(np.arange(low, high + 1), np.diff(borders))
        sentence = np.arange(start, stop) - ends[place] + documents[order[place] + 1]
        more = _pieces(corpus, room, sentence, sentence == documents[order[place]], place)
        begin, size, first, place = (np.concatenate(pair) for pair in zip(left, more, strict=True))
        before = first * separator  # tokens between a sentence and the previous one
        total = np.concatenate([[0], np.cumsum(before + size)])
        after = np.searchsorted(total, total[:-1] + before + room, "right") - 1
        known = len(after) if stop == ends[-1] else int(np.searchsorted(after, len(after)))
        found, at = chain(after[:known], 0)
        lengths = total[after[found]] - total[found] - before[found] + 2
        rows.append((lengths.astype(np.int32), begin[found], place[found].astype(order.dtype)))
        left = [each[at:] for each in (begin, size, first, place)]
    lengths, begins, places = map(np.concatenate, zip(*rows, strict=True))
    return lengths, begins, places


def _pieces(
    corpus: Corpus, room: int, sentence: np.ndarray, first: np.ndarray, place: np.ndarray
) -> list[np.ndarray]:
    """[first token, tokens, whether a document begins, place] of sentences, long ones cut in pieces."""
    begin = corpus.sentence_starts[sentence]
    size = corpus.sentence_starts[sentence + 1] - begin
    if corpus.longest_sentence <= room:
        return [begin, size, first, place]
    count = -(-size // room)
    whole = np.repeat(np.arange(len(size)), count)
    skipped = (np.arange(len(whole)) - np.repeat(np.cumsum(count) - count, count)) * room
    size = np.minimum(size[whole] - skipped, room)
    return [begin[whole] + skipped, size, first[whole] & (skipped == 0), place[whole]]
