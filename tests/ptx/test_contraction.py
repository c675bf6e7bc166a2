"""Products and sums as one fma, as ptxas may make them."""

from __future__ import annotations

import pytest
import torch

from tests.ptx.emulator import Program, library

# (1 + 2**-12)² is 1 + 2**-11 + 2**-24, whose last term rounding takes away.
X, RESIDUE = 1 + 2.0**-12, 2.0**-24


def result(*lines: str, contract: bool = True) -> float:
    """%f9 after the lines; %f1 and %f2 are X, %f3 is their rounded product and %f4 is 0."""
    library.engine()
    body = "\n    ".join(lines)
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 out, .param .f32 x, .param .f32 zero)
{{
    .reg .b64 %rd<2>;
    .reg .f32 %f<10>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [out];
    ld.param.f32 %f1, [x];
    ld.param.f32 %f2, [x];
    ld.param.f32 %f4, [zero];
    mul.rn.f32 %f3, %f1, %f2;
    setp.eq.f32 %p1, %f1, %f2;
    {body}
    st.global.f32 [%rd1], %f9;
    ret;
}}
"""
    out = torch.zeros(1)
    Program(text, contract).launch("kernel", (1,), (1,), [out, X, 0.0])
    return out.item()


PRODUCT = "mul.f32 %f5, %f1, %f2;"
CASES = {
    "product minus sum": ((PRODUCT, "sub.f32 %f9, %f5, %f3;"), RESIDUE),
    "sum minus product": ((PRODUCT, "sub.f32 %f9, %f3, %f5;"), -RESIDUE),
    "product plus sum": (("neg.f32 %f3, %f3;", PRODUCT, "add.f32 %f9, %f3, %f5;"), RESIDUE),
    "a product minus itself": ((PRODUCT, "sub.f32 %f9, %f5, %f5;"), RESIDUE),
    "a rounded product": (("mul.rn.f32 %f5, %f1, %f2;", "sub.f32 %f9, %f5, %f3;"), 0.0),
    "a rounded sum": ((PRODUCT, "sub.rn.f32 %f9, %f5, %f3;"), 0.0),
    "another mode": ((PRODUCT, "sub.ftz.f32 %f9, %f5, %f3;"), 0.0),
    "a factor that is new": ((PRODUCT, "mov.f32 %f2, %f4;", "sub.f32 %f9, %f5, %f3;"), 0.0),
    "a product that is new": ((PRODUCT, "mov.f32 %f5, %f3;", "sub.f32 %f9, %f5, %f3;"), 0.0),
    "a product in its own factor": (
        ("mov.f32 %f5, %f1;", "mul.f32 %f5, %f5, %f2;", "sub.f32 %f9, %f5, %f3;"),
        0.0,
    ),
    "a product of some lanes": (
        ("mov.f32 %f5, %f3;", "@!%p1 " + PRODUCT, "sub.f32 %f9, %f5, %f3;"),
        0.0,
    ),
    "a product before a label": ((PRODUCT, "LATER:", "sub.f32 %f9, %f5, %f3;"), 0.0),
}


@pytest.mark.parametrize(("lines", "expected"), CASES.values(), ids=CASES)
def test_what_is_contracted(lines, expected):
    assert result(*lines) == expected
    assert result(*lines, contract=False) == 0.0


def test_labels_stay_where_they_were():
    """A negation is put in before the label that is jumped to."""
    lines = (PRODUCT, "sub.f32 %f9, %f5, %f3;", "@%p1 bra END;", "mov.f32 %f9, %f4;", "END:")
    assert result(*lines) == RESIDUE
