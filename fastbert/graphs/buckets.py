"""The sizes of recorded graphs: how many tokens and sequences each has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 32  # smallest default bucket
_ROOM = 8  # fewest sequences that a bucket holds; also tokens per sequence


@dataclass(frozen=True)
class Bucket:
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
