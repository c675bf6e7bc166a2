"""Control flow, scopes, special registers and spaces of memory, in kernels written by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from tests.ptx.emulator import OutOfBounds, Program, UnknownForm
from tests.ptx.texts import kernel

# %r1 is the thread, and %r9 goes to y.
START = "ld.param.u64 %rd1, [y]; mov.u32 %r1, %tid.x; mad.wide.u32 %rd2, %r1, 4, %rd1;"
END = "$L__store: st.global.u32 [%rd2], %r9;"


def written(body: str) -> Program:
    return Program(kernel(f"{START}\n{body}\n{END}", ".param .u64 y"))


def run(body: str, threads=(32,), blocks=(1,), seed: int = 0) -> list[int]:
    """%r9 of each thread of the last block that ran."""
    y = torch.full((128,), -1, dtype=torch.int32)
    written(body).launch("k", blocks, threads, [y], seed=seed, check_overlap=False)
    return y.tolist()[: int(np.prod(threads))]


# --- branches -----------------------------------------------------------------------------------------------


def test_lanes_leave_a_loop_one_by_one():
    """Each lane counts to its own number; all are together again afterwards, as a shuffle shows."""
    counted = run(
        """mov.u32 %r9, 0;
    $L__loop:
        setp.ge.u32 %p1, %r9, %r1;
        @%p1 bra $L__out;
        add.u32 %r9, %r9, 1;
        bra.uni $L__loop;
    $L__out:
        shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;"""
    )
    assert counted == [i ^ 1 for i in range(32)]


def test_both_sides_of_a_branch():
    """And a guard that is negated; the sides meet before the barrier."""
    found = run(
        """and.b32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 0;
        @!%p1 bra $L__other;
        mov.u32 %r9, 100; bra $L__met;
    $L__other:
        mov.u32 %r9, 200;
    $L__met:
        bar.sync 0;
        @%p1 add.u32 %r9, %r9, %r1; @!%p1 sub.u32 %r9, %r9, %r1;""",
        threads=(64,),
    )
    assert found == [100 + i if i % 4 == 0 else 200 - i for i in range(64)]


def test_some_lanes_return_early():
    body = "mov.u32 %r9, 5; setp.lt.u32 %p1, %r1, 7; @%p1 ret; vote.sync.ballot.b32 %r9, -1, 0xffffff80;"
    assert run(body, threads=(32,)) == [-1] * 7 + [-(2**7)] * 25


def test_registers_of_a_scope_hide_others():
    found = run(
        "mov.u32 %r9, 7; { .reg .b32 %r9, local; mov.u32 %r9, 8; mov.u32 local, %r9; } add.u32 %r9, %r9, %r1;"
    )
    assert found == [7 + i for i in range(32)]


def test_comparisons_with_two_results_and_a_further_predicate():
    found = run(
        """setp.lt.u32 %p1|%p2, %r1, 8; setp.ge.u32 %p3, %r1, 4;
        setp.lt.and.u32 %p4|%p5, %r1, 12, %p3; setp.eq.or.u32 %p6, %r1, 31, !%p3;
        selp.u32 %r9, 1, 0, %p1; selp.u32 %r2, 2, 0, %p2; add.u32 %r9, %r9, %r2;
        selp.u32 %r2, 4, 0, %p4; add.u32 %r9, %r9, %r2; selp.u32 %r2, 8, 0, %p5; add.u32 %r9, %r9, %r2;
        selp.u32 %r2, 16, 0, %p6; add.u32 %r9, %r9, %r2;"""
    )
    expected = [
        (1 if i < 8 else 2) + 4 * (4 <= i < 12) + 8 * (i >= 12) + 16 * (i == 31 or i < 4) for i in range(32)
    ]
    assert found == expected


# --- threads and blocks -------------------------------------------------------------------------------------


def test_threads_of_three_axes():
    body = """mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z; mov.u32 %r4, %warpid; mov.u32 %r5, %laneid;
        mad.lo.u32 %r6, %r4, 32, %r5; mad.wide.u32 %rd2, %r6, 4, %rd1;
        shl.b32 %r2, %r2, 8; shl.b32 %r3, %r3, 16; or.b32 %r9, %r1, %r2; or.b32 %r9, %r9, %r3;"""
    found = run(body, threads=(5, 3, 4))
    assert found == [x | y << 8 | z << 16 for z in range(4) for y in range(3) for x in range(5)]


def test_blocks_of_three_axes():
    body = """mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %ctaid.z;
        mov.u32 %r5, %nctaid.x; mov.u32 %r6, %nctaid.y; mad.lo.u32 %r7, %r4, %r6, %r3;
        mad.lo.u32 %r7, %r7, %r5, %r2; mad.wide.u32 %rd2, %r7, 4, %rd1; mad.lo.u32 %r9, %r7, 10, %r1;"""
    y = torch.full((24,), -1, dtype=torch.int32)
    written(body).launch("k", (4, 3, 2), (1,), [y], seed=5)
    assert y.tolist() == [10 * i for i in range(24)]


def test_the_order_of_blocks_is_the_seeds():
    """Each block draws a number as it begins."""
    body = """atom.global.add.u32 %r9, [%rd1], 1; mov.u32 %r2, %ctaid.x; add.u32 %r2, %r2, 1;
        mad.wide.u32 %rd2, %r2, 4, %rd1;"""
    program = written(body)
    orders = set()
    for seed in range(8):
        y = torch.zeros(7, dtype=torch.int32)
        program.launch("k", (6,), (1,), [y], seed=seed)
        assert sorted(y.tolist()[1:]) == list(range(6))
        orders.add(tuple(y.tolist()))
    assert len(orders) > 4


# --- memory -------------------------------------------------------------------------------------------------


def test_memory_of_a_thread():
    """With an array in local memory that is indexed, by local and by generic addresses."""
    found = run(
        """.local .align 8 .b8 depot[32]; .reg .b64 %SP, %SPL;
        mov.u64 %SPL, depot; cvta.local.u64 %SP, %SPL;
        st.local.u32 [%SPL+4], %r1; st.u32 [%SP+8], %r1; ld.u32 %r2, [%SP+4]; ld.local.u32 %r3, [%SPL+8];
        add.u32 %r9, %r2, %r3;"""
    )
    assert found == [2 * i for i in range(32)]


def test_generic_addresses_of_every_space():
    found = run(
        """.shared .align 4 .b8 first[12]; .shared .align 16 .b8 smem[256];
        mov.u32 %r2, smem; mad.lo.u32 %r2, %r1, 4, %r2; cvt.u64.u32 %rd3, %r2; cvta.shared.u64 %rd4, %rd3;
        st.u32 [%rd4], %r1; ld.shared.u32 %r3, [%r2]; st.u32 [%rd2], %r3; ld.global.u32 %r4, [%rd2];
        cvta.to.shared.u64 %rd5, %rd4; cvt.u32.u64 %r5, %rd5; sub.u32 %r5, %r5, %r2; add.u32 %r9, %r4, %r5;
        mov.u32 %r8, smem; and.b32 %r8, %r8, 15; add.u32 %r9, %r9, %r8;"""
    )
    assert found == list(range(32))


def test_a_struct_among_the_parameters():
    text = kernel(
        """ld.param.u64 %rd1, [y]; ld.param.u8 %h1, [a]; cvt.u32.u16 %r1, %h1; ld.param.u32 %r2, [s+4];
        mov.b64 %rd2, s; ld.param.v2.u32 {%r3, %r4}, [%rd2+16]; cvta.param.u64 %rd3, %rd2;
        ld.u32 %r5, [%rd3+8];
        st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.u32 [%rd1+16], %r5;""",
        ".param .u8 a, .param .align 8 .b8 s[24], .param .u64 y",
    )
    struct_bytes = struct.pack("<6I", 1, 2, 3, 4, 5, 6)
    for by_block in (False, True):
        y = torch.zeros(8, dtype=torch.int32)
        program = Program(text)
        assert [(p.name, p.offset, p.size) for p in program.kernels["k"].parameters] == [
            ("a", 0, 1),
            ("s", 8, 24),
            ("y", 32, 8),
        ]
        if by_block:
            block = struct.pack("<B7x", 77) + struct_bytes + struct.pack("<Q", y.data_ptr())
            program.launch("k", (1,), (1,), parameters=block, memory=[y])
        else:
            program.launch("k", (1,), (1,), [77, struct_bytes, y])
        assert y.tolist()[:5] == [77, 2, 5, 6, 3]


def test_a_view_may_touch_its_storage_and_no_more():
    y = torch.full((128,), -1, dtype=torch.int32)
    program = written("mov.u32 %r9, 1;")
    program.launch("k", (1,), (32,), [y[64:]])
    assert y.tolist() == [-1] * 64 + [1] * 32 + [-1] * 32
    with pytest.raises(OutOfBounds):
        program.launch("k", (1,), (64,), [y[96:]])


def test_dynamic_shared_memory_follows_the_static():
    body = """.shared .align 4 .b8 fixed[20]; mov.u32 %r2, fixed; mov.u32 %r3, dynamic; sub.u32 %r4, %r3, %r2;
        mad.lo.u32 %r5, %r1, 4, %r3; st.shared.u32 [%r5], %r1; st.shared.u32 [%r2+16], %r4; bar.sync 0;
        ld.shared.u32 %r6, [%r2+16]; ld.shared.u32 %r7, [%r5]; mad.lo.u32 %r9, %r6, 100, %r7;"""
    y = torch.zeros(32, dtype=torch.int32)
    text = kernel(f"{START}\n{body}\n{END}", ".param .u64 y")
    program = Program(text.replace(".visible", ".extern .shared .align 16 .b8 dynamic[];\n.visible"))
    assert program.kernels["k"].shared_bytes == 32
    program.launch("k", (1,), (32,), [y], shared_bytes=128)
    assert y.tolist() == [3200 + i for i in range(32)]
    with pytest.raises(OutOfBounds):
        program.launch("k", (1,), (32,), [y], shared_bytes=124)


# --- text ---------------------------------------------------------------------------------------------------


def test_an_unknown_form_is_named():
    unknown, line = "add.f33 %r9, %r1, %r1;", r"add\.f33 \(k, line {}\)"
    with pytest.raises(UnknownForm, match=line.format(13)):
        written(unknown)
    # A statement of several lines counts them, and so does a comment.
    with pytest.raises(UnknownForm, match=line.format(18)):
        written(f"mov.u32\n%r2,\n%ctaid.x; /* a\n\ncomment */\n{unknown}")
