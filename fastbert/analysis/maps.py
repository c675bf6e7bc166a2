"""Attention maps themselves: all maps of one example; and for each pattern one head on one short example.

A map shows where a head looks. It is no evidence that the model uses it; `heads.ablate` measures what the
model loses without the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fastbert.analysis.attention import BLOCK, BOTH, DIAGONAL, PATTERNS, VERTICAL, AttentionStatistics
from fastbert.analysis.identities import MAX_BYTES, Observer, Probabilities, check_bytes
from fastbert.analysis.walk import at_rest, batches, encode
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

# fewest and most tokens of an example to show, if there is one
SHORT = (8, 24)


@dataclass(frozen=True)
class ExampleMap:
    """The attention of one head on one example.

    Attributes:
        pattern: an index into `attention.PATTERNS`.
        example, layer, head: numbers from 0.
        share: share of the examples on which the head has this pattern, in (0, 1].
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
        """The pattern's name, of letters and "-"."""
        return PATTERNS[self.pattern].replace("+", "-")


def attention_maps(
    model: PreTrainedModel,
    examples: Examples,
    number: int,
    *,
    layers: Sequence[int] | None = None,
    max_bytes: int = MAX_BYTES,
) -> np.ndarray:
    """The attention maps of one example, a row per token that looks.

    bertviz's `head_view` takes them as `list(torch.from_numpy(maps)[:, None])`.

    Args:
        model: an encoder, or a model with a head.
        examples: the texts.
        number: number of the example.
        layers: numbers of the layers, from 0; None: all.
        max_bytes: most memory of the result.

    Returns:
        (len(layers), nheads, length, length) float32.

    Raises:
        ValueError: the maps take more memory, or an argument is wrong; the message names the argument.
    """
    count = len(model.base_model.layer_list())
    layers = list(range(count)) if layers is None else list(layers)
    if not 0 <= number < len(examples):
        raise ValueError(f"number: expected 0 to {len(examples) - 1}, an example's, got {number!r}")
    unknown = next((layer for layer in layers if layer not in range(count)), None)
    if unknown is not None or len(set(layers)) != len(layers):
        raise ValueError(f"layers: expected each of 0 to {count - 1} at most once, got {layers}")
    length = int(examples.lengths[number])
    needed = len(layers) * model.config.num_attention_heads * length * length * 4
    if needed > max_bytes:
        raise ValueError(
            f"max_bytes: {max_bytes:,} are too few for the attention maps of {len(layers)} layers and "
            f"{length} tokens, {needed:,} bytes; expected fewer layers, or more bytes"
        )
    taps = _Maps(layers, max_bytes)
    with at_rest(model), torch.inference_mode():
        for batch in batches(model, examples.chosen([number])):
            encode(model, batch, taps)
    return np.stack([taps.maps[layer] for layer in layers])


def example_maps(
    model: PreTrainedModel, examples: Examples, found: AttentionStatistics, *, max_bytes: int = MAX_BYTES
) -> list[ExampleMap]:
    """One map per pattern that a head has on a short example: a clear one, of a head that often has it.

    Args:
        model: an encoder, or a model with a head.
        examples: the texts.
        found: `attention_statistics` of the model and the examples.
        max_bytes: most memory of the maps of a layer, which are computed for one example at a time.

    Raises:
        ValueError: the maps take more memory, or an argument is wrong; the message names the argument.
    """
    check_example_maps(model, found.lengths, max_bytes)
    made = []
    for pattern in range(len(PATTERNS)):
        place = _clearest(found, pattern)
        if place is None:
            continue
        example, layer, head = place
        (maps,) = attention_maps(model, examples, example, layers=[layer], max_bytes=max_bytes)
        share = float((found.patterns()[:, layer, head] == pattern).mean())
        made.append(ExampleMap(pattern, example, layer, head, share, maps[head]))
    return made


def check_example_maps(model: PreTrainedModel, lengths: np.ndarray, max_bytes: int) -> None:
    """Raise a ValueError if the maps of an example that may be shown exceed `max_bytes`."""
    check_bytes(max_bytes, int(lengths[_short(lengths)].max()), model.config.num_attention_heads * 4)


def _short(lengths: np.ndarray) -> np.ndarray:
    """The numbers of the examples that may be shown."""
    short = np.flatnonzero((lengths >= SHORT[0]) & (lengths <= SHORT[1]))
    if len(short):
        return short
    # the longest example below the range, or else the shortest of all
    below = lengths[lengths < SHORT[0]]
    return np.flatnonzero(lengths == (below.max() if len(below) else lengths.min()))


def _clearest(found: AttentionStatistics, pattern: int) -> tuple[int, int, int] | None:
    """(example, layer, head) of the clearest map of a pattern, or None if no short example has one."""
    short = _short(found.lengths)
    v, d, _, u = (values[short] for values in found.features().values())
    clear = {VERTICAL: v, DIAGONAL: d, BOTH: np.minimum(v, d), BLOCK: u}.get(pattern, 1 - np.maximum(v, d))
    has = found.patterns() == pattern
    # among about equally clear maps it prefers a head that usually has the pattern
    worth = np.where(has[short], clear * has.mean(0), -np.inf)
    if not np.isfinite(worth).any():
        return None
    at, layer, head = np.unravel_index(worth.argmax(), worth.shape)
    return int(short[at]), int(layer), int(head)


class _Maps(Observer):
    """Keeps the maps of some layers for the one sequence that is run, (nheads, length, length) each."""

    def __init__(self, layers: Sequence[int], max_bytes: int) -> None:
        self.layers, self.max_bytes = set(layers), max_bytes
        self.maps: dict[int, np.ndarray] = {}

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """See `Observer`."""
        if layer in self.layers:
            ((_, _, maps),) = probabilities.maps()
            self.maps[layer] = maps[0].float().cpu().numpy()
