"""Each report: a kernel of a few lines that has the defect, and one without it that passes."""

from __future__ import annotations

import re

import pytest
import torch

from tests.ptx.emulator import (
    BlockOverlap,
    Deadlock,
    DivergentBarrier,
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


def test_a_register_that_was_never_written():
    use = "add.s32 %r5, %r6, 1; st.global.u32 [%rd4], %r5;"
    both(UninitialisedRead, use, "mov.u32 %r6, 0;" + use)


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


def test_a_register_that_some_lanes_never_wrote():
    defect = "setp.lt.u32 %p1, %r1, 40; @%p1 mov.u32 %r5, 3; st.global.u32 [%rd4], %r5;"
    both(UninitialisedRead, defect, "mov.u32 %r5, 0;" + defect)


def test_a_predicate_that_was_never_written():
    both(UninitialisedRead, "@%p3 mov.u32 %r5, 1;", "setp.eq.s32 %p3, %r1, 0; @%p3 mov.u32 %r5, 1;")


def test_shared_memory_that_was_never_written():
    both(
        UninitialisedRead, "ld.shared.u32 %r5, [%r3];", "st.shared.u32 [%r3], %r1; ld.shared.u32 %r5, [%r3];"
    )


def test_shared_memory_of_which_a_byte_was_never_written():
    defect = "cvt.u16.u32 %h1, %r1; st.shared.u16 [%r3], %h1; FURTHER ld.shared.u32 %r5, [%r3];"
    both(
        UninitialisedRead,
        defect.replace("FURTHER", ""),
        defect.replace("FURTHER", "st.shared.u16 [%r3+2], %h1;"),
    )


# --- bounds and alignment -----------------------------------------------------------------------------------


def test_global_memory_out_of_bounds():
    both(OutOfBounds, "ld.global.u32 %r5, [%rd3+4];", "ld.global.u32 %r5, [%rd3];")
    both(OutOfBounds, "st.global.u32 [%rd4+4], %r1;", "st.global.u32 [%rd4], %r1;")
    both(OutOfBounds, "st.global.u32 [%rd4+-4], %r1;", "st.global.u32 [%rd4], %r1;")
    both(OutOfBounds, "red.global.add.u32 [%rd4+4], %r1;", "red.global.add.u32 [%rd4], %r1;")


def test_shared_memory_out_of_bounds():
    both(OutOfBounds, "st.shared.u32 [%r3+772], %r1;", "st.shared.u32 [%r3+768], %r1;")


def test_local_memory_out_of_bounds():
    local = ".local .align 4 .b8 depot[16]; mov.u32 %r5, depot;"
    both(OutOfBounds, local + "st.local.u32 [%r5+16], %r1;", local + "st.local.u32 [%r5+12], %r1;")


def test_misaligned():
    both(Misaligned, "ld.global.u32 %r5, [%rd1+2];", "ld.global.u16 %r5, [%rd1+2];")
    both(Misaligned, "ld.global.v2.u32 {%r5, %r6}, [%rd1+4];", "ld.global.v2.u32 {%r5, %r6}, [%rd1+8];")
    both(Misaligned, "st.shared.u32 [%r3+2], %r1;", "st.shared.u32 [%r3], %r1;")
    copy = "setp.eq.u32 %p1, %r1, 0; @%p1 cp.async.ca.shared.global [%r2], [%rd1+SHIFT], 8;"
    both(Misaligned, copy.replace("SHIFT", "4"), copy.replace("SHIFT", "8"))


# --- races --------------------------------------------------------------------------------------------------


def test_a_read_of_what_another_warp_wrote():
    exchange = (
        f"{OTHER} st.shared.u32 [%r3], %r1; BARRIER ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;"
    )
    for seed in range(5):
        y = run(exchange.replace("BARRIER", "bar.sync 0;"), seed=seed)
        assert y.tolist() == [i ^ 32 for i in range(64)]
        # Whoever comes first finds nothing, or nobody ordered the two.
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(exchange.replace("BARRIER", ""), seed=seed)


def test_a_write_of_what_another_warp_reads():
    body = f"""{OTHER} st.shared.u32 [%r3], %r1; bar.sync 0;
        ld.shared.u32 %r5, [%r4]; BARRIER st.shared.u32 [%r3], %r5;"""
    both(SharedRace, body.replace("BARRIER", ""), body.replace("BARRIER", "bar.sync 0;"))


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


def test_two_writes():
    body = "mov.u32 %r5, 7; st.shared.u32 [%r2], VALUE; bar.sync 0;"
    # Warps that hold copies of one value may all store it.
    both(SharedRace, body.replace("VALUE", "%r1"), body.replace("VALUE", "%r5"), threads=64)


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


def test_a_barrier_that_only_some_threads_reach():
    defect = "setp.lt.u32 %p1, %r1, 40; @%p1 bar.sync 0;"
    both(DivergentBarrier, defect, "setp.lt.u32 %p1, %r1, 64; @%p1 bar.sync 0;")


def test_threads_that_have_ended_are_not_waited_for():
    for seed in range(8):
        run("setp.lt.u32 %p1, %r1, 40; @%p1 ret; bar.sync 0;", seed=seed)


def test_a_warp_barrier_names_threads_that_went_elsewhere():
    body = "setp.lt.u32 %p1, %r1, 40; @%p1 bra $L__over; bar.warp.sync -1; $L__over: PLACE"
    sound = "setp.lt.u32 %p1, %r1, 40; @%p1 bra $L__over; mov.u32 %r5, 1; $L__over: bar.warp.sync -1;"
    both(DivergentBarrier, body.replace("PLACE", ""), sound)


def test_a_shuffle_names_threads_that_went_elsewhere():
    body = "@%p1 bra $L__over; shfl.sync.bfly.b32 %r5, %r1, 1, 31, -1; $L__over:"
    both(DivergentBarrier, "setp.lt.u32 %p1, %r1, 40;" + body, "setp.lt.u32 %p1, %r1, 32;" + body)


def test_a_deadlock():
    body = "shr.u32 %r5, %r1, 5; bar.sync NAME, 64;"
    both(Deadlock, body.replace("NAME", "%r5"), body.replace("NAME", "0"))


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
