"""Padded batch <-> packed tokens.

A batch (batch, seqlen) with a mask is packed once per model call. The kept tokens of all sequences follow
one another in `[total, …]`; sequence b has rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`. Any 2-D mask is
legal, also with holes or left padding: the kept tokens are gathered in order.

Under `torch.compile` the host does not know how many tokens are kept unless it waits for the device. So there
the packed layout has room for all batch x seqlen tokens. Kept tokens come first, masked ones after
`cu_seqlens[-1]`. Attention neither reads nor writes the masked rows, and unpacking drops them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.packing import pack, unpack


@dataclass(frozen=True)
class Packing:
    """Which row of the packed layout each token of a padded batch has.

    Attributes:
        batch, seqlen: shape of the padded batch.
        cu_seqlens: (batch + 1,) int32, the first row of each sequence, and the number of kept tokens.
        max_seqlen: an upper bound of the sequence lengths; the longest length if the host knows it.
        indices: (rows,) int64, the flat position in the padded batch of each packed row; None if all tokens
            are kept.
        mask: (batch, seqlen) bool, True = keep; None if all tokens are kept.
        capacity: whether the layout has a row for every padded position; see the module's docstring.
        flat: whether the caller has packed the tokens. Then `pack` and `unpack` change nothing, and `seqlen`
            is `max_seqlen`.
        lengths: the lengths of the sequences, if the host knows them beside `batch` and `seqlen`.
    """

    batch: int
    seqlen: int
    cu_seqlens: Tensor
    max_seqlen: int
    indices: Tensor | None = None
    mask: Tensor | None = None
    capacity: bool = False
    flat: bool = False
    lengths: tuple[int, ...] | None = None

    def known_lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences. If the host does not know them it waits for the device."""
        if self.indices is None and not self.flat:
            return (self.seqlen,) * self.batch
        return tuple(self.cu_seqlens.diff().tolist()) if self.lengths is None else self.lengths

    def pack(self, x: Tensor) -> Tensor:
        """(batch, seqlen, …) -> (rows, …)."""
        if self.flat:
            return x
        if self.indices is None:
            return x.reshape(self.batch * self.seqlen, *x.shape[2:])
        if self.capacity:
            return x.reshape(self.batch * self.seqlen, *x.shape[2:]).index_select(0, self.indices)
        return pack(x, self.indices)

    def unpack(self, x: Tensor) -> Tensor:
        """(rows, …) -> (batch, seqlen, …), zeros at masked tokens."""
        if self.flat:
            return x
        if self.indices is None:
            return x.reshape(self.batch, self.seqlen, *x.shape[1:])
        if self.capacity and self.mask is not None:
            where = torch.empty_like(self.indices)
            where = where.scatter(0, self.indices, torch.arange(where.shape[0], device=where.device))
            padded = x.index_select(0, where).reshape(self.batch, self.seqlen, *x.shape[1:])
            keep = self.mask.reshape(self.batch, self.seqlen, *(1,) * (x.dim() - 1))
            return torch.where(keep, padded, torch.zeros((), dtype=x.dtype, device=x.device))
        return unpack(x, self.indices, self.batch, self.seqlen)

    def grid(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(rows, …) -> ((batch, seqlen, …), which of its tokens are kept), zeros at masked tokens.

        As `unpack`, but it also unpacks tokens that the caller has packed, each sequence from column 0 on.
        """
        if not self.flat:
            return self.unpack(x), self.mask
        sequence, position = positions_of(self.cu_seqlens, x.shape[0])
        kept = torch.arange(self.seqlen, device=x.device) < self.cu_seqlens.diff()[:, None]
        return unpack(x, sequence * self.seqlen + position, self.batch, self.seqlen), kept

    def from_grid(self, x: Tensor) -> Tensor:
        """(batch, seqlen, …), as `grid` makes it, -> (rows, …)."""
        if not self.flat:
            return self.pack(x)
        ends = self.cu_seqlens
        sequence, position = positions_of(ends, int(ends[-1]))
        return pack(x, sequence * self.seqlen + position)

    def first_rows(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (batch, hidden): the token at position 0 of each sequence, zeros if masked."""
        if x.shape[0] == 0:
            # The sum keeps `x` in autograd's graph
            return x.new_zeros(self.batch, x.shape[1]) + x.sum(0)
        return self.keep_first(x.index_select(0, starts(self.cu_seqlens, x.shape[0])))

    def keep_first(self, rows: Tensor) -> Tensor:
        """The rows (batch, hidden) of `starts`, zeros where position 0 is masked or the sequence is empty."""
        kept = self.cu_seqlens.diff() > 0 if self.mask is None else self.mask[:, 0]
        return torch.where(kept.unsqueeze(1), rows, torch.zeros((), dtype=rows.dtype, device=rows.device))

    def chosen(self, numbers: Tensor, lengths: list[int], keeps_longest: bool = False) -> Packing:
        """The packing of some sequences alone, whose tokens follow one another; `seqlen` stays.

        Args:
            numbers: (n,) int64, of the sequences, on the device of the packing.
            lengths: their lengths, n > 0.
            keeps_longest: whether `max_seqlen` stays too, such as beside a bias of that size.
        """
        device = self.cu_seqlens.device
        if self.mask is not None:
            found = from_mask(self.mask.index_select(0, numbers), lengths)
        elif self.flat:
            ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            found = replace(self, batch=len(lengths), cu_seqlens=send(ends, device), max_seqlen=max(lengths))
        else:
            found = dense(len(lengths), self.seqlen, device)
        return replace(found, max_seqlen=self.max_seqlen) if keeps_longest else found

    def to(self, device: torch.device) -> Packing:
        """The packing with its tensors on `device`. The host does not wait (see `send`)."""
        if self.cu_seqlens.device == device:
            return self
        moved = {name: getattr(self, name) for name in ("cu_seqlens", "indices", "mask")}
        return replace(self, **{n: None if t is None else send(t, device) for n, t in moved.items()})

    def unpack_scores(self, scores: Tensor) -> Tensor:
        """Scores between packed positions -> scores between padded ones, zeros at masked tokens.

        (batch, nheads, max_seqlen, max_seqlen) -> (batch, nheads, seqlen, seqlen). Scores of each token by
        itself are (rows, nheads, width) -> (batch, nheads, seqlen, width).
        """
        if scores.dim() == 3:
            return self.grid(scores)[0].transpose(1, 2)
        if self.mask is None:
            return scores
        # How many kept tokens of the sequence come before each padded position
        ranks = self.mask.long().cumsum(1) - self.mask.long()
        ranks = ranks.clamp_max(max(scores.shape[-1] - 1, 0))
        batch = torch.arange(self.batch, device=scores.device)[:, None, None]
        if scores.shape[-1] == 0:
            return scores.new_zeros(self.batch, scores.shape[1], self.seqlen, self.seqlen)
        padded = scores.permute(0, 2, 3, 1)[batch, ranks[:, :, None], ranks[:, None, :]].permute(0, 3, 1, 2)
        keep = (self.mask[:, :, None] & self.mask[:, None, :])[:, None]
        return torch.where(keep, padded, torch.zeros((), dtype=scores.dtype, device=scores.device))

    def pack_scores(self, scores: Tensor) -> Tensor:
        """The inverse of `unpack_scores`."""
        if self.mask is None:
            return scores
        order = torch.argsort(self.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        order = order[:, : self.max_seqlen]
        return scores.take_along_dim(order[:, None, :, None], 2).take_along_dim(order[:, None, None, :], 3)


def dense(batch: int, seqlen: int, device: torch.device) -> Packing:
    """The packing of a batch in which every token is kept."""
    cu_seqlens = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen
    return Packing(batch, seqlen, cu_seqlens, seqlen)


def from_mask(mask: Tensor, lengths: list[int] | None = None) -> Packing:
    """The packing of a batch with a mask.

    Args:
        mask: (batch, seqlen) bool, True = keep.
        lengths: the number of kept tokens per sequence, if the host knows them. Otherwise the host waits for
            a GPU once, to read them back. Not used under `torch.compile`.
    """
    batch, seqlen = mask.shape
    compiling = torch.compiler.is_compiling()
    if lengths is not None and not compiling and sum(lengths) == batch * seqlen:
        return dense(batch, seqlen, mask.device)
    counts = mask.sum(1, dtype=torch.int32)
    cu_seqlens = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    if compiling:
        order = torch.argsort(mask.reshape(-1).logical_not().to(torch.uint8), stable=True)
        return Packing(batch, seqlen, cu_seqlens, seqlen, order, mask, capacity=True)
    if lengths is None:
        lengths = counts.tolist()
    total = sum(lengths)
    if total == batch * seqlen:
        return dense(batch, seqlen, mask.device)
    indices = torch.nonzero_static(mask.reshape(-1), size=total).squeeze(1)
    longest = max(lengths, default=0)
    return Packing(batch, seqlen, cu_seqlens, longest, indices, mask, lengths=tuple(lengths))


def starts(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The packed row of each sequence's first token, of `rows` >= 1 rows: (batch,) int64.

    The row of an empty sequence belongs to another sequence.
    """
    return cu_seqlens[:-1].long().clamp_max(rows - 1)


def positions_of(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(sequence number, position within the sequence) of each packed row, both (total,) int64."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    sequence = torch.repeat_interleave(
        torch.arange(lengths.shape[0], device=cu_seqlens.device), lengths, output_size=total
    )
    return sequence, torch.arange(total, device=cu_seqlens.device) - cu_seqlens[:-1].long()[sequence]


def follows(packing: Packing | None, kept: Tensor | None, x: Tensor) -> Tensor:
    """Whether the token before each token is its neighbour in the same text, (…, tokens) bool.

    Args:
        packing: the places of packed tokens; None for a padded batch.
        kept: (batch, seqlen) bool, which tokens of a padded batch are not masked; None for all.
        x: (…, tokens, width).
    """
    if packing is None:
        if kept is None:
            kept = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
        return kept & F.pad(kept, (1, -1))
    rows = x.shape[0]
    inside = torch.ones(rows + 1, dtype=torch.bool, device=x.device)
    inside = inside.index_fill(0, packing.cu_seqlens.long(), False)[:rows]
    return inside if packing.indices is None else inside & F.pad(packing.indices.diff() == 1, (1, 0))


def with_neighbours(x: Tensor, follows: Tensor) -> Tensor:
    """[next, own, previous] of each token, (…, tokens, 3 · width); zeros for a missing neighbour.

    Args:
        x: (…, tokens, width), in order.
        follows: (…, tokens) bool, whether the neighbour before each token counts.
    """
    if not x.numel():
        # Without tokens there is nothing to shift
        return torch.cat([x, x, x], -1)
    zero, before = x.new_zeros(()), follows.unsqueeze(-1)
    after = F.pad(before, (0, 0, -1, 1))
    return torch.cat(
        [
            torch.where(after, F.pad(x, (0, 0, -1, 1)), zero),
            x,
            torch.where(before, F.pad(x, (0, 0, 1, -1)), zero),
        ],
        -1,
    )


def runs(mask: Tensor) -> Tensor:
    """The number of runs of adjacent kept tokens per sequence, (batch,) int64; more than 1 means holes."""
    return (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]


def send(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host or of `device`, on `device`. The host does not wait for the copy."""
    if t.device == device:
        return t
    # From pageable memory the driver may wait
    if device.type == "cuda":
        t = t.pin_memory()
    return t.to(device, non_blocking=True)
