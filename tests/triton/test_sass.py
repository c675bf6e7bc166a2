"""The lint of machine code, on listings by hand; test_compile.py runs it on what the compiler makes."""

from __future__ import annotations

import pytest

from tests.support import sass

WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def listing(*instructions: str) -> str:
    """A kernel of these instructions, 0x10 apart."""
    lines = [f"        /*{16 * k:04x}*/                   {i} ;" for k, i in enumerate(instructions)]
    return "\n".join(["\t\tFunction : by_hand", *lines, "        /*fff0*/                   EXIT ;"])


def found(*instructions: str) -> list[tuple[int, str, tuple[str, ...]]]:
    """(instruction's place, what, registers) of each finding."""
    return [(h.line - 2, h.what, h.registers) for h in sass.hazards(listing(*instructions))]


A = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8].tnspB, R24, gsb0"
OPEN = A.removesuffix(", gsb0")
SHARED = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"


@pytest.mark.parametrize(
    ("write", "registers"),
    [
        ("MOV R91, R2", ("R91",)),
        ("@!P3 MOV R88, R2", ("R88",)),
        ("LDS.128 R84, [R2]", None),
        ("LDS.128 R88, [R2]", ("R88", "R89", "R90", "R91")),
        ("LDS.64 R90, [R2+UR4]", ("R90", "R91")),
        ("LDSM.16.M88.4 R88, [R2]", ("R88", "R89", "R90", "R91")),
        ("LDSM.16.MT88.2 R86, [R2]", None),
        ("LDG.E.128.CONSTANT R88, desc[UR4][R2.64]", ("R88", "R89", "R90", "R91")),
        ("ATOMG.E.ADD.STRONG.GPU PT, R89, desc[UR4][R2.64], R6", ("R89",)),
        ("SHFL.BFLY PT, R88, R4, 0x1, 0x1f", ("R88",)),
        ("LOP3.LUT P0, R88, R2, R3, RZ, 0xc0, !PT", ("R88",)),
        ("IADD3 R88, P0, R2, R3, RZ", ("R88",)),
        ("IMAD.WIDE.U32 R86, R2, R3, R4", None),
        ("IMAD.WIDE.U32 R90, R2, R3, R4", ("R90", "R91")),
        ("CS2R R88, SRZ", ("R88", "R89")),
        ("CS2R.32 R87, SRZ", None),
        ("F2F.F64.F32 R90, R2", ("R90", "R91")),
        ("F2F.F32.F64 R87, R2", None),
        ("I2F.U64.RP R91, R2", ("R91",)),
        ("DADD R90, R2, R4", ("R90", "R91")),
        ("HMMA.16816.F32.BF16 R88, R2, R6, R8", ("R88", "R89", "R90", "R91")),
        # stores, addresses, comparisons and moves to other register files read what they name
        ("STS.128 [R88], R88", None),
        ("STG.E.64 desc[UR4][R88.64], R90", None),
        ("LDGSTS.E.BYPASS.128 [R88], desc[UR4][R90.64]", None),
        ("ISETP.GE.AND P0, PT, R88, R89, PT", None),
        ("R2UR UR88, R89", None),
        ("UMOV UR88, 0x1", None),
        ("R2P PR, R88, 0x7f", None),
        ("MOV R92, R88", None),
    ],
)
def test_a_write_of_the_left_operand(write, registers):
    expected = [] if registers is None else [(1, "writes A", registers)]
    assert found(A, write, WAIT) == expected
    assert found(A, WAIT, write) == []
    assert found(write, A, WAIT) == []


def test_what_lies_in_shared_memory_may_be_overwritten():
    assert found(SHARED, "MOV R88, R2", WAIT) == []


def test_paths():
    write = "MOV R88, R2"
    # behind a branch, and on one side of it only
    assert found(A, "@P0 BRA 0x40", WAIT, "BRA 0x60", write, "EXIT", "EXIT") == [(4, "writes A", ("R88",))]
    assert found(A, "@P0 BRA 0x40", WAIT, write, WAIT, "EXIT") == []
    # on the way back, where the wait is missed by one of two paths
    assert found(write, A, "@P0 BRA 0x40", WAIT, "@P1 BRA 0x0") == [(0, "writes A", ("R88",))]
    assert found(write, A, "@P0 BRA 0x50", WAIT, "@P1 BRA 0x0", WAIT) == []
    # what never continues
    assert found(A, "EXIT", write) == []
    assert found(A, "@P0 EXIT", write) == [(2, "writes A", ("R88",))]
    assert found(A, "BRA 0x30", write, WAIT) == []
    assert found(A, "BRA UP0, 0x30", write, WAIT) == [(2, "writes A", ("R88",))]
    assert found(A, "BRA.DIV UR4, 0x30", write, WAIT) == [(2, "writes A", ("R88",))]
    # where threads meet again, calls and returns
    assert found("BSSY B0, 0x50", A, "BSYNC B0", WAIT, "EXIT", write) == [(5, "writes A", ("R88",))]
    assert found("BSSY B1, 0x50", A, "BSYNC B0", WAIT, "EXIT", write) == []
    # a region that ends right behind the BSYNC is the one that it closes
    assert found("BSSY B0, 0x60", "BSSY B0, 0x40", A, "BSYNC B0", WAIT, "EXIT", write) == []
    called = ("CALL.REL.NOINC 0x50", write, WAIT, "EXIT", "NOP", A, "RET.REL.NODEC R20 0x0")
    assert found(*called) == [(1, "writes A", ("R88",))]
    assert found(*called[:-1], WAIT, called[-1]) == []


@pytest.mark.parametrize("jump", ["BRX R4 -0x50", "JMX R4"])
def test_a_jump_to_the_address_in_a_register_may_lead_anywhere(jump):
    write = "MOV R88, R2"
    assert found(write, A, jump, WAIT) == [(0, "writes A", ("R88",))]
    assert found(A, jump, WAIT, "EXIT", write) == [(4, "writes A", ("R88",))]
    assert found(write, A, WAIT, jump) == []


@pytest.mark.parametrize("jump", ["BRA `(.L_x_1)", "BRA 0x7770"])
def test_a_jump_that_cannot_be_followed_is_an_error(jump):
    with pytest.raises(ValueError, match=r"line 3: .*(cannot be seen|no instruction at 0x7770)"):
        found(A, jump, WAIT)


def test_waits():
    write = "MOV R88, R2"
    # a wait under a predicate may not happen, and one for all groups but the last leaves the last
    assert found(A, f"@P0 {WAIT}", write) == [(2, "writes A", ("R88",))]
    assert found(A, WAIT.replace("0x0", "0x1"), write) == [(2, "writes A", ("R88",))]
    other = A.replace("R24", "R120").replace("R88", "R92")
    assert found(A, other, WAIT.replace("0x0", "0x1"), write) == []
    assert found(A, other, WAIT.replace("0x0", "0x1"), "MOV R92, R2") == [(3, "writes A", ("R92",))]
    # products of one group; and one whose group is not closed
    assert found(OPEN, OPEN, A, WAIT, write) == []
    assert found(A, OPEN, WAIT, write) == [(3, "writes A", ("R88",))]
    # a group that one path closes and the other does not
    assert found(OPEN, "@P0 BRA 0x30", other, WAIT, write) == [(4, "writes A", ("R88",))]
    paths = (OPEN, "@P0 BRA 0x40", "NOP", "BRA 0x50", other, WAIT, write)
    assert found(*paths) == [(6, "writes A", ("R88",))]
    # an ordinary scoreboard's barrier is none of products
    assert found(A, "DEPBAR.LE SB0, 0x0", write) == [(2, "writes A", ("R88",))]
    with pytest.raises(ValueError, match=r"line 2: .*barrier gsb1: expected gsb0"):
        found(A.replace("gsb0", "gsb1"), WAIT)


def test_accumulators():
    # R24 to R55 of 64 columns in float32, half as many in float16
    assert found(A, "FADD R2, R55, R3", WAIT) == [(1, "reads accumulators", ("R55",))]
    assert found(A, "FADD R2, R56, R3", WAIT) == []
    assert found(A, "STS.128 [R2], R52", WAIT) == [(1, "reads accumulators", ("R52", "R53", "R54", "R55"))]
    assert found(A, "LDG.E R2, desc[UR4][R54.64]", WAIT) == [(1, "reads accumulators", ("R54", "R55"))]
    assert found(A, "MOV R24, RZ", WAIT) == [(1, "writes accumulators", ("R24",))]
    assert found(A.replace("F32.BF16", "F16"), "MOV R40, RZ", WAIT) == []
    assert found(A.replace("F32.BF16", "F16"), "MOV R39, RZ", WAIT) == [(1, "writes accumulators", ("R39",))]
    # a sum continues in the same registers; not in another shape, and not as a left operand
    assert found(OPEN, A, WAIT) == []
    assert found(SHARED, SHARED, WAIT) == []
    assert [what for _, what, _ in found(SHARED, A, WAIT)] == ["writes accumulators", "reads accumulators"]
    fed = A.replace("R88", "R24").replace("BF16 R24", "BF16 R120").replace(", R24, gsb0", ", R120, gsb0")
    assert found(A, fed, WAIT) == [(1, "reads accumulators", ("R24", "R25", "R26", "R27"))]
    # as a product may overwrite what another still reads
    assert found(A, A.replace("R24", "R64"), WAIT) == [(1, "writes A", ("R88", "R89", "R90", "R91"))]


def test_one_finding_names_the_first_product_and_all_registers():
    first = OPEN.replace("R88", "R86")
    text = listing(first, A.replace("R88", "R90"), "LDS.128 R88, [R2]")
    (hazard,) = sass.hazards(text)
    assert (hazard.kernel, hazard.line, hazard.product_line) == ("by_hand", 4, 2)
    assert hazard.registers == ("R88", "R89", "R90", "R91")
    assert str(hazard) == (
        "by_hand, line 4: LDS.128 R88, [R2]: writes A (R88, R89, R90, R91) before the wait for line 2: "
        + first
    )


def test_kernels_of_one_listing_are_told_apart():
    other = listing("NOP", "NOP", "MOV R88, R2").replace("by_hand", "other")
    text = "\n".join([listing(A, "BRA 0x20", "EXIT"), other, listing(A, WAIT)])
    assert sass.hazards(text) == []


@pytest.mark.parametrize("text", ["", "no listing", "\t\tFunction : empty\n"])
def test_what_is_no_listing_is_an_error(text):
    with pytest.raises(ValueError, match=r"text: expected a listing by `cuobjdump -sass`"):
        sass.hazards(text)
