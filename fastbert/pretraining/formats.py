"""How the sentences of a corpus become the sequences of an epoch, before masking.

    SegmentPairs    [CLS] A [SEP] B [SEP]; A and B are consecutive, swapped, or of two documents
    FullSentences   [CLS] sentences [SEP], as many as fit; a further [SEP] between two documents
    DocSentences    the same within one document

A format plans an epoch, which reads where sentences begin but no token. Then it builds any sequence of the
plan by its number. A sequence is a function of (corpus, seed, epoch, number) alone.

Source: Devlin et al. 2018, "BERT", sec. 3.1 and google-research/bert's create_pretraining_data.py; Lan et al.
2019, "ALBERT", sec. 3.1; Wang et al. 2019, "StructBERT", sec. 2.3; Liu et al. 2019, "RoBERTa", sec. 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fastbert.pretraining.plans import BLOCK, Example, Format, Plan, chain, checked_epoch
from fastbert.pretraining.plans import NO_LABEL as NO_LABEL
from fastbert.pretraining.rows import DocSentences as DocSentences
from fastbert.pretraining.rows import FullSentences as FullSentences
from fastbert.runtime import expected
from fastbert.training.draws import Draws

# relation -> what the pairs with label 0, 1, … are
RELATIONS = {
    "next": ("next", "random"),
    "order": ("in_order", "swapped"),
    "three": ("next", "previous", "other"),
}
# relation -> the label of a swapped pair; the label of a pair from two documents
_SWAPPED = {"next": None, "order": 1, "three": 1}
_OTHER = {"next": 1, "order": None, "three": 2}


@dataclass(frozen=True, eq=False)
class PairPlan(Plan):
    """The pairs of an epoch.

    Attributes:
        first_size, second_size: (n,) int32, tokens of each segment before it is cut to fit.
        first, second: (n,) int64, first token of each segment.
        labels: (n,) int8, class of each pair.
        shortened: (n,) bool, whether the pair's target was a random shorter length.
    """

    first_size: np.ndarray
    second_size: np.ndarray
    first: np.ndarray
    second: np.ndarray
    labels: np.ndarray
    shortened: np.ndarray


@dataclass(frozen=True)
class SegmentPairs(Format[PairPlan]):
    """Two segments of a document, or of two: [CLS] A [SEP] B [SEP], at least 5 tokens.

    Sentences of a document are gathered until they reach a target. The target is max_length - 3 tokens; in a
    share of the documents (`short_share`) it is a random number from 2 to that. A random number of the
    sentences, at least one and not all, is A and the rest is B. `relation` names what may happen to B:

        next    label 0: nothing. Label 1, with probability 1/2: B starts at a random sentence of another
                document and reaches the target, and the rest of A's document is gathered anew. Label 1 is
                also for all pairs of which only one sentence was gathered. (BERT)
        order   label 1, with probability 1/2: A and B change places. At least two sentences are gathered;
                a single sentence at the end of a document is left out. (ALBERT, without its random text)
        three   with probability 1/3 each: label 0: nothing; label 1: A and B change places, so that B comes
                before A in the text; label 2: B is from another document, as above, and so are all pairs of
                which only one sentence was gathered. (StructBERT)

    A pair that is too long loses tokens of its longer segment, at the front or at the back at random.

    As in Google's code the target is drawn per document, not per pair. Google's code may pick A's own
    document for B; this code never does.

    Attributes:
        relation: "next", "order" or "three".
        short_share: share of the documents with a shorter target, in [0, 1].
    """

    relation: str = "next"
    short_share: float = 0.1

    _least: ClassVar[int] = 5
    _plan: ClassVar[type[Plan]] = PairPlan

    def __post_init__(self) -> None:
        super().__post_init__()
        expected.one_of(RELATIONS, relation=self.relation)
        expected.numbers("in [0, 1]", short_share=self.short_share)
        corpus = self.corpus
        if _OTHER[self.relation] is not None and corpus.num_documents < 2:
            raise ValueError(
                f"corpus: {corpus.directory} has one document, but relation = {self.relation} takes segments "
                "of another document; expected two documents or more"
            )
        if self.relation == "order" and corpus.num_sentences == corpus.num_documents:
            raise ValueError(
                f"corpus: {corpus.directory} has one sentence per document, but relation = order needs two "
                "that follow each other"
            )

    @property
    def num_labels(self) -> int:
        """2, or 3 for the relation "three"."""
        return len(RELATIONS[self.relation])

    def plan(self, epoch: int) -> PairPlan:
        """The pairs of an epoch, an integer in [0, 2**64)."""
        epoch = checked_epoch(epoch)
        targets = self._targets(epoch)
        parts, at = [], 0
        for begin in range(0, self.corpus.num_sentences, BLOCK):
            part, at = self._block(epoch, begin, at, targets)
            parts.append(part)
        return PairPlan(*map(np.concatenate, zip(*parts, strict=True)), epoch=epoch)

    def _targets(self, epoch: int) -> np.ndarray:
        """(documents,) int32: the target of each document's pairs, in tokens."""
        draws = Draws(self._key("targets"), epoch, 0)
        count, most = self.corpus.num_documents, self.max_length - 3
        short = draws.chance(self.short_share, count)
        return np.where(short, 2 + draws.below(most - 1, count), most).astype(np.int32)

    def _block(
        self, epoch: int, begin: int, at: int, targets: np.ndarray
    ) -> tuple[tuple[np.ndarray, ...], int]:
        """The pairs that start with one of `BLOCK` sentences, and the sentence at which the next pair starts.

        For all sentences at once it computes where a pair that starts there would end, and where the next
        pair would start. The pairs that do occur are then a chain from the sentence `at` on.
        """
        sentences, documents = self.corpus.sentence_starts, self.corpus.document_starts
        count = min(BLOCK, self.corpus.num_sentences - begin)
        draws = Draws(self._key("pairs"), epoch, begin // BLOCK)
        low, high = np.searchsorted(documents, [begin, begin + count - 1], "right") - 1
        borders = np.clip(documents[low : high + 2], begin, begin + count)
        document = np.repeat(np.arange(low, high + 1), np.diff(borders))

        # sentences by number in the block: [here, stop) are gathered, and [here, cut) of them are A
        here, last = np.arange(count), documents[document + 1] - begin
        tokens = sentences[begin : begin + count + self.max_length + 1]  # a sentence has one token or more
        target = targets[document]
        stop = np.minimum(np.searchsorted(tokens, tokens[:count] + target), last)
        if self.relation == "order":
            stop = np.minimum(np.maximum(stop, here + 2), last)
        alone = stop - here == 1
        cut = here + 1 + draws.below(np.maximum(stop - here - 1, 1), count)
        label = draws.below(self.num_labels, count)
        after, other = stop, _OTHER[self.relation]
        if other is not None:
            label[alone] = other
            after = np.where(label == other, cut, stop)
        found, at = chain(after, at - begin)
        if self.relation == "order":
            found = found[~alone[found]]

        cut, stop, label = cut[found], stop[found], label[found]
        first, second = tokens[found], tokens[cut]
        first_size, second_size = second - first, tokens[stop] - second
        if other is not None:
            mixed = label == other
            wanted = np.maximum(target[found] - first_size, 1)[mixed]
            second[mixed], second_size[mixed] = self._elsewhere(draws, document[found][mixed], wanted)
        if _SWAPPED[self.relation] is not None:
            swapped = label == _SWAPPED[self.relation]
            first, second = np.where(swapped, second, first), np.where(swapped, first, second)
            first_size, second_size = (
                np.where(swapped, second_size, first_size),
                np.where(swapped, first_size, second_size),
            )
        room = self.max_length - 3
        lengths = 3 + np.minimum(first_size + second_size, room)
        sizes = (each.astype(np.int32) for each in (lengths, first_size, second_size))
        return (*sizes, first, second, label.astype(np.int8), target[found] < room), at + begin

    def _elsewhere(
        self, draws: Draws, document: np.ndarray, wanted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(first tokens, sizes) of segments outside `document`, of `wanted` tokens or more where possible."""
        sentences, documents = self.corpus.sentence_starts, self.corpus.document_starts
        chosen = draws.below(self.corpus.num_documents - 1, len(document))
        chosen += chosen >= document
        begin, end = documents[chosen], documents[chosen + 1]
        begin = begin + draws.below(end - begin, len(document))
        first = sentences[begin]
        stop = np.minimum(np.searchsorted(sentences, first + wanted), end)
        return first, sentences[stop] - first

    def build(self, plan: PairPlan, index: int) -> Example:
        """The pair with a number in [0, len(plan))."""
        self._check(plan, index)
        room = self.max_length - 3
        sizes = int(plan.first_size[index]), int(plan.second_size[index])
        # the longer segment is cut until both have one length, then the second and the first in turn
        kept = min(sizes[0], max(room - sizes[1], (room + 1) // 2))
        kept = kept, min(sizes[1], room - kept)
        begins = [int(plan.first[index]), int(plan.second[index])]
        if kept != sizes:
            draws = Draws(self._key("cut"), plan.epoch, index)
            for i in range(2):
                begins[i] += int(draws.chance(0.5, sizes[i] - kept[i]).sum())
        pieces = [(begins[i], begins[i] + kept[i]) for i in range(2)]
        return self._example(pieces, 1, int(plan.labels[index]))

    def statistics(self, plan: PairPlan) -> dict[str, float]:
        """`Format.statistics`, and the shares of each label, of shortened targets and of cut pairs.

        For the relation "order" also `left_out`, the share of the corpus's tokens that are in no pair.
        """
        found = super().statistics(plan)
        for label, name in enumerate(RELATIONS[self.relation]):
            found[name] = float((plan.labels == label).mean())
        total = plan.first_size.astype(np.int64) + plan.second_size
        found["shortened"] = float(plan.shortened.mean())
        found["cut"] = float((total > self.max_length - 3).mean())
        if self.relation == "order":
            found["left_out"] = 1 - float(total.sum()) / self.corpus.num_tokens
        return found
