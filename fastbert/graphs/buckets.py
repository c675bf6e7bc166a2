"""The sizes of recorded graphs: how many tokens and sequences each has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SMALLEST = 32  # smallest default bucket
_ROOM = 8  # sequences that each bucket holds, and tokens for each further one


@dataclass(frozen=True)
class Bucket:
    """What one graph serves.

    Attributes:
        tokens: of a batch, at most.
        first_token_only, pooled: what it computes: one row a sequence; the pooler's output.
        pins: the backends that `use_backend` pinned.
    """

    tokens: int
    first_token_only: bool
    pooled: bool
    pins: tuple[tuple[str, str], ...] = ()


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """The default buckets of tokens: 32, and from there four to a doubling, the last one `max_tokens`."""
    sizes, size = [], _SMALLEST
    while size < max_tokens:
        sizes += [size * quarters // 4 for quarters in (4, 5, 6, 7)]
        size *= 2
    return (*(s for s in sizes if s < max_tokens), max_tokens)


def sequence_rooms(buckets: Sequence[int], max_batch: int) -> tuple[int, ...]:
    """How many sequences each bucket of tokens holds: one for 8 tokens and at least 8, but no more than
    `max_batch`, for which the last one has room whatever its size.
    """
    return (*(min(max_batch, max(_ROOM, size // _ROOM)) for size in buckets[:-1]), max_batch)
