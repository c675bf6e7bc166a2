"""Products and sums as one fma, as ptxas may make them."""

from __future__ import annotations

import pytest
import torch

from tests.ptx.emulator import Program
from tests.ptx.texts import kernel

# (1 + 2**-12)² is 1 + 2**-11 + 2**-24, whose last term rounding takes away.
X, RESIDUE = 1 + 2.0**-12, 2.0**-24


def result(*lines: str, contract: bool = True) -> float:
    """%r9 after the lines; %r1 and %r2 are X, %r3 is their rounded product and %r4 is 0."""
    start = """ld.param.u64 %rd1, [out]; ld.param.f32 %r1, [x]; ld.param.f32 %r2, [x]; mov.b32 %r4, 0;
        mul.rn.f32 %r3, %r1, %r2; setp.eq.f32 %p1, %r1, %r2;"""
    body = "\n".join([start, *lines, "st.global.f32 [%rd1], %r9;"])
    out = torch.zeros(1)
    program = Program(kernel(body, ".param .u64 out, .param .f32 x"), contract)
    program.launch("k", (1,), (1,), [out, X])
    return out.item()


PRODUCT = "mul.f32 %r5, %r1, %r2;"
CASES = {
    "product minus sum": ((PRODUCT, "sub.f32 %r9, %r5, %r3;"), RESIDUE),
    "sum minus product": ((PRODUCT, "sub.f32 %r9, %r3, %r5;"), -RESIDUE),
    "product plus sum": (("neg.f32 %r3, %r3;", PRODUCT, "add.f32 %r9, %r3, %r5;"), RESIDUE),
    "a product minus itself": ((PRODUCT, "sub.f32 %r9, %r5, %r5;"), RESIDUE),
    "a rounded product": (("mul.rn.f32 %r5, %r1, %r2;", "sub.f32 %r9, %r5, %r3;"), 0.0),
    "a rounded sum": ((PRODUCT, "sub.rn.f32 %r9, %r5, %r3;"), 0.0),
    "another mode": ((PRODUCT, "sub.ftz.f32 %r9, %r5, %r3;"), 0.0),
    "a factor that is new": ((PRODUCT, "mov.f32 %r2, %r4;", "sub.f32 %r9, %r5, %r3;"), 0.0),
    "a product that is new": ((PRODUCT, "mov.f32 %r5, %r3;", "sub.f32 %r9, %r5, %r3;"), 0.0),
    "its own factor": (("mov.f32 %r5, %r1;", "mul.f32 %r5, %r5, %r2;", "sub.f32 %r9, %r5, %r3;"), 0.0),
    "of some lanes": (("mov.f32 %r5, %r3;", "@!%p1 " + PRODUCT, "sub.f32 %r9, %r5, %r3;"), 0.0),
    "a product before a label": ((PRODUCT, "LATER:", "sub.f32 %r9, %r5, %r3;"), 0.0),
}


@pytest.mark.parametrize(("lines", "expected"), CASES.values(), ids=CASES)
def test_what_is_contracted(lines, expected):
    assert result(*lines) == expected
    assert result(*lines, contract=False) == 0.0


def test_labels_stay_where_they_were():
    """A negation is put in before the label that is jumped to."""
    lines = (PRODUCT, "sub.f32 %r9, %r5, %r3;", "@%p1 bra END;", "mov.f32 %r9, %r4;", "END:")
    assert result(*lines) == RESIDUE
