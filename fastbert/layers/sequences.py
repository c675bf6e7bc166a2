"""The packed batch, as the layers of one call get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops.attention_places import Places


class Checked(NamedTuple):
    """What the first layer of a call has checked for those that follow.

    Attributes:
        cu_seqlens, max_seqlen: those of the batch.
        rows, device: of the tokens.
        given, bias: the batch's bias, and as attention's launcher takes it; or None.
        table: of attention's places, or None.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rows: int
    device: torch.device
    given: Tensor | None
    bias: Tensor | None
    table: Tensor | None


@dataclass(frozen=True)
class Sequences:
    """What every layer of one call needs to know about the packed batch.

    Attributes:
        cu_seqlens, max_seqlen: see `fastbert.layers.packing.Packing`.
        bias: additive attention bias, (batch or 1, nheads or 1, S or 1, S), or None.
        seed: int64 tensor with one element, for all dropout of the call; None if nothing is dropped.
        return_probs: whether layers return their attention probabilities too.
        blocks: `fused` -> the result of `ops.encoder_layer.sequence_blocks` for this batch; asked once per
            call.
        scratch: memory that a backend uses for one layer after the other, for panels and results.
        arrivals: the counters of `ops.linear_norm`, once a layer has needed them.
        places: where attention's kernels work, made once per call by `ops.attention_places` for these very
            cu_seqlens, or None.
        checked: what `layers.direct` has checked for one layer after the other.
        causal: whether a token sees only those up to itself.
        taps: a `fastbert.layers.taps.Taps` that sees what the layers compute inside, or None.
        looked_at: whether the caller has just asked each layer for its `gap`, and found none.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    bias: Tensor | None = None
    seed: Tensor | None = None
    return_probs: bool = False
    scratch: list[Tensor] = field(default_factory=list)
    blocks: dict[bool, list[tuple[int, int]]] = field(default_factory=dict)
    arrivals: list[Tensor] = field(default_factory=list)
    places: Places | None = None
    causal: bool = False
    checked: list[Checked] = field(default_factory=list)
    taps: Any = None
    looked_at: bool = False

    def fitting_places(self) -> Places | None:
        """`places`, or None if `replace` or a wrapper has changed the tensor of the lengths since."""
        places = self.places
        return places if places is not None and places.cu_seqlens is self.cu_seqlens else None
