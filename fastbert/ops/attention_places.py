"""The table of places of attention: which rows of which sequence each program of a kernel owns.

A grid is cut before the lengths are known: on a GPU, reading them would be a synchronisation. So each program
has to find its tile of a sequence. It reads the tile from the table, which is made once per forward and
serves every head and layer, forward and backward, of one batch.

A place is four int32 numbers:

    sequence, its first row in the packed layout, its length, the tile's first row in the sequence

The table is (slots, 4). It has a section for each height of a tile (kernels/attention_slots.py), the lowest
first. In a section the longest sequence comes first, so that the last programs to start are short ones; of
equal ones the last comes first. Within a sequence the last tile comes first: with a causal mask it has the
most keys. Slots after the last tile share the rows after the last sequence. Their places are

    number of sequences, the row where the sequences end, rows from tile to tile, first row after that end

More than RANKED sequences are not ranked: sequence b then begins at slot start // height + b of the section,
and may have one place more than it has tiles, first, whose first row is not below the length.

A backend that reads the table makes it, by its function `attention_places(cu_seqlens, total, max_seqlen)`.
Others have none, and ignore it. Where a call has no table, the kernels' launcher makes one for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.runtime import dispatch
from fastbert.runtime.plain import plain


class Places(NamedTuple):
    """A table of places, and what it was made of.

    Attributes:
        table: int32 (slots, 4).
        cu_seqlens, max_seqlen: arguments of the attention calls that the table is for.
    """

    table: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def _sizes() -> ModuleType:
    """kernels/attention_slots.py, loaded where a table is in use: `help(fastbert)` lists what is loaded."""
    from fastbert.kernels import attention_slots

    return attention_slots


def places_ref(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    """The table in plain PyTorch, without a host synchronisation."""
    batch, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.long().diff().clamp(min=0)
    end = cu_seqlens[-1:].long()
    sizes = _sizes()
    first = sizes.sections(total, batch, max_seqlen)
    found = []
    for i, height in enumerate(sizes.HEIGHTS):
        n_slots = first[i + 1] - first[i]
        slot = torch.arange(n_slots, device=device)
        if batch <= sizes.RANKED:
            # stable, so of equal lengths the last comes first
            order = (batch - 1) - lengths.flip(0).argsort(descending=True, stable=True)
            owned = (lengths[order] + height - 1) // height
            ends = owned.cumsum(0)
        else:
            order = torch.arange(batch, device=device)
            ends = (starts + lengths) // height + order + 1
            owned = ends - (starts // height + order)
        used = torch.cat((ends.new_zeros(1), ends))[-1:]
        at = torch.searchsorted(ends, slot, right=True)
        inside = at < batch
        # One more sequence, never read, so that index `batch` exists.
        which = torch.where(inside, at, batch)
        pad = [torch.cat((t, t.new_zeros(1)))[which] for t in (order, starts[order], lengths[order], ends)]
        sequence, start, length, sequence_end = pad
        tail = slot - used
        place = (
            torch.where(inside, sequence, batch),
            torch.where(inside, start, end),
            torch.where(inside, length, (n_slots - used) * height),
            torch.where(inside, sequence_end - 1 - slot, tail) * height,
        )
        found.append(torch.stack(place, 1))
    return torch.cat(found).to(torch.int32)


@torch.library.custom_op("fastbert::attention_places", mutates_args=())
def places_table(cu_seqlens: Tensor, total: int, max_seqlen: int, dtype: torch.dtype) -> Tensor:
    """The table for attention over `total` rows of `dtype`; by `places_ref` where no backend makes one."""
    check_lengths(cu_seqlens, total, max_seqlen)
    make = _maker(cu_seqlens.device, dtype) or places_ref
    return make(plain(cu_seqlens), total, max_seqlen)


@places_table.register_fake
def _(cu_seqlens, total, max_seqlen, dtype):
    return cu_seqlens.new_empty(_shape(cu_seqlens, total, max_seqlen))


def _shape(cu_seqlens: Tensor, total: int, max_seqlen: int) -> tuple[int, int]:
    """The shape of the table."""
    sizes = _sizes()
    return sizes.sections(total, cu_seqlens.shape[0] - 1, max_seqlen)[-1], sizes.FIELDS


def check_lengths(cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Check what a table is made of; the values of the lengths only on the CPU."""
    checks.typed("cu_seqlens", cu_seqlens, torch.int32)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    for name, value in (("total", total), ("max_seqlen", max_seqlen)):
        if not 0 <= value < 2**31:
            raise ValueError(f"{name}: expected a number in [0, 2**31), got {value}")
    longest = checks.lengths(cu_seqlens, total, "the packed layout")
    if longest is not None and longest > max_seqlen:
        raise ValueError(f"max_seqlen: expected at least the longest length {longest}, got {max_seqlen}")


def check_table(table: Tensor | None, cu_seqlens: Tensor, max_seqlen: int, q: Tensor) -> None:
    """Check that a table has the size, dtype and device that kernels read, on the CPU also its values.

    None is legal. On CUDA looking at the values would cost a synchronisation, as with those of cu_seqlens.
    """
    if table is None:
        return
    total = q.shape[0]
    checks.operand("places", table, _shape(cu_seqlens, total, max_seqlen), (torch.int32,), q)
    if table.device.type == "cpu":
        table, cu_seqlens = plain(table), plain(cu_seqlens)
        if not torch.equal(table, places_ref(cu_seqlens, total, max_seqlen)):
            raise ValueError("places: expected the table of these lengths, got other values")


def checked_table(
    places: Places | None, cu_seqlens: Tensor | None, max_seqlen: int | None, q: Tensor
) -> Tensor | None:
    """The table of `places`, which must be made of these lengths."""
    if places is None:
        return None
    if not isinstance(places, Places):
        raise TypeError(f"places: expected what attention_places(…) returns, got {type(places).__name__}")
    if places.cu_seqlens is not cu_seqlens:
        raise ValueError("places: expected those made of this cu_seqlens, got those of another tensor")
    if places.max_seqlen != max_seqlen:
        raise ValueError(f"places: expected those of max_seqlen {max_seqlen}, got of {places.max_seqlen}")
    if not torch.compiler.is_compiling():
        check_table(places.table, places.cu_seqlens, places.max_seqlen, q)
    return places.table


def attention_places(cu_seqlens: Tensor, max_seqlen: int, total: int, dtype: torch.dtype) -> Places | None:
    """The places for all calls of `attention` over one packed batch; None where its backend reads none.

    Args:
        cu_seqlens: int32 (batch + 1,), as in `attention`. Its values must not change afterwards.
        max_seqlen: as in `attention`.
        total: rows of q.
        dtype: q's dtype after autocast.

    Returns:
        Places for `attention(…, places=…)`. Under torch.compile they are made on CUDA only.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    if torch.compiler.is_compiling():
        if cu_seqlens.device.type != "cuda":
            return None
        return Places(places_table(cu_seqlens, total, max_seqlen, dtype), cu_seqlens, max_seqlen)
    make = _maker(cu_seqlens.device, dtype)
    if make is None:
        return None
    check_lengths(cu_seqlens, total, max_seqlen)
    return Places(make(plain(cu_seqlens), total, max_seqlen), cu_seqlens, max_seqlen)


def _maker(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor, int, int], Tensor] | None:
    """`attention_places` of the backend that serves attention, with gradients on in training; or None."""
    call = "attention training" if torch.is_grad_enabled() else "attention"
    return dispatch.serving_function("attention_places", (call,), device, dtype)
