"""The sizes of recorded graphs: how many tokens and sequences each has room for.

There are four buckets per doubling of the tokens: from 32 tokens on, at most a fifth of the rows is padding.
Two sizes follow from a bucket's tokens:
    sequences  one per 8 tokens, at least 8, at most `max_batch` (`sequence_rooms`). A batch of more, shorter
               sequences uses the next bucket that holds them. An absent sequence costs the attention one
               program per head, which returns at once. With room for more than 64 sequences, tiles start in
               the batch's order instead of the longest first; a `max_batch` of 64 avoids that. The pooler
               has one row per sequence, and with `first_token_only` so has most of the last layer.
    longest    as many tokens as the bucket or the model's positions allow. The attention kernel's grid is
               over tokens and sequences, but its tiles are chosen for this length: higher than short
               sequences need. MPNet's bias has longest² elements per head and is made once per replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# The smallest default bucket
_SMALLEST = 32
# The fewest sequences that a bucket holds; also tokens per sequence
_ROOM = 8


class Bucket(NamedTuple):
    """What one graph serves.

    Attributes:
        tokens: the most tokens of a batch.
        first_token_only: whether it returns one row per sequence.
        pooled: whether it computes the pooler's output.
        pins: (op, backend) pairs that `use_backend` had pinned.
    """

    tokens: int
    first_token_only: bool
    pooled: bool
    pins: tuple[tuple[str, str], ...] = ()


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The default buckets, in tokens: 32, then four per doubling; the last one is `max_tokens`."""
    sizes, size = [], _SMALLEST
    while size < max_tokens:
        sizes += [size * quarters // 4 for quarters in (4, 5, 6, 7)]
        size *= 2
    return (*(s for s in sizes if s < max_tokens), max_tokens)


def sequence_rooms(buckets: Sequence[int], max_batch: int) -> tuple[int, ...]:
    """How many sequences each bucket holds: one per 8 tokens, at least 8 and at most `max_batch`.

    The last bucket holds `max_batch` sequences, whatever its size.
    """
    return (*(min(max_batch, max(_ROOM, size // _ROOM)) for size in buckets[:-1]), max_batch)
