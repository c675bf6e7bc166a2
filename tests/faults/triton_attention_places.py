"""Faults of the kernel that writes the table of attention's places, and of that table's size."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import faults_of, interpreted

_KERNEL = "kernels/attention_places.py"
_SLOTS = "kernels/attention_slots.py"
_fault = faults_of(_KERNEL)

FAULTS = (
    # the kernel
    _fault("a sequence ranked before itself", "others[None, :] > mine[:, None]", "others[None, :] >= mine[:, None]"),
    _fault("equal lengths share a slot", "& (others[None, :] > mine[:, None])", "& (others[None, :] < 0)"),
    _fault("shortest first", "(lengths[None, :] > length[:, None]) | equal", "(lengths[None, :] < length[:, None]) | equal"),
    _fault("ranked among the first chunk only", "tl.where(ahead, tiles[None, :], 0), 1)", "tl.where(ahead & (other == 0), tiles[None, :], 0), 1)"),
    _fault("part of a tile has no place", "owned = (length + height - 1) // height", "owned = length // height"),
    _fault("sequences counted, not tiles", "tl.where(ahead, tiles[None, :], 0)", "tl.where(ahead, 1, 0)"),
    _fault("tiles past the first ones have no place", "for tile in range(0, tl.max(owned, 0), TILES):", "for tile in range(0, 1, TILES):"),
    _fault("lengths read past the last sequence", "inside = at < n_sequences\n", "inside = at < n_sequences + 1\n"),
    _fault("a length below 0", "return start, tl.maximum(end - start, 0)", "return start, end - start"),
    _fault("places written past the section", "(later >= 0) & (slot >= 0) & (slot < n_slots)", "(later >= 0) & (slot >= 0)"),
    _fault("the first block's sequences everywhere", "mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mine = tl.arange(0, BLOCK)"),
    _fault("a block of sequences too few", "cdiv(batch, _BLOCK) + 1", "batch // _BLOCK + 1"),
    _fault("tail overlaps the last tiles", "for after in range(used, n_slots, CHUNK):", "for after in range(used - 1, n_slots, CHUNK):"),
    _fault("tail behind the tiles' rows", "(at - used) * height\n", "at * height\n"),
    _fault("tail belongs to the last sequence", "zeros + n_sequences,", "zeros + n_sequences - 1,"),
    _fault("sections of one height", "height = _LOWEST << which", "height = _LOWEST << (which // 2)"),
    _fault("in order, one slot for all starts", "before = start // height + mine", "before = start // height"),
    _fault("tail in order begins too early", "used = rows // height + n_sequences", "used = rows // height"),
    _fault("places left as they were", "make = torch.empty if batch <= RANKED else torch.zeros", "make = torch.empty"),
    _fault("stride of cu_seqlens", "        cu_seqlens.contiguous(),", "        cu_seqlens,"),
    # sizes
    _fault("no slot for the tail", "* batch, most) + 1", "* batch, most)", _SLOTS),
    _fault("a plane holds too many slots", "    return -(-n_slots // planes) * planes", "    return n_slots", _SLOTS),
)  # fmt: skip

SUITE = interpreted(
    FAULTS,
    "tests/triton/test_attention_places.py",
    "tests/ops/test_attention_places.py::test_no_more_slots_than_tiles_and_one",
)
