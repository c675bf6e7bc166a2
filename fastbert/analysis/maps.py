"""Attention maps to look at: for each pattern one head on one short example, and no other map in memory.

A map is a picture of where a head looks, no evidence that the model uses it: `heads.ablate` says what the
model loses without the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis.attention import BLOCK, BOTH, DIAGONAL, PATTERNS, VERTICAL, AttentionStatistics
from fastbert.analysis.examples import Examples
from fastbert.analysis.identities import MAX_BYTES, Probabilities
from fastbert.analysis.walk import at_rest, batches, encode
from fastbert.layers.encoder import Sequences
from fastbert.layers.taps import Taps
from fastbert.models.base import PreTrainedModel

# tokens of an example that is shown, where there is one
SHORT = (8, 24)


@dataclass(frozen=True)
class ExampleMap:
    """The attention of one head on one example.

    Attributes:
        pattern: an index into `attention.PATTERNS`.
        example, layer, head: numbers from 0.
        share: of how many examples the head has this pattern, in (0, 1].
        probabilities: (length, length) float32; a row per token that looks.
    """

    pattern: int
    example: int
    layer: int
    head: int
    share: float
    probabilities: np.ndarray

    @property
    def name(self) -> str:
        """The pattern's, of letters and "-"."""
        return PATTERNS[self.pattern].replace("+", "-")


def example_maps(
    model: PreTrainedModel,
    examples: Examples,
    found: AttentionStatistics,
    *,
    max_bytes: int = MAX_BYTES,
) -> list[ExampleMap]:
    """One map per pattern that a head has on a short example: the clearest one of those that are common.

    Args:
        model: an encoder, or a model with a head.
        examples: the texts.
        found: `attention_statistics` of both.
        max_bytes: most memory of the maps of a layer, which are computed for one example at a time.

    Raises:
        ValueError: the maps of an example take more memory; or an argument is wrong. The message names it.
    """
    made = []
    for pattern in range(len(PATTERNS)):
        place = _clearest(found, pattern)
        if place is None:
            continue
        example, layer, head = place
        taps = _Map(layer, max_bytes)
        with at_rest(model), torch.inference_mode():
            for batch in batches(model, examples.chosen([example])):
                encode(model, batch, taps)
        share = float((found.patterns()[:, layer, head] == pattern).mean())
        made.append(ExampleMap(pattern, example, layer, head, share, taps.maps[head]))
    return made


def _clearest(found: AttentionStatistics, pattern: int) -> tuple[int, int, int] | None:
    """(example, layer, head) of the clearest map of a pattern, or None if no short example has one."""
    lengths = found.lengths
    short = np.flatnonzero((lengths >= SHORT[0]) & (lengths <= SHORT[1]))
    if not len(short):
        # the longest of those that are shorter, or else the shortest
        below = lengths[lengths < SHORT[0]]
        short = np.flatnonzero(lengths == (below.max() if len(below) else lengths.min()))
    v, d, _, u = (values[short] for values in found.features().values())
    clear = {VERTICAL: v, DIAGONAL: d, BOTH: np.minimum(v, d), BLOCK: u}.get(pattern, 1 - np.maximum(v, d))
    has = found.patterns() == pattern
    # of maps that are about as clear, that of a head whose pattern it usually is
    worth = np.where(has[short], clear * has.mean(0), -np.inf)
    if not np.isfinite(worth).any():
        return None
    at, layer, head = np.unravel_index(worth.argmax(), worth.shape)
    return int(short[at]), int(layer), int(head)


class _Map(Taps):
    """Keeps the maps of one layer for the one sequence that is run, (nheads, length, length)."""

    def __init__(self, layer: int, max_bytes: int) -> None:
        self.layer, self.max_bytes = layer, max_bytes
        self.maps = np.zeros((0, 0, 0), np.float32)

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        if layer == self.layer:
            ((_, _, maps),) = Probabilities.of(q, k, sequences, self.max_bytes).maps()
            self.maps = maps[0].float().cpu().numpy()
        return q, k, v, sequences.bias
