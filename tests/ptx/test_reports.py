"""Each report: a kernel of a few lines that has the defect, and one without it that passes."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ptx.emulator import (
    BlockOverlap,
    Deadlock,
    DivergentBarrier,
    EarlyAccess,
    Misaligned,
    OutOfBounds,
    Program,
    SharedRace,
    UninitialisedRead,
)
from tests.ptx.texts import kernel

START = """
ld.param.u64 %rd1, [x];
ld.param.u64 %rd2, [y];
mov.u32 %r1, %tid.x;
mov.u32 %r2, memory;
mad.lo.s32 %r3, %r1, 4, %r2;           // this thread's word of shared memory
mad.wide.u32 %rd3, %r1, 4, %rd1;       // of x
mad.wide.u32 %rd4, %r1, 4, %rd2;       // of y
"""
# The word of a thread of the other warp.
OTHER = "xor.b32 %r4, %r1, 32;  mad.lo.s32 %r4, %r4, 4, %r2;"


def run(body: str, threads: int = 64, blocks: int = 1, schedule: str = "late", seed: int = 0, **options):
    """x = 0, 1, …, 63 and y, of 64 numbers, after the kernel."""
    x, y = torch.arange(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    program = Program(kernel(START + body, shared=1024))
    program.launch("k", (blocks,), (threads,), [x, y], schedule=schedule, seed=seed, **options)
    return y


def both(error, defect: str, sound: str, **options) -> None:
    """The first body raises, whatever the order of warps; the second does not."""
    for seed in range(5):
        run(sound, seed=seed, **options)
        with pytest.raises(error) as raised:
            run(defect, seed=seed, **options)
        assert f"seed {seed}" in str(raised.value)


def test_a_report_says_where():
    with pytest.raises(OutOfBounds) as raised:
        run("setp.lt.u32 %p1, %r1, 62; @%p1 bra $L__end; ld.global.u32 %r5, [%rd3+8]; $L__end:", seed=7)
    text = str(raised.value)
    assert "kernel k" in text
    assert "ld.global.u32 %r5, [%rd3+8]" in text
    assert re.search(r"line 20: .*block \(0, 0, 0\), warp 1, lanes \[30\], address 0x[0-9a-f]+; seed 7", text)


UNWRITTEN, STORE = UninitialisedRead, "st.global.u32 [%rd4], %r5;"
PART, MINE = "setp.lt.u32 %p1, %r1, HERE;", "st.shared.u32 [%r3], %r1;"
# what is wrong -> (report, statements, what replaces HERE: with the defect, and without it)
TWINS = {
    "a register never written": (UNWRITTEN, f"HERE add.s32 %r5, %r6, 1; {STORE}", "", "mov.u32 %r6, 0;"),
    "a register that some lanes never wrote": (
        *(UNWRITTEN, f"setp.lt.u32 %p1, %r1, 40; HERE @%p1 mov.u32 %r5, 3; {STORE}"),
        *("", "mov.u32 %r5, 0;"),
    ),
    "a predicate": (UNWRITTEN, "HERE @%p3 mov.u32 %r5, 1;", "", "setp.eq.s32 %p3, %r1, 0;"),
    "shared memory": (UNWRITTEN, "HERE ld.shared.u32 %r5, [%r3];", "", "st.shared.u32 [%r3], %r1;"),
    "a byte of shared memory": (
        *(UNWRITTEN, "cvt.u16.u32 %h1, %r1; st.shared.u16 [%r3], %h1; HERE ld.shared.u32 %r5, [%r3];"),
        *("", "st.shared.u16 [%r3+2], %h1;"),
    ),
    "a load past the end": (OutOfBounds, "ld.global.u32 %r5, [%rd3+HERE];", "4", "0"),
    "a store past the end": (OutOfBounds, "st.global.u32 [%rd4+HERE], %r1;", "4", "0"),
    "a store before the start": (OutOfBounds, "st.global.u32 [%rd4+HERE], %r1;", "-4", "0"),
    "an update past the end": (OutOfBounds, "red.global.add.u32 [%rd4+HERE], %r1;", "4", "0"),
    "past shared memory": (OutOfBounds, "st.shared.u32 [%r3+HERE], %r1;", "772", "768"),
    "past local memory": (
        *(OutOfBounds, ".local .align 4 .b8 depot[16]; mov.u32 %r5, depot; st.local.u32 [%r5+HERE], %r1;"),
        *("16", "12"),
    ),
    "a misaligned load": (Misaligned, "ld.global.u32 %r5, [%rd1+HERE];", "2", "4"),
    "a misaligned vector": (Misaligned, "ld.global.v2.u32 {%r5, %r6}, [%rd1+HERE];", "4", "8"),
    "a misaligned store": (Misaligned, "st.shared.u32 [%r3+HERE], %r1;", "2", "0"),
    "a misaligned copy": (
        *(Misaligned, "setp.eq.u32 %p1, %r1, 0; @%p1 cp.async.ca.shared.global [%r2], [%rd1+HERE], 8;"),
        *("4", "8"),
    ),
    "a write of what another warp reads": (
        *(SharedRace, f"{OTHER} {MINE} bar.sync 0; ld.shared.u32 %r5, [%r4]; HERE st.shared.u32 [%r3], %r5;"),
        *("", "bar.sync 0;"),
    ),
    # warps that hold copies of one value may all store it
    "two writes": (SharedRace, "mov.u32 %r5, 7; st.shared.u32 [%r2], HERE; bar.sync 0;", "%r1", "%r5"),
    "a barrier for some threads of a warp": (DivergentBarrier, f"{PART} @%p1 bar.sync 0;", "40", "64"),
    "a warp barrier without some": (
        *(DivergentBarrier, "setp.lt.u32 %p1, %r1, 40; @%p1 bra $L__over; HERE"),
        *("bar.warp.sync -1; $L__over:", "mov.u32 %r5, 1; $L__over: bar.warp.sync -1;"),
    ),
    "a shuffle without some": (
        *(DivergentBarrier, f"{PART} @%p1 bra $L__over; shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; $L__over:"),
        *("40", "32"),
    ),
    "warps at different barriers": (Deadlock, "shr.u32 %r5, %r1, 5; bar.sync HERE, 64;", "%r5", "0"),
}


@pytest.mark.parametrize(("error", "text", "defect", "sound"), TWINS.values(), ids=TWINS)
def test_a_defect_and_its_sound_twin(error, text, defect, sound):
    both(error, text.replace("HERE", defect), text.replace("HERE", sound))


def test_what_comes_of_undefined_registers_is_undefined():
    """Compilers let undefined values be computed with. Where one decides or leaves the warp is the fault."""
    undefined = "add.s32 %r5, %r6, 1; mul.lo.s32 %r5, %r5, 0; shfl.sync.bfly.b32 %r7, %r5, 1, 31, -1;"
    undefined += "mov.b64 %rd5, {%r7, %r1}; cvt.u32.u64 %r8, %rd5; setp.eq.s32 %p1, %r8, 0; mov.u32 %r9, 1;"
    run(undefined)
    for use in (
        "st.global.u32 [%rd4], %r8;",
        "@%p1 mov.u32 %r9, 1;",
        "@%p1 bra $L__end; $L__end:",
        "st.shared.u32 [%r3], %r8;",
        "ld.shared.u32 %r9, [%r8];",
        "redux.sync.add.s32 %r9, %r8, -1;",
        "shfl.sync.idx.b32 %r9, %r1, %r8, 31, -1;",
        "selp.b32 %r9, %r1, %r1, %p1; st.global.u32 [%rd4], %r9;",
        "bar.sync %r8;",
    ):
        with pytest.raises(UninitialisedRead):
            run(undefined + use)


def test_undefined_operands_that_do_not_count():
    """What selp does not choose, what `and` and `or` of predicates do not need, other lanes of a shuffle."""
    some = (
        "setp.lt.u32 %p1, %r1, 40; @%p1 mov.u32 %r6, 3; selp.u32 %r5, CHOICE, %p1; st.global.u32 [%rd4], %r5;"
    )
    run(some.replace("CHOICE", "%r6, 7"))
    with pytest.raises(UninitialisedRead):
        run(some.replace("CHOICE", "7, %r6"))
    for logic, decided, open_ in (("and", "ge", "lt"), ("or", "lt", "ge")):
        body = f"setp.WHICH.u32 %p1, %r1, 64; {logic}.pred %p3, %p1, %p2; @%p3 mov.u32 %r9, 1;"
        run(body.replace("WHICH", decided))
        with pytest.raises(UninitialisedRead):
            run(body.replace("WHICH", open_))
    half = "and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0; @%p1 mov.u32 %r6, 3;"
    half += "shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;"
    run(half + "@!%p1 st.global.u32 [%rd4], %r7;")
    with pytest.raises(UninitialisedRead):
        run(half + "@%p1 st.global.u32 [%rd4], %r7;")


# --- races --------------------------------------------------------------------------------------------------


def test_a_read_of_what_another_warp_wrote():
    exchange = (
        f"{OTHER} st.shared.u32 [%r3], %r1; BARRIER ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;"
    )
    for seed in range(5):
        y = run(exchange.replace("BARRIER", "bar.sync 0;"), seed=seed)
        assert y.tolist() == [i ^ 32 for i in range(64)]
        # The first of the two finds nothing, or the two are not ordered.
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(exchange.replace("BARRIER", ""), seed=seed)


@pytest.mark.parametrize(
    "body",
    (
        "st.shared.u32 [%r3], %r1; BARRIER ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;",
        "st.shared.u32 [%r4], %r1; ld.shared.u32 %r5, [%r4]; BARRIER st.shared.u32 [%r3], %r5;",
    ),
    ids=("read", "write"),
)
def test_lanes_of_a_warp_that_exchange(body):
    """The neighbour's word: read after its write, or written after its read."""
    body = "xor.b32 %r4, %r3, 4; " + body
    both(SharedRace, body.replace("BARRIER", ""), body.replace("BARRIER", "bar.warp.sync -1;"), threads=32)


def test_neighbouring_bytes_are_no_race():
    y = run(
        """cvt.u16.u32 %h1, %r1; add.s32 %r4, %r2, %r1; st.shared.u8 [%r4], %h1;
        ld.shared.u8 %h2, [%r4]; cvt.u32.u16 %r5, %h2; st.global.u32 [%rd4], %r5;"""
    )
    assert y.tolist() == list(range(64))


def test_a_barrier_of_other_warps_orders_nothing():
    """Warps 0 and 1 exchange, but only warps 0 and 2 meet."""
    body = f"""{OTHER} setp.lt.u32 %p1, %r1, 64; shr.u32 %r6, %r1, 5;
        @%p1 st.shared.u32 [%r3], %r1;
        setp.eq.u32 %p2, %r6, 1; @%p2 bra $L__over;
        bar.sync 1, 64;
    $L__over:
        FURTHER setp.eq.u32 %p3, %r6, 0; @%p3 ld.shared.u32 %r5, [%r4];"""
    for seed in range(5):
        run(body.replace("FURTHER", "bar.sync 0;"), threads=96, seed=seed)
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(body.replace("FURTHER", ""), threads=96, seed=seed)


def test_arriving_orders_what_was_done_before():
    """Warp 1 stores and arrives; warp 0 waits and reads. What warp 1 stores after it arrived is a race."""
    body = f"""{OTHER} setp.ge.u32 %p1, %r1, 32; @%p1 bra $L__producer;
        bar.sync 1, 64; ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5; bra $L__end;
    $L__producer:
        BEFORE bar.arrive 1, 64; AFTER
    $L__end:"""
    store = "st.shared.u32 [%r3], %r1;"
    sound, late = body.replace("BEFORE", store), body.replace("AFTER", store)
    for seed in range(5):
        y = run(sound.replace("AFTER", ""), seed=seed)
        assert y[:32].tolist() == list(range(32, 64))
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(late.replace("BEFORE", ""), seed=seed)


def test_atomics_do_not_race_with_each_other():
    body = """setp.eq.u32 %p1, %r1, 0; mov.u32 %r5, 0; @%p1 st.shared.u32 [%r2], %r5; bar.sync 0;
        red.shared.add.u32 [%r2], %r1; BARRIER ld.shared.u32 %r6, [%r2]; st.global.u32 [%rd4], %r6;"""
    both(SharedRace, body.replace("BARRIER", ""), body.replace("BARRIER", "bar.sync 0;"))
    assert run(body.replace("BARRIER", "bar.sync 0;")).tolist() == [63 * 32] * 64
    # One warp updates, the other only reads.
    body = """setp.eq.u32 %p1, %r1, 0; mov.u32 %r5, 0; @%p1 st.shared.u32 [%r2], %r5; bar.sync 0;
        setp.lt.u32 %p2, %r1, 32; @%p2 red.shared.add.u32 [%r2], %r1;
        BARRIER @!%p2 ld.shared.u32 %r6, [%r2];"""
    both(SharedRace, body.replace("BARRIER", ""), body.replace("BARRIER", "bar.sync 0;"))


# --- barriers and ends --------------------------------------------------------------------------------------


def test_threads_that_have_ended_are_not_waited_for():
    for seed in range(8):
        run("setp.lt.u32 %p1, %r1, 40; @%p1 ret; bar.sync 0;", seed=seed)


def test_an_endless_loop():
    with pytest.raises(Deadlock, match="no end after"):
        run("$L__again: bra $L__again;", limit=10_000)


# --- blocks -------------------------------------------------------------------------------------------------


def test_two_blocks_write_one_byte():
    mine = "mov.u32 %r5, %ctaid.x; mad.lo.s32 %r5, %r5, 32, %r1; mad.wide.u32 %rd4, %r5, 4, %rd2;"
    store = "st.global.u32 [%rd4], %r1;"
    both(BlockOverlap, store, mine + store, threads=32, blocks=2)
    run(store, threads=32, blocks=2, check_overlap=False)
    # A block may write what it has written.
    run(store + store)


def test_atomics_of_two_blocks_are_no_overlap():
    body = "mov.u32 %r5, 1; red.global.add.u32 [%rd4], %r5;"
    assert run(body, threads=64, blocks=3).tolist() == [2] * 64


@pytest.mark.parametrize("seed", range(4))
def test_a_block_waits_for_another(seed):
    """Block 0 spins until block 1 has stored: blocks take turns."""
    body = """mov.u32 %r5, %ctaid.x; setp.eq.u32 %p1, %r5, 1; @%p1 bra $L__store;
    $L__again:
        ld.acquire.gpu.global.u32 %r6, [%rd2];
        setp.eq.s32 %p2, %r6, -1; @%p2 bra $L__again;
        st.global.u32 [%rd4+128], %r6; bra $L__end;
    $L__store:
        st.global.u32 [%rd4], %r1;
    $L__end:"""
    assert run(body, threads=32, blocks=2, seed=seed)[32:].tolist() == [0] * 32


ACCESSES = (
    "ld.global.u32 %r5, [%rd4];",
    "st.global.u32 [%rd4], %r1;",
    "st.global.u32 [%rd3], %r1;",
    "red.global.add.u32 [%rd4], %r1;",
    "cp.async.ca.shared.global [%r3], [%rd4], 4; cp.async.wait_all;",
)


@pytest.mark.parametrize(
    "access",
    ACCESSES,
)
def test_an_access_before_the_kernels_before_have_ended(access):
    """A kernel before may write y, but not x."""
    x, y = (torch.zeros(64, dtype=torch.int32) for _ in range(2))
    early, wait = "griddepcontrol.launch_dependents; ld.global.u32 %r6, [%rd3];", "griddepcontrol.wait;"

    def run_chained(body):
        Program(kernel(START + body, shared=1024)).launch("k", (2,), (32,), [x, y], **options)

    options = {"constant": [x], "check_overlap": False}
    run_chained(early + wait + access)
    for body in (access + wait, f"setp.eq.u32 %p1, %r1, 7; @%p1 {wait} {access}", early):
        with pytest.raises(EarlyAccess):
            run_chained(body)
    options = {"check_overlap": False}
    run_chained(access)
