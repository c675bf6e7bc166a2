"""The table of places: which tile of which sequence each slot of attention's grid owns.

The contract is in fastbert/ops/attention_places.py, the sizes in kernels/attention_slots.py.

Math       A sequence has ⌈length / height⌉ tiles. `before` = the tiles of all sequences that come first: the
           longer ones, and of equal ones those with a higher number. Its tiles follow without a gap.
Tiling     A program owns BLOCK sequences and one height. It compares them with all others, CHUNK at a time,
           and then writes their places, TILES of each at a time. One more program per height writes the
           places of the tail. No sum crosses programs, so nothing depends on their order.
           Not RANKED: sequence b begins at slot start // height + b, and nothing is compared.
Precision  int32. A length below 0 counts as 0, and no place is written outside its section: on a GPU the
           lengths are not checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastbert.kernels.attention_slots import FIELDS, HEIGHTS, RANKED, sections
from fastbert.kernels.launch import cdiv, launch

_LOWEST = tl.constexpr(HEIGHTS[0])
_FIELDS = tl.constexpr(FIELDS)
_BLOCK = 16
_CHUNK = 128
_TILES = 32


@triton.jit
def _lengths(cu_seqlens_ptr, at, n_sequences):
    """(start, length) of the sequences `at`; the length is 0 from `n_sequences` on."""
    inside = at < n_sequences
    start = tl.load(cu_seqlens_ptr + at, mask=inside, other=0)
    end = tl.load(cu_seqlens_ptr + at + 1, mask=inside, other=0)
    return start, tl.maximum(end - start, 0)


@triton.jit
def _store_places(places_ptr, slot, mask, sequence, start, length, first_row):
    at = places_ptr + slot * _FIELDS
    tl.store(at, sequence, mask=mask)
    tl.store(at + 1, start, mask=mask)
    tl.store(at + 2, length, mask=mask)
    tl.store(at + 3, first_row, mask=mask)


@triton.jit(do_not_specialize=("n_sequences", "second", "third", "fourth", "end"))
def _attention_places_kernel(
    places_ptr, cu_seqlens_ptr, n_sequences, second, third, fourth, end,
    RANKED: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The places of BLOCK sequences in one section, or those of the section's tail."""
    which = tl.program_id(1)
    height = _LOWEST << which
    first = tl.where(which == 0, 0, tl.where(which == 1, second, tl.where(which == 2, third, fourth)))
    last = tl.where(which == 0, second, tl.where(which == 1, third, tl.where(which == 2, fourth, end)))
    places_ptr += first * _FIELDS
    n_slots = last - first
    if tl.program_id(0) == tl.num_programs(0) - 1:
        rows = tl.load(cu_seqlens_ptr + n_sequences)
        used = 0
        if RANKED:
            for other in range(0, n_sequences, CHUNK):
                _, lengths = _lengths(cu_seqlens_ptr, other + tl.arange(0, CHUNK), n_sequences)
                used += tl.sum((lengths + height - 1) // height, 0)
        else:
            used = rows // height + n_sequences
        step = (n_slots - used) * height
        for after in range(used, n_slots, CHUNK):
            at = after + tl.arange(0, CHUNK)
            zeros = tl.zeros((CHUNK,), tl.int32)
            place = zeros + n_sequences, zeros + rows, zeros + step, (at - used) * height
            _store_places(places_ptr, at, at < n_slots, *place)
    else:
        mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        start, length = _lengths(cu_seqlens_ptr, mine, n_sequences)
        if RANKED:
            before = tl.zeros((BLOCK,), tl.int32)
            for other in range(0, n_sequences, CHUNK):
                others = other + tl.arange(0, CHUNK)
                _, lengths = _lengths(cu_seqlens_ptr, others, n_sequences)
                tiles = (lengths + height - 1) // height
                equal = (lengths[None, :] == length[:, None]) & (others[None, :] > mine[:, None])
                ahead = (lengths[None, :] > length[:, None]) | equal
                before += tl.sum(tl.where(ahead, tiles[None, :], 0), 1)
            owned = (length + height - 1) // height
        else:
            before = start // height + mine
            # Up to the slot where the next sequence begins: at most one more than it has tiles.
            owned = tl.where(mine < n_sequences, (start + length) // height + mine + 1 - before, 0)
        for tile in range(0, tl.max(owned, 0), TILES):
            later = owned[:, None] - 1 - (tile + tl.arange(0, TILES))[None, :]
            slot = before[:, None] + tile + tl.arange(0, TILES)[None, :]
            zeros = tl.zeros((BLOCK, TILES), tl.int32)
            mask = (later >= 0) & (slot >= 0) & (slot < n_slots)
            # The last tile comes first: with a causal mask it has the most keys.
            place = zeros + mine[:, None], zeros + start[:, None], zeros + length[:, None], later * height
            _store_places(places_ptr, slot, mask, *place)


def attention_places(cu_seqlens: Tensor, total: int, max_seqlen: int) -> Tensor:
    """The table of `fastbert.ops.attention_places`, made by one kernel."""
    batch = cu_seqlens.shape[0] - 1
    _, *ends = sections(total, batch, max_seqlen)
    # Not ranked, lengths that fall would leave places out: those of no rows are harmless.
    make = torch.empty if batch <= RANKED else torch.zeros
    table = make((ends[-1], FIELDS), dtype=torch.int32, device=cu_seqlens.device)
    launch(
        _attention_places_kernel,
        (cdiv(batch, _BLOCK) + 1, len(HEIGHTS)),
        cu_seqlens.device,
        table,
        cu_seqlens.contiguous(),
        batch,
        *ends,
        RANKED=batch <= RANKED,
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
        TILES=_TILES,
        num_warps=4,
    )
    return table
