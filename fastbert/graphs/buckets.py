"""The sizes of recorded graphs: how many tokens and sequences each has room for.

There are four buckets per doubling of the tokens from 32 tokens on, eight from 2,048 on and sixteen from
8,192 on. So at most a fifth, a ninth or a seventeenth of the rows is padding. Large batches need more
buckets, because their time depends on the rows; the time of small batches depends on the launches. Measured
with four everywhere (H100, BERT-large, 17,178 tokens in a bucket of 20,480): 27.4 ms, without graphs 23.9.
Two sizes follow from a bucket's tokens.
    sequences  one per 8 tokens, at least 8, at most `max_batch` (`sequence_rooms`). A batch of more, shorter
               sequences uses the next bucket that holds them. A batch of long sequences, at least 128 tokens
               each on average, has a graph of its own with less room (`long_room`). An absent sequence costs
               the attention one program per head, which returns at once, and the kernel for compute
               capability 9.0 is for sequences that fill its tiles. With room for more than 64 sequences,
               tiles start in the batch's order instead of the longest first; a `max_batch` of 64 avoids
               that. The pooler has one row per sequence, and so has most of the last layer with
               `first_token_only`.
    longest    as many tokens as the bucket or the model's positions allow. The attention kernel's grid is
               over tokens and sequences, but its tiles are chosen for this length and so are higher than
               short sequences need. MPNet's bias has longest² elements per head and is made once per replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# The smallest default bucket
_SMALLEST = 32
# Tokens from which on -> default buckets per doubling
_PER_DOUBLING = {8192: 16, 2048: 8, 0: 4}
# The fewest sequences that a bucket holds; also tokens per sequence
_ROOM = 8
# Tokens per sequence in graphs for long sequences
_LONG = 128


class Bucket(NamedTuple):
    """What one graph serves.

    Attributes:
        tokens, sequences: the most tokens and sequences of a batch.
        first_token_only: whether the graph returns one row per sequence.
        pooled: whether the graph computes the pooler's output.
        pins: (op, backend) pairs that `use_backend` had pinned.
        autocast: the dtype of autocast in training; None where it is off.
        causal: whether a token sees only tokens up to itself, in training; None for the config's value.
    """

    tokens: int
    sequences: int
    first_token_only: bool
    pooled: bool
    pins: tuple[tuple[str, str], ...] = ()
    autocast: torch.dtype | None = None
    causal: bool | None = None


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The default buckets in tokens: 32, then four to sixteen per doubling; the last is `max_tokens`."""
    sizes, size = [], _SMALLEST
    while size < max_tokens:
        steps = next(steps for least, steps in _PER_DOUBLING.items() if size >= least)
        sizes += [size + size * step // steps for step in range(steps)]
        size *= 2
    return (*(s for s in sizes if s < max_tokens), max_tokens)


def sequence_rooms(buckets: Sequence[int], max_batch: int) -> tuple[int, ...]:
    """How many sequences each bucket holds: one per 8 tokens, at least 8 and at most `max_batch`.

    The last bucket holds `max_batch` sequences, whatever its size.
    """
    return (*(min(max_batch, max(_ROOM, size // _ROOM)) for size in buckets[:-1]), max_batch)


def long_room(tokens: int, room: int) -> int:
    """How many sequences the graph for long sequences holds, in a bucket of `tokens` with room for `room`."""
    return min(room, max(_ROOM, tokens // _LONG))
