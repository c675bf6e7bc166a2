"""Heads that link words: the largest attention between words that an annotation links.

The score of an example and a head is the largest probability between any token of one linked span and any
token of the other, over all links of the example and in both directions. A head's score is the mean over
examples. Only these probabilities are computed, no map.

A large score means little by itself: a head that looks at the next word links all neighbours. So the links of
each example are also moved together to another place of the same text, drawn by `seed`, and scored there.

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT" (D19-1445), who link the word that evokes a
frame with the frame's elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.identities import Observer, Probabilities
from fastbert.analysis.intervals import Interval, finite, mean_interval
from fastbert.analysis.targets import Targets
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches, encode
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

# layer-head, counted from 1 -> score: the two best heads of bert-base-uncased, on 473 sentences of FrameNet
# with 12 tokens at most
PUBLISHED = {"1-2": 0.201, "7-6": 0.209}


class Best(NamedTuple):
    """The head that links best, chosen on one half of the examples and scored on the other half.

    Attributes:
        layer, head: numbers from 0.
        score: score on the other half, with its 95% interval over examples.
        moved: the same for the moved links, over the examples with room for them.
    """

    layer: int
    head: int
    score: Interval
    moved: Interval | None


@dataclass(frozen=True)
class Links:
    """The scores of examples and heads.

    Attributes:
        example: (n,) int64, the numbers of the examples that have links.
        score: (n, layers, nheads) float32.
        moved: the same for the links at another place; NaN if the text has no room.
        links: (n,) int64, number of links of each example.
        seed: seed of the places, the halves and the intervals.
    """

    example: np.ndarray
    score: np.ndarray
    moved: np.ndarray
    links: np.ndarray
    seed: int

    @property
    def has_room(self) -> np.ndarray:
        """(n,) bool: whether an example's links could be moved."""
        return ~np.isnan(self.moved[:, 0, 0])

    def scores(self, *, moved: bool = False) -> np.ndarray:
        """(layers, nheads): means over examples; NaN if no example has room for moved links."""
        if not moved:
            return self.score.mean(0, dtype=np.float64)
        some = self.moved[self.has_room]
        return some.mean(0, dtype=np.float64) if len(some) else np.full(self.moved.shape[1:], np.nan)

    def best(self) -> Best:
        """See `Best`.

        Raises:
            ValueError: fewer than 4 examples, two for each half.
        """
        n = len(self.example)
        check_halves(n)
        order = np.random.default_rng(self.seed).permutation(n)
        first, second = order[: (n + 1) // 2], np.sort(order[(n + 1) // 2 :])
        scores = finite("score", self.score)[first].mean(0, dtype=np.float64)
        layer, head = (int(i) for i in np.unravel_index(scores.argmax(), scores.shape))
        moved = self.moved[second[self.has_room[second]], layer, head]
        return Best(
            layer,
            head,
            mean_interval(self.score[second, layer, head], seed=self.seed),
            mean_interval(moved, seed=self.seed) if len(moved) > 1 else None,
        )


def check_halves(examples: int) -> None:
    """Raise a ValueError if too few examples have links for `Links.best`."""
    if examples < 4:
        raise ValueError(f"examples: expected 4 with links at least, two for each half, got {examples}")


def links(
    model: PreTrainedModel,
    examples: Examples,
    targets: Targets,
    *,
    batch_tokens: int = BATCH_TOKENS,
    seed: int = 0,
) -> Links:
    """The largest attention of each head between the spans that targets link.

    Args:
        model: an encoder, or a model with a head.
        examples: what `treebank.as_examples` returns.
        targets: targets of the same examples, with two spans each; labels are ignored.
        batch_tokens: most tokens that run at a time. It changes the result by rounding only.
        seed: see `Links`.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    if targets.tokens.shape[1] != 2:
        raise ValueError(f"targets: a link has two spans, got targets of {targets.tokens.shape[1]}")
    if targets.tokens.max() > len(examples.ids) or targets.example.max() >= len(examples):
        raise ValueError(f"targets: expected targets of these {len(examples)} examples, got others")
    known, counts = np.unique(targets.example, return_counts=True)
    shape = len(known), len(model.base_model.layer_list()), model.config.num_attention_heads
    found = Links(known, np.zeros(shape, np.float32), np.full(shape, np.nan, np.float32), counts, seed)
    pairs = _pairs_of(targets)
    shifts = _shifts(examples, targets, known, seed)
    with at_rest(model), torch.inference_mode():
        for batch in batches(model, examples.chosen(known), batch_tokens):
            encode(model, batch, _Linked(batch, examples.starts[known], pairs, shifts, found))
    return found


def _pairs_of(targets: Targets) -> list[np.ndarray]:
    """Per example that has targets: (pairs, 2) rows of linked tokens, in both directions."""
    found: dict[int, list[np.ndarray]] = {}
    for number, (example, ((a, b), (c, d))) in enumerate(zip(targets.example, targets.tokens, strict=True)):
        one, other = (each.ravel() for each in np.meshgrid(np.arange(a, b), np.arange(c, d)))
        # spans may overlap, but a token is not linked to itself
        one, other = one[one != other], other[one != other]
        if not len(one):
            raise ValueError(f"targets[{number}]: a link needs two tokens, but both spans are the same token")
        both = [np.stack([one, other], 1), np.stack([other, one], 1)]
        found.setdefault(int(example), []).extend(both)
    return [np.concatenate(found[example]) for example in sorted(found)]


def _shifts(examples: Examples, targets: Targets, known: np.ndarray, seed: int) -> np.ndarray:
    """(n,) number of tokens by which each example's links move, within its words; 0 without room."""
    draw = np.random.default_rng((seed, 1))
    found = np.zeros(len(known), np.int64)
    for i, example in enumerate(known):
        own = targets.tokens[targets.example == example]
        start, end = examples.starts[example : example + 2]
        words = start + np.flatnonzero(examples.words[start:end] >= 0)
        low, high = words[0] - own.min(), words[-1] + 1 - own.max()
        places = [shift for shift in range(low, high + 1) if shift]
        found[i] = draw.choice(places) if places else 0
    return found


class _Linked(Observer):
    """Fills the arrays with what a batch's heads do."""

    def __init__(
        self, batch: Batch, starts: np.ndarray, pairs: list[np.ndarray], shifts: np.ndarray, found: Links
    ) -> None:
        self.batch, self.found = batch, found
        device = batch.sequence.device
        numbers = batch.numbers
        first = batch.inputs.packing.cu_seqlens.tolist()
        rows = [pairs[n] - starts[n] + first[i] for i, n in enumerate(numbers)]
        owner = np.repeat(np.arange(len(numbers)), [len(each) for each in rows])
        stacked = np.concatenate(rows)
        self.owner = torch.from_numpy(owner).to(device)
        self.pairs = torch.from_numpy(stacked).to(device)
        self.moves = shifts[numbers] != 0
        self.shifted = self.pairs + torch.from_numpy(shifts[numbers][owner]).to(device)[:, None]

    def _largest(self, probabilities: Probabilities, pairs: Tensor) -> np.ndarray:
        """(batch, nheads)."""
        values = probabilities.between(*pairs.unbind(1))
        most = values.new_zeros(len(self.batch), values.shape[1])
        most.scatter_reduce_(0, self.owner[:, None].expand_as(values), values, "amax")
        return most.cpu().numpy()

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        numbers = self.batch.numbers
        self.found.score[numbers, layer] = self._largest(probabilities, self.pairs)
        moved = self._largest(probabilities, self.shifted)
        self.found.moved[numbers[self.moves], layer] = moved[self.moves]
