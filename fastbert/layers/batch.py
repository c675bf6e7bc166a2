"""The packed batch, as every layer of a call reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from fastbert.ops.attention_places import Places
from fastbert.ops.attention_relative import RelativeScores, dense_scores


class Rotary(NamedTuple):
    """By which angles a layer rotates queries and keys; see `positions.py`.

    Attributes:
        theta: the base of the angles.
        factor: the scale of the positions; 1 if they are not scaled.
        trained: the longest text that is not scaled; a longer text has a larger base (dynamic NTK scaling).
            None divides all angles by the factor.
    """

    theta: float
    factor: float = 1.0
    trained: int | None = None


class Relative(NamedTuple):
    """How a layer scores the distance between two tokens; see `disentangled.py`.

    Attributes:
        span: half the rows of the table of distances.
        buckets: the number of buckets of distances, half of them per direction; 0 if each distance has a row.
        farthest: the distance whose bucket is the last one.
        terms: what is scored, of "c2p" (content to position) and "p2c" (position to content).
        shared: whether the layer's own key and query layers project the table.
    """

    span: int
    buckets: int
    farthest: int
    terms: tuple[str, ...]
    shared: bool


class Blocks(NamedTuple):
    """How a layer attends by blocks of tokens; see `block_sparse.py`.

    Attributes:
        size: tokens per block.
        random: how many random blocks a query sees.
        seed: of the random blocks.
        heads: the number of the model's heads, each of which has random blocks of its own.
        positions: the longest text of the model.
    """

    size: int
    random: int
    seed: int
    heads: int
    positions: int

    @property
    def full(self) -> int:
        """The longest text whose tokens see all tokens."""
        return (5 + 2 * self.random) * self.size


class Distances(NamedTuple):
    """The table of distances of one call.

    Attributes:
        rows: (2 · span, hidden), normed.
        sources: the parameters that it is made from; () if it may change while they do not.
    """

    rows: Tensor
    sources: tuple[Tensor, ...]


class Globals(NamedTuple):
    """The global tokens of one call; see `global_tokens.py`.

    Attributes:
        flags: (total,) bool, which tokens are global; on a padded batch (batch, seqlen).
        rows: (count,) int64, the packed rows of the global tokens, ascending. This and what follows is None
            under `torch.compile`, and on a padded batch.
        numbers: (batch, most) int64, the places in `rows` of each sequence's global tokens; `count` where the
            sequence has fewer.
        positions: (batch, most) int64, where each is in its sequence; 0 where the sequence has fewer.
        sequences: (n,) int64, the sequences that have global tokens; None if all have.
        keys: (n tokens,) int64, the packed rows of those sequences; None for all.
        ends: (n + 1,) int32, `cu_seqlens` of those sequences alone.
    """

    flags: Tensor
    rows: Any = None
    numbers: Any = None
    positions: Any = None
    sequences: Any = None
    keys: Any = None
    ends: Any = None


class Sinusoids(NamedTuple):
    """What XLNet's layers score distances and segments by; see `sinusoids.py`.

    Attributes:
        table: (2n, hidden), n >= reach: the sinusoids of the distances from n to 1 - n.
        reach: more than the largest distance of the call.
        index: (batch, S, S) int64: reach less the distance of query and key, which is the row of the scores
            of distances; None if tokens are adjacent.
        segments: (batch, 1, S, S) bool, whether query and key have different token types; None if no types
            are given.
    """

    table: Tensor
    reach: int
    index: Tensor | None
    segments: Tensor | None


# What layers rotate by -> (cosines, sines), each (positions, head_dim / 2); see `positions.py`
Tables = Mapping[Rotary, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PackedBatch:
    """Where the sequences of packed tokens `[total, hidden]` are, and what their attention needs.

    Attributes:
        cu_seqlens, max_seqlen: see `fastbert.layers.packing.Packing`.
        bias: additive attention bias, (batch or 1, nheads or 1, S or 1, S), or None.
        seed: int64 tensor with one element, for all dropout of the call; None if nothing is dropped.
        causal: whether a token sees only tokens up to itself.
        places: where attention's kernels work, or None. `ops.attention_places` makes them once per call for
            this very tensor `cu_seqlens`.
        positions: (total,) int64, the position of each token, for layers that rotate; None if none does.
        tables: what such layers rotate by.
        columns: (batch, S) int64, the padded column of each token, if kept tokens are not adjacent and layers
            have windows or score distances, which count columns; else None.
        relative: scores of distances that all layers share; None if there are none.
        distances: the table of distances, for layers that score them; None if none does.
        lengths: the length of each sequence, for layers that attend by blocks; () under `torch.compile`. None
            if no sequence is long enough for that, or no layer attends by blocks.
        globals: the global tokens; None if no token is global.
        sinusoids: what XLNet's layers need instead of that table; None for other layers.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    bias: Tensor | None = None
    seed: Tensor | None = None
    causal: bool = False
    places: Places | None = None
    positions: Tensor | None = None
    tables: Tables | None = None
    columns: Tensor | None = None
    relative: RelativeScores | None = None
    distances: Distances | None = None
    lengths: tuple[int, ...] | None = None
    globals: Globals | None = None
    sinusoids: Sinusoids | None = None

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias, or scores of distances that all layers share."""
        return self.bias is not None or self.relative is not None

    def dense(self) -> PackedBatch:
        """The batch with the shared scores of distances in its bias."""
        relative, bias = self.relative, self.bias
        if relative is None:
            return self
        like = next(t for t in relative[1:4] if t is not None)
        found = dense_scores(relative, self.cu_seqlens, self.max_seqlen, like)
        return replace(self, bias=found if bias is None else bias + found, relative=None)

    def first_bias(self) -> Tensor | None:
        """The bias of each sequence's first query, with the shared scores of distances."""
        relative = self.relative
        if relative is None or relative.bias is None or relative.positions is not None:
            return self.dense().bias
        middle = relative.columns.shape[0] // 2
        after = relative.columns[middle : middle + self.max_seqlen]
        found = relative.bias.index_select(1, after)[None, :, None]
        return found if self.bias is None else self.bias[:, :, :1] + found

    def fitting_places(self) -> Places | None:
        """`places`, or None if `replace` or a wrapper has put another tensor in place of `cu_seqlens`."""
        places = self.places
        return places if places is not None and places.cu_seqlens is self.cu_seqlens else None
