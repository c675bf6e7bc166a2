"""Tokens that leave between attention and the feed-forward block, because they receive little attention.

After attention a layer keeps the first token of each sequence, and those others that received most; among
equals the earlier. The host knows how many before the layers run, so it waits for no device.

Source: Goyal et al. 2020, "PoWER-BERT: Accelerating BERT Inference via Progressive Word-vector Elimination".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.layers.batch import PackedBatch
from fastbert.layers.packing import send
from fastbert.ops.attention_grid import to_grid


class Kept(NamedTuple):
    """How many tokens of each sequence a layer keeps.

    Attributes:
        cu_seqlens, max_seqlen: of the kept tokens; see `fastbert.layers.packing.Packing`.
        total: the number of kept tokens.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    total: int


_ASKS = {
    "attention_mask": "expected 2-D, got 4-D, which is added to all scores",
    "causal": "expected False, got True, which counts places",
    "output_attentions": "expected False, got True, which shows all probabilities",
    "taps": "expected None, got some, which see whole sequences",
}


def refuse(padded: int | None, asked: Mapping[str, bool]) -> None:
    """Raise a ValueError if tokens may not leave between the layers of a call.

    Args:
        padded: the number of a layer that runs on a padded batch, or None.
        asked: argument -> whether it asks for what needs all tokens.
    """
    if torch.compiler.is_compiling():
        raise ValueError("config token_schedule: expected None under torch.compile, which knows no lengths")
    if padded is not None:
        raise ValueError(
            f"config token_schedule: expected None, as layer {padded} was changed or has hooks, and so runs "
            "on a padded batch"
        )
    for name, what in _ASKS.items():
        if asked[name]:
            raise ValueError(f"{name}: {what}; config token_schedule has tokens leave between the layers")


def count(fraction: float, length: int) -> int:
    """How many of `length` tokens are kept: the fraction of them, rounded up, and at least the first."""
    # A fraction such as 0.1 may lie above the number that was meant
    return max(min(length, 1), math.ceil((fraction - 1e-9) * length))


def kept_of(
    schedule: Sequence[float], lengths: Sequence[int], device: torch.device
) -> tuple[Kept | None, ...]:
    """What each layer keeps; None where it keeps all tokens that reach it.

    Args:
        schedule: the fraction of each sequence's tokens that each layer keeps, not rising.
        lengths: of the sequences, before the first layer.
        device: of the tokens.
    """
    counts = [list(lengths), *([count(fraction, n) for n in lengths] for fraction in schedule)]
    ends = torch.tensor([[0, *accumulate(each)] for each in counts[1:]], dtype=torch.int32)
    rows = send(ends, device)
    return tuple(
        None if each == before else Kept(row, max(each), sum(each))
        for before, each, row in zip(counts, counts[1:], rows, strict=False)
    )


def ranks_of(received: Tensor, batch: PackedBatch) -> Tensor:
    """Each token's rank in its sequence: 0 for the first, then by what it received, among equals the earlier.

    (batch, max_seqlen) int64; cells past a sequence's length rank last. The host waits for no device.

    Args:
        received: (total,), as `fastbert.ops.attention_received` returns it.
        batch: where the sequences are.
    """
    place = torch.arange(batch.max_seqlen, device=received.device)
    grid = to_grid(received, batch.cu_seqlens, batch.max_seqlen).nan_to_num(torch.inf)
    grid = grid.masked_fill(place >= batch.cu_seqlens.diff()[:, None], -1.0)
    order = grid.masked_fill(place == 0, torch.inf).argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(1, order, place.expand_as(order))


def most_received(received: Tensor, batch: PackedBatch, kept: Kept) -> Tensor:
    """The rows of the kept tokens, ascending: (kept.total,) int64. Arguments as of `ranks_of`."""
    chosen = ranks_of(received, batch) < kept.cu_seqlens.diff()[:, None]
    place = torch.arange(batch.max_seqlen, device=received.device)
    rows = batch.cu_seqlens[:-1].long()[:, None] + place
    return rows.flatten()[torch.nonzero_static(chosen.flatten(), size=kept.total).squeeze(1)]


def smaller(batch: PackedBatch, kept: Kept, rows: Tensor) -> PackedBatch:
    """The batch of the kept tokens alone, which keep their positions."""
    positions = None if batch.positions is None else batch.positions.index_select(0, rows)
    return replace(
        batch, cu_seqlens=kept.cu_seqlens, max_seqlen=kept.max_seqlen, places=None, positions=positions
    )


class Eliminated:
    """The tokens that have left the layers of a call, with their last states.

    Nothing is computed before `restored`: between the layers of a call on a CPU, PyTorch's own operations
    have no threads (`fastbert.ops.encoder_layer.open_team`).
    """

    def __init__(self) -> None:
        # The input of each layer that kept fewer tokens, and which of its rows it kept
        self.steps: list[tuple[Tensor, Tensor]] = []

    def restored(self, x: Tensor) -> Tensor:
        """The states of all tokens: (kept, hidden) -> (total, hidden)."""
        if not self.steps:
            return x
        total, device = self.steps[0][0].shape[0], x.device
        there, places, states = torch.arange(total, device=device), [], []
        for before, rows in self.steps:
            left = torch.ones(len(before), dtype=torch.bool, device=device).index_fill(0, rows, False)
            others = torch.nonzero_static(left, size=len(before) - len(rows)).squeeze(1)
            places.append(there.index_select(0, others))
            states.append(before.index_select(0, others))
            there = there.index_select(0, rows)
        found = torch.cat([*states, x])
        return torch.empty_like(found).index_copy(0, torch.cat([*places, there]), found)
