"""Kernels of a few lines through the whole emulator."""

import numpy as np
import pytest
import torch

from tests.ptx.emulator import Program, UnknownForm, run_instruction

HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"
ADD_ONE = (
    HEADER
    + """
.visible .entry add_one(.param .u64 .ptr .global .align 1 x, .param .u32 count, .param .f32 by)
.reqntid 64
{
    .reg .pred %p<2>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<3>;
    ld.param.b64 %rd1, [x];
    ld.param.b32 %r1, [count];
    ld.param.b32 %r5, [by];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.s32 %r2, %r2, 64, %r3;
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra $L__end;
    mad.wide.s32 %rd2, %r2, 4, %rd1;
    ld.global.f32 %r4, [%rd2];
    add.f32 %r4, %r4, %r5;
    st.global.f32 [%rd2], %r4;
$L__end:
    ret;
}
"""
)


@pytest.mark.parametrize("count", (0, 1, 100, 128))
def test_a_kernel_of_elements(count):
    x = torch.arange(128, dtype=torch.float32)
    program = Program(ADD_ONE)
    info = program.kernels["add_one"]
    assert [(p.name, p.type, p.offset) for p in info.parameters] == [
        ("x", "u64", 0),
        ("count", "u32", 8),
        ("by", "f32", 12),
    ]
    assert info.reqntid == (64,)
    program.launch("add_one", (2,), (64,), [x, count, 0.5], seed=count)
    expected = torch.arange(128, dtype=torch.float32)
    expected[:count] += 0.5
    assert torch.equal(x, expected)


def test_an_unknown_form_is_named():
    with pytest.raises(UnknownForm, match=r"add\.f33 \(add_one, line 21\)"):
        Program(ADD_ONE.replace("add.f32 %r4", "add.f33 %r4"))


def test_single_statements():
    lines = [".reg .b32 %r<4>; .reg .pred %p<2>;", "add.s32 %r2, %r1, -5;", "setp.lt.s32 %p1, %r2, 0;"]
    found = run_instruction(lines, {"%r1": range(32)}, ["%r2", "%p1"])
    assert np.array_equal(found["%r2"].view(np.int32), np.arange(32) - 5)
    assert np.array_equal(found["%p1"], np.arange(32) < 5)
