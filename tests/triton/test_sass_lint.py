"""The lint of machine code sees a register that is touched too early, on every path, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support import sass_lint
from tests.triton.test_compile import ROOT, assert_fit, compiled

# a loop with two products, one that reads R152 … R155; each turn waits at its end
LOOP = """
\t.section\t.text._kernel,"ax",@progbits
        /*0000*/                   MOV R24, RZ ;
.L_x_0:
        /*0010*/                   F2FP.BF16.F32.PACK_AB R152, R25, R26 ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR32], RZ, !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR28].tnspB, R88, gsb0 ;
        /*0040*/                   IADD3 R5, R5, 0x1, RZ ;
        /*0050*/                   ISETP.GE.AND P0, PT, R5, R6, PT ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0070*/               @!P0 BRA `(.L_x_0) ;
        /*0080*/                   FADD R7, R88, R56 ;
        /*0090*/                   EXIT ;
"""
WAIT = "        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"


def planted(*lines: str, behind: str = "/*0040*/", listing: str = LOOP) -> str:
    """The listing with lines behind the one at an address."""
    before, address, after = listing.partition(behind)
    assert address
    end = after.index("\n") + 1
    added = "".join(
        line if line.startswith(".L") else f"        /*0f{i:02}*/   {line}\n" for i, line in enumerate(lines)
    )
    return before + address + after[:end] + added + after[end:]


def what(listing: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(f.what, f.registers) for f in sass_lint.findings(listing)]


def test_a_right_loop():
    assert what(LOOP) == []
    assert sass_lint.products_with_operands_in_registers(LOOP) == 1


@pytest.mark.parametrize(
    ("line", "registers"),
    [
        ("MOV R153, R4 ;", (153,)),
        ("@P3 MOV R155, R4 ;", (155,)),
        ("IMAD.WIDE R152, R4, R5, R6 ;", (152, 153)),
        ("LDS.128 R148, [R4] ;", ()),
        ("LDS.128 R150, [R4+0x10] ;", (152, 153)),
        ("LDG.E.64.CONSTANT R151, desc[UR4][R2.64] ;", (152,)),
        ("LDSM.16.MT88.4 R154, [R4] ;", (154, 155)),
        ("SHFL.BFLY PT, R152, R9, 0x1, 0x1f ;", (152,)),
        ("LOP3.LUT P1, R155, R4, 0x1, RZ, 0xc0, !PT ;", (155,)),
        ("HMMA.16816.F32.BF16 R152, R4, R8, R152 ;", (152, 153, 154, 155)),
        ("CS2R R152, SRZ ;", (152, 153)),
        ("CS2R.32 R155, SR_CLOCKLO ;", (155,)),
        ("MOV R156, R4 ;", ()),
        ("MOV R151, R152 ;", ()),
        ("STS.128 [R4], R152 ;", ()),
        ("STG.E desc[UR4][R2.64], R153 ;", ()),
        ("ISETP.NE.AND P1, PT, R152, RZ, PT ;", ()),
        ("R2UR UR4, R152 ;", ()),
    ],
)
def test_a_write_to_the_operand(line, registers):
    expected = [("operand", registers)] if registers else []
    assert what(planted(line)) == expected
    # after the wait it is nobody's
    assert what(planted(line, behind="/*0060*/")) == []


@pytest.mark.parametrize(
    "line", ["FADD R7, R89, R4 ;", "MOV R100, RZ ;", "STS [R4], R56 ;", "FFMA R56, R4, R5, R6 ;"]
)
def test_an_accumulator(line):
    """Read or written before the wait. The product of R56 is waited for with the group that it belongs to."""
    (finding,) = sass_lint.findings(planted(line))
    assert finding.what == "accumulator"
    assert finding.text == line.removesuffix(" ;")
    assert finding.kernel == "_kernel"
    assert sass_lint.findings(planted(line, behind="/*0060*/")) == []


def test_other_paths_to_a_write():
    """Around the loop without a wait, behind a branch that skips the wait, and behind one that does not."""
    around = LOOP.replace(WAIT, "")
    assert ("operand", (152,)) in what(around)
    skips = planted("@P1 BRA `(.L_x_1) ;").replace("        /*0070*/", ".L_x_1:\n        /*0070*/")
    assert ("operand", (152,)) in what(skips)
    aside = LOOP + ".L_x_2:\n        /*00a0*/   MOV R154, R3 ;\n        /*00b0*/   EXIT ;\n"
    assert what(aside) == []
    assert what(planted("@P1 BRA `(.L_x_2) ;", listing=aside)) == [("operand", (154,))]
    assert what(planted("BRA.DIV ~URZ, `(.L_x_2) ;", listing=aside)) == [("operand", (154,))]
    assert what(planted("@P1 BRA `(.L_x_2) ;", behind="/*0060*/", listing=aside)) == []
    joined = planted("BSSY B0, `(.L_x_2) ;", "@P1 BRA `(.L_x_3) ;", listing=aside)
    joined += ".L_x_3:\n        /*00c0*/   BSYNC B0 ;\n        /*00d0*/   EXIT ;\n"
    assert what(joined) == [("operand", (154,))]


def test_groups_are_waited_for_by_number():
    """The oldest first; products of a group that is not ended are not waited for."""
    two = LOOP.replace(
        "/*0040*/",
        "/*0040*/   HGMMA.64x64x16.F32.BF16 R200, R160, gdesc[UR4], R200, gsb0 ;\n        /*0041*/",
    )
    one_left = two.replace("gsb0, 0x0 ;", "gsb0, 0x1 ;")
    for listing, early in ((two, ()), (one_left, (160,))):
        assert what(planted("MOV R152, R3 ;", behind="/*0060*/", listing=listing)) == []
        found = what(planted("MOV R160, R3 ;", behind="/*0060*/", listing=listing))
        assert ([("operand", early)] if early else []) == [f for f in found if f[0] == "operand"]
    not_ended = LOOP.replace(", R88, gsb0 ;", ", R88 ;")
    assert ("operand", (153,)) in what(planted("MOV R153, R3 ;", behind="/*0060*/", listing=not_ended))


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        ("", "found no instruction"),
        (planted("BRX R2 -0x10 ;"), "BRX goes where the listing does not say"),
        (planted("CALL.REL.NOINC `(_x) ;"), "CALL.REL.NOINC goes where"),
        (planted("BRA `(.L_x_9) ;"), r"no label \.L_x_9"),
    ],
)
def test_listings_that_cannot_be_followed(listing, words):
    with pytest.raises(ValueError, match=words):
        sass_lint.findings(listing)


# --- kernels of ours ----------------------------------------------------------------------------------------

DOCTOR = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tests.support import sass_lint, triton_compile
from fastbert.kernels import attention_backward
listings, listing_of = [], sass_lint.listing_of
sass_lint.listing_of = lambda cubin: listings.append(listing_of(cubin)) or listings[-1]
jobs = (job for job in triton_compile.JOBS["attention_backward"](False) if job[1] == 90 and "saved" in job[0])
rows = list(triton_compile.results(attention_backward, jobs))
for row, listing in zip([r for r in rows if r["register_products"]], listings, strict=True):
    without = "\\n".join(line for line in listing.splitlines() if "WARPGROUP.DEPBAR" not in line)
    lines = {f.line for f in sass_lint.findings(without) if f.what == "operand"}
    print(json.dumps([row["kernel"], row["register_products"], len(row["early"]), len(lines)]))
"""


@pytest.mark.sweep
def test_kernels_without_their_waits_are_flagged():
    """What ptxas made of attention's backward has no finding; without its waits it has."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, str(ROOT)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel for kernel, *_ in rows} == {"_attention_bwd_dq_kernel", "_attention_bwd_dkdv_kernel"}
    for kernel, products, early, without_waits in rows:
        assert products >= 4, kernel
        assert early == 0, kernel
        assert without_waits >= 4, kernel


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_float16_on_hopper(op):
    """bfloat16 is in test_compile.py."""
    rows = compiled(op, "--full", "--arch", "90", "--dtypes", "float16")
    assert any(row["register_products"] for row in rows)
    assert [row for row in rows if row["early"]] == []
    assert {row["arch"] for row in rows} == {90}
    with pytest.raises(AssertionError):  # the gate of test_compile.py has it too
        assert_fit([row | {"early": ["line"]} for row in rows], {row["kernel"] for row in rows})
