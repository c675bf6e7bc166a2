"""Faults of the kernel that writes the table of attention's places, and of that table's size."""

# ruff: noqa: E501 (a table)

from tests.support.mutation import Fault, Suite

_KERNEL = "kernels/attention_places.py"
_SLOTS = "kernels/attention_slots.py"


def _fault(name: str, old: str, new: str, file: str = _KERNEL) -> Fault:
    return Fault(name, file, old, new)


FAULTS = (
    # the kernel
    _fault("equal lengths share a slot", "& (others[None, :] > mine[:, None])", "& (others[None, :] < 0)"),
    _fault("a sequence ranked before itself", "others[None, :] > mine[:, None]", "others[None, :] >= mine[:, None]"),
    _fault("of equal lengths the first comes first", "others[None, :] > mine[:, None]", "others[None, :] < mine[:, None]"),
    _fault("shortest first", "(lengths[None, :] > length[:, None]) | equal", "(lengths[None, :] < length[:, None]) | equal"),
    _fault("ranked among the first chunk only", "tl.where(ahead, tiles[None, :], 0), 1)", "tl.where(ahead & (other == 0), tiles[None, :], 0), 1)"),
    _fault("part of a tile ranked as none", "tiles = (lengths + height - 1) // height", "tiles = lengths // height"),
    _fault("part of a tile has no place", "owned = (length + height - 1) // height", "owned = length // height"),
    _fault("sequences counted, not tiles", "tl.where(ahead, tiles[None, :], 0)", "tl.where(ahead, 1, 0)"),
    _fault("first tile first", "later * height,", "(owned[:, None] - 1 - later) * height,"),
    _fault("tiles past the first ones have no place", "for tile in range(0, tl.max(owned, 0), TILES):", "for tile in range(0, 1, TILES):"),
    _fault("lengths read past the last sequence", "inside = at < n_sequences\n", "inside = at < n_sequences + 1\n"),
    _fault("a length below 0", "return start, tl.maximum(end - start, 0)", "return start, end - start"),
    _fault("places written past the section", "(later >= 0) & (slot >= 0) & (slot < n_slots)", "(later >= 0) & (slot >= 0)"),
    _fault("places of no tile", "(later >= 0) & (slot >= 0) & (slot < n_slots)", "(slot >= 0) & (slot < n_slots)"),
    _fault("the first block's sequences everywhere", "mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "mine = tl.arange(0, BLOCK)"),
    _fault("a block of sequences too few", "cdiv(batch, _BLOCK) + 1", "batch // _BLOCK + 1"),
    _fault("tail overlaps the last tiles", "for after in range(used, n_slots, CHUNK):", "for after in range(used - 1, n_slots, CHUNK):"),
    _fault("tail of the first chunk only", "at < n_slots,\n", "(at < n_slots) & (after == used),\n"),
    _fault("tail steps by all slots", "step = (n_slots - used) * height", "step = n_slots * height"),
    _fault("tail behind the tiles' rows", "(at - used) * height,", "at * height,"),
    _fault("tail belongs to the last sequence", "zeros + n_sequences,", "zeros + n_sequences - 1,"),
    _fault("used tiles of the last chunk only", "used += tl.sum((lengths", "used = tl.sum((lengths"),
    _fault("sections of one height", "height = _LOWEST << which", "height = _LOWEST << (which // 2)"),
    _fault("in order, one slot for all starts", "before = start // height + mine", "before = start // height"),
    _fault("in order, a slot too few", "mine + 1 - before, 0)", "mine - before, 0)"),
    _fault("in order, places of sequences that are not there", "owned = tl.where(mine < n_sequences, (start", "owned = tl.where(mine >= 0, (start"),
    _fault("tail in order begins too early", "used = rows // height + n_sequences", "used = rows // height"),
    _fault("places left as they were", "make = torch.empty if batch <= RANKED else torch.zeros", "make = torch.empty"),
    _fault("stride of cu_seqlens", "        cu_seqlens.contiguous(),", "        cu_seqlens,"),
    # sizes
    _fault("slots for full tiles only", "most = (total + batch * (height - 1)) // height", "most = total // height", _SLOTS),
    _fault("no slot for the tail", "* batch, most) + 1", "* batch, most)", _SLOTS),
    _fault("in order, no slot for the tail", "found = total // height + batch + 1", "found = total // height + batch", _SLOTS),
    _fault("a plane holds too many slots", "    return -(-n_slots // planes) * planes", "    return n_slots", _SLOTS),
    _fault("as many slots as rows allow", "torch.sym_min(-(-max_seqlen // height) * batch, most)", "torch.sym_min(2**30, most)", _SLOTS),
)  # fmt: skip

# What sees most comes first: a fault costs the tests up to the one that sees it, and a drawn case is shrunk.
TESTS = (
    *(
        f"tests/triton/test_attention_places.py::test_{name}"
        for name in (
            "blocks_chunks_and_tiles",
            "lengths_in_a_strided_or_negative_tensor",
            "a_call_without_a_table_makes_its_own",
            "lengths_that_nobody_checked_write_nothing_elsewhere",
        )
    ),
    "tests/ops/test_attention_places.py::test_no_more_slots_than_tiles_and_one",
)

SUITE = Suite(
    faults=FAULTS,
    tests=TESTS,
    environment={"TRITON_INTERPRET": "1"},
    timeout_s=600.0,
)
