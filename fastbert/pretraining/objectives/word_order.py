"""Masked-language modelling, the order of words, and the order of segments. StructBERT's.

    loss = "mlm", mean over the masked tokens of -log p(token)
         + "order", mean over the tokens of the shuffled trigrams of -log p(token that was at this place)
         + "sentence", mean over the pairs of -log p(class)

Tokens are masked first, by any rule. Then trigrams are chosen among the candidates. A candidate is three
tokens in a row, none of them special or predicted by the masked LM, of one word or several. The paper's "5%
of trigrams are selected for random shuffling" is read as 5% of the candidates, rounded, at least one. They
are taken in random order; a trigram that shares a token with an earlier one is skipped. With 15% of 512
tokens masked this makes about 16 trigrams, 9% of the tokens.

The tokens of each chosen trigram are shuffled; all 6 orders are equally likely, the original order included.
So 1 in 6 trigrams does not change, and is predicted nevertheless, as are the tokens that masking keeps. Both
predictions go through the masked-LM head, with equal weight.

The paper's pairs are `SegmentPairs(relation="three")`: next, previous, or of another document. With other
formats the loss "sentence" differs, or is missing.

Source: Wang et al. 2019, "StructBERT", sec. 2.2 and 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastbert.models.heads.task_model import Encoded, TaskModel
from fastbert.pretraining.formats import Example
from fastbert.pretraining.masking import IGNORED, Masked
from fastbert.pretraining.objectives.masked import MaskedExample, MaskedLosses, Objective
from fastbert.runtime import expected
from fastbert.training.draws import Draws
from fastbert.training.module import Losses, Results
from fastbert.training.stream import Batch
from fastbert.training.work import vocabulary_work

SIZE = 3  # tokens that are shuffled together


@dataclass(frozen=True)
class WordOrder(Objective):
    """Examples of masked-language modelling with shuffled trigrams; see the module.

    Attributes:
        shuffled_share: share of the candidates that is shuffled, in [0, 1]; 0 shuffles none.

    Raises:
        ValueError: naming the attribute.
    """

    shuffled_share: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        expected.numbers("in [0, 1]", shuffled_share=self.shuffled_share)

    def mask(self, example: Example, draws: Draws) -> MaskedExample:
        """Draw the masks of a sequence, then its trigrams; `more` has the trigrams' labels."""
        found = super().mask(example, draws)
        masked = found.masked
        ids, labels = masked.ids.copy(), np.full(len(masked.ids), IGNORED)
        places = self.trigrams(example.ids, masked, draws)[:, None] + np.arange(SIZE)
        shuffled = np.argsort(draws.words(places.size).reshape(places.shape), axis=1, kind="stable")
        labels[places] = masked.ids[places]
        ids[places] = masked.ids[np.take_along_axis(places, shuffled, axis=1)]
        seen = Masked(ids, masked.labels, masked.spans)
        return MaskedExample(seen, found.token_types, found.label, labels)

    def trigrams(self, ids: np.ndarray, masked: Masked, draws: Draws) -> np.ndarray:
        """(n,) first tokens of the chosen trigrams, in random order."""
        free = ~np.isin(ids, self.vocabulary.special) & (masked.labels == IGNORED)
        starts = np.flatnonzero(free[:-2] & free[1:-1] & free[2:])
        if len(starts) == 0 or self.shuffled_share == 0:
            return starts[:0]
        budget = max(1, round(self.shuffled_share * len(starts)))
        taken = np.zeros(len(ids), bool)
        chosen = []
        for begin in starts[draws.shuffled(len(starts))].tolist():
            if len(chosen) == budget:
                break
            if not taken[begin : begin + SIZE].any():
                taken[begin : begin + SIZE] = True
                chosen.append(begin)
        return np.array(chosen)

    def collate(self, examples: Sequence[MaskedExample]) -> Batch:
        """Pack sequences."""
        batch = super().collate(examples)
        labels = np.concatenate([each.more for each in examples])
        count = int((labels != IGNORED).sum())
        batch.inputs |= {"order_labels": labels, "order_labelled": count}
        batch.counts["order"] = count
        return batch

    def losses(self, model: TaskModel) -> Losses:
        """The module that is trained."""
        return WordOrderLosses(model, self.format.num_labels)


class WordOrderLosses(MaskedLosses):
    """Masked tokens ("mlm"), tokens of shuffled trigrams ("order") and the class of a pair ("sentence")."""

    def losses_of(self, encoded: Encoded, inputs: dict[str, Any], measure: bool) -> Results:
        """What `forward` returns, from the encoded tokens."""
        losses, correct = super().losses_of(encoded, inputs, measure)
        labelled = encoded, inputs["order_labels"], inputs["order_labelled"]
        losses["order"] = self.model.vocabulary_loss(*labelled)
        if measure:
            correct["order"] = self.token_hits(*labelled)
        return losses, correct

    def work(self, batch: Batch) -> float:
        """See `Losses.work`. Counts masked-language modelling and the tokens of trigrams."""
        config = self.model.config
        return super().work(batch) + vocabulary_work(
            batch.counts["order"], config.hidden_size, config.vocab_size
        )
