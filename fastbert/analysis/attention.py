"""Where heads look: entropy, attention to kinds of tokens and to neighbours, and five patterns.

It takes one pass over the examples. A tap reads each layer's queries and keys, and `identities` computes
every statistic from them, so that no attention map is in memory. Heads and layers are numbered from 0.

The five patterns, for each example and head:

- vertical: attention to one token, mainly a special one;
- diagonal: to the token itself, the previous or the next one;
- vertical+diagonal: both;
- block: more or less uniform within one of two texts;
- heterogeneous: all else, the only class that could be linguistic.

Four features decide on the pattern. Each is a share of attention x, as its excess over a uniform head's x₀,
x' = (x - x₀) / (1 - x₀):

    v  the larger of the attention to special tokens and the most attention to one token
    d  the attention to the token itself, the previous token and the next token
    b  the attention to the row's own text
    u  how much of the row's own text it looks at: mean of exp(H_i) / tokens of that text

The thresholds (`THRESHOLDS`) are this package's own.

Source: Kovaleva et al. 2019, "Revealing the Dark Secrets of BERT", sec. 4.1; Clark et al. 2019, "What Does
BERT Look At?", sec. 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from fastbert.analysis.identities import Observer, Probabilities
from fastbert.analysis.intervals import Interval, estimate, finite
from fastbert.analysis.walk import BATCH_TOKENS, Batch, at_rest, batches, encode
from fastbert.layers.float_linear import passing_panels
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import FIRST, KINDS, SEPARATOR, Examples

PATTERNS = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
VERTICAL, DIAGONAL, BOTH, BLOCK, HETEROGENEOUS = range(len(PATTERNS))


class Thresholds(NamedTuple):
    """The least excess with which a feature decides; see `patterns`."""

    sum_of_both: float = 0.6
    each_of_both: float = 0.25
    vertical: float = 0.5
    diagonal: float = 0.5
    own_text: float = 0.8
    spread: float = 0.5


THRESHOLDS = Thresholds()


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over the rows of each example. Arrays are float32 (n, layers, nheads) unless noted.

    Attributes:
        entropy: entropy of attention, in nats.
        to_kind: (kinds, n, layers, nheads), attention to the tokens of each kind of `examples.KINDS`.
        previous, itself, following: attention to the previous token, the same token and the next token.
        own_text: attention to the text that the row belongs to.
        most_received: the largest mean attention to one token.
        spread: exp(H_i) over the tokens of the row's own text.
        lengths: (n,) number of tokens.
        share_of_kind: (kinds, n) share of the tokens that are of each kind.
        share_of_text: (n,) mean share of the tokens that belong to a row's own text.
        texts: (n,) number of texts of each example.
    """

    entropy: np.ndarray
    to_kind: np.ndarray
    previous: np.ndarray
    itself: np.ndarray
    following: np.ndarray
    own_text: np.ndarray
    most_received: np.ndarray
    spread: np.ndarray
    lengths: np.ndarray
    share_of_kind: np.ndarray
    share_of_text: np.ndarray
    texts: np.ndarray

    def to_special(self) -> np.ndarray:
        """(n, layers, nheads): attention to special tokens."""
        return self.to_kind[FIRST] + self.to_kind[SEPARATOR]

    def looked_at(self) -> dict[str, np.ndarray]:
        """ "to …" -> (n, layers, nheads): attention to each kind of token, and to the neighbours."""
        found = dict(zip((f"to {kind}" for kind in KINDS), self.to_kind, strict=True))
        found |= {"to the previous token": self.previous, "to the same token": self.itself}
        return found | {"to the next token": self.following}

    def intervals(self, *, seed: int = 0) -> dict[str, Interval]:
        """Means over all heads with their 95% intervals over examples, by name.

        "entropy" and "entropy of a uniform head" are in nats; "to …" are shares of attention. "heads over
        half on the … token" is the number of heads with over half of their attention there, in the mean over
        examples.
        """
        shares = self.looked_at() | {"to the own text": self.own_text}
        found = {"entropy": estimate(self.entropy, seed=seed)}
        found["entropy of a uniform head"] = estimate(np.log(self.lengths), seed=seed)
        found |= {name: estimate(values, seed=seed) for name, values in shares.items()}
        for name, values in (("previous", self.previous), ("next", self.following)):
            found[f"heads over half on the {name} token"] = estimate(values, _over_half, seed=seed)
        return found

    def features(self) -> dict[str, np.ndarray]:
        """ "v", "d", "b", "u" of the module, each (n, layers, nheads).

        Raises:
            ValueError: the statistics are not finite; the message names an example.
        """
        n = self.lengths.astype(np.float64)
        special = _excess(self.to_special(), self.share_of_kind[FIRST] + self.share_of_kind[SEPARATOR])
        column = _excess(self.most_received, 1 / n)
        near = _excess(self.previous + self.itself + self.following, (3 * n - 2) / n**2)
        found = {
            "v": np.maximum(special, column),
            "d": near,
            "b": _excess(self.own_text, self.share_of_text),
            "u": self.spread,
        }
        for values in found.values():
            finite("statistics", values)
        return found

    def patterns(self, thresholds: Thresholds = THRESHOLDS) -> np.ndarray:
        """(n, layers, nheads) int8, an index into `PATTERNS`.

        The first rule that holds decides: v + d and each of the two; v; d; b and u (u alone if the example
        has one text); else heterogeneous.
        """
        v, d, b, u = self.features().values()
        both = (v + d >= thresholds.sum_of_both) & (np.minimum(v, d) >= thresholds.each_of_both)
        one_text = (self.texts < 2)[:, None, None]
        block = (u >= thresholds.spread) & ((b >= thresholds.own_text) | one_text)
        conditions = [both, v >= thresholds.vertical, d >= thresholds.diagonal, block]
        return np.select(conditions, [BOTH, VERTICAL, DIAGONAL, BLOCK], HETEROGENEOUS).astype(np.int8)

    def shares(self, thresholds: Thresholds = THRESHOLDS) -> dict[str, float]:
        """Pattern -> its share of all examples, layers and heads."""
        return shares_of(self.patterns(thresholds))

    def commonest(self, thresholds: Thresholds = THRESHOLDS) -> np.ndarray:
        """(layers, nheads) int8: the pattern that a head has in most examples; in a tie the first."""
        return commonest_of(self.patterns(thresholds))


def shares_of(patterns: np.ndarray) -> dict[str, float]:
    """Pattern -> its share of (n, layers, nheads) indices into `PATTERNS`."""
    return {name: float((patterns == i).mean()) for i, name in enumerate(PATTERNS)}


def commonest_of(patterns: np.ndarray) -> np.ndarray:
    """(n, layers, nheads) -> (layers, nheads) int8: each head's commonest pattern; in a tie the first."""
    counts = np.stack([(patterns == i).sum(0) for i in range(len(PATTERNS))])
    return counts.argmax(0).astype(np.int8)


def _over_half(means: np.ndarray) -> np.ndarray:
    """(some, layers, nheads) mean shares -> (some,) number of heads with more than half."""
    return (means > 0.5).sum((1, 2))


def _excess(share: np.ndarray, of_uniform: np.ndarray) -> np.ndarray:
    """(x - x₀) / (1 - x₀); 0 where x₀ is 1."""
    of_uniform = of_uniform[:, None, None]
    room = 1 - of_uniform
    return np.divide(share - of_uniform, room, out=np.zeros_like(share), where=room > 1e-6)


# most tokens at a time on a CPU: more tokens need more memory and save no time (csrc/cpu/NOTES.md)
CPU_TOKENS = 1024
_MEANS = ("entropy", "previous", "itself", "following", "own_text", "spread")


def attention_statistics(
    model: PreTrainedModel, examples: Examples, *, batch_tokens: int = BATCH_TOKENS
) -> AttentionStatistics:
    """The statistics of all heads over all examples.

    Args:
        model: an encoder, or a model with a head; see `walk.native` for transformers' models.
        examples: the texts.
        batch_tokens: most tokens that run at a time. It changes the result by rounding only.

    Raises:
        ValueError: naming the argument, what came and what was expected.
    """
    config = model.config
    n, layers = len(examples), len(model.base_model.layer_list())
    shape = n, layers, config.num_attention_heads
    found = {name: np.zeros(shape, np.float32) for name in (*_MEANS, "most_received")}
    to_kind = np.zeros((len(KINDS), *shape), np.float32)
    if model.device.type == "cpu":
        batch_tokens = min(batch_tokens, CPU_TOKENS)
    with at_rest(model), passing_panels(), torch.inference_mode():
        for batch in batches(model, examples, batch_tokens):
            encode(model, batch, _Statistics(examples, batch, found, to_kind))
    number = np.repeat(np.arange(n), examples.lengths)
    kinds = np.stack([np.bincount(number[examples.kinds == k], minlength=n) for k in range(len(KINDS))])
    second = np.bincount(number, weights=examples.segments, minlength=n)
    lengths = examples.lengths
    return AttentionStatistics(
        to_kind=to_kind,
        lengths=lengths,
        share_of_kind=(kinds / lengths).astype(np.float32),
        share_of_text=((second**2 + (lengths - second) ** 2) / lengths**2).astype(np.float32),
        texts=1 + (second > 0).astype(np.int64),
        **found,
    )


class _Statistics(Observer):
    """Fills arrays with what a batch's heads do."""

    def __init__(
        self, examples: Examples, batch: Batch, found: dict[str, np.ndarray], to_kind: np.ndarray
    ) -> None:
        self.batch, self.found, self.to_kind = batch, found, to_kind
        kinds, segments = batch.on_device(examples.kinds), batch.on_device(examples.segments)
        self.second = segments == 1
        groups = [kinds == kind for kind in range(len(KINDS))] + [self.second]
        self.groups = torch.stack(groups, 1).float()
        lengths = batch.lengths[batch.sequence].float()
        seconds = batch.sums(self.second.float())[batch.sequence]
        self.text_lengths = torch.where(self.second, seconds, lengths - seconds)
        self.of_rows = (1 / lengths)[:, None]

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        batch, numbers = self.batch, self.batch.numbers
        masses = probabilities.of_values(self.groups)
        to_second = masses[..., -1]
        entropy = probabilities.entropy()
        rows = {
            "entropy": entropy,
            "previous": probabilities.at_offset(-1),
            "itself": probabilities.at_offset(0),
            "following": probabilities.at_offset(1),
            "own_text": torch.where(self.second[:, None], to_second, 1 - to_second),
            "spread": entropy.exp() / self.text_lengths[:, None],
        }
        means = batch.means(torch.stack(list(rows.values()), -1))
        for i, name in enumerate(rows):
            self.found[name][numbers, layer] = means[..., i].cpu().numpy()
        of_kinds = batch.means(masses[..., :-1])
        self.to_kind[:, numbers, layer] = of_kinds.permute(2, 0, 1).cpu().numpy()
        received = probabilities.received(self.of_rows)[..., 0]
        index = batch.sequence[:, None].expand_as(received)
        most = received.new_zeros(len(batch), received.shape[1]).scatter_reduce_(0, index, received, "amax")
        self.found["most_received"][numbers, layer] = most.cpu().numpy()
