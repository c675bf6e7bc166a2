"""cp.async: what lands when, zeros, and what may not be touched in flight. Both schedules."""

from __future__ import annotations

import pytest
import torch

from tests.ptx.emulator import Misaligned, OutOfBounds, Program, SharedRace, UninitialisedRead
from tests.ptx.texts import kernel

START = """
ld.param.u64 %rd1, [x];
ld.param.u64 %rd2, [y];
mov.u32 %r1, %tid.x;
mov.u32 %r2, memory;
mad.lo.s32 %r3, %r1, 16, %r2;           // 16 bytes of this thread
mad.wide.u32 %rd3, %r1, 16, %rd1;
mad.wide.u32 %rd4, %r1, 16, %rd2;
"""
COPY = "cp.async.cg.shared.global [%r3], [%rd3], 16;"
SECOND = "cp.async.cg.shared.global [%r3+1024], [%rd3+1024], 16;"
READ = "ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r3]; st.global.v4.u32 [%rd4], {%r5, %r6, %r7, %r8};"
OTHER = "xor.b32 %r4, %r1, 32; mad.lo.s32 %r4, %r4, 16, %r2;"
SCHEDULES = pytest.mark.parametrize("schedule", ("late", "early"))


def run(body: str, schedule: str = "late", seed: int = 0, threads: int = 64):
    """y, of as many numbers as x = 0, 1, …, 511, of which threads copy four each."""
    x, y = torch.arange(512, dtype=torch.int32), torch.full((512,), -1, dtype=torch.int32)
    program = Program(kernel(START + body, shared=4096))
    program.launch("k", (1,), (threads,), [x, y], schedule=schedule, seed=seed)
    return y


@SCHEDULES
@pytest.mark.parametrize(
    "wait",
    (
        "cp.async.wait_all;",
        "cp.async.commit_group; cp.async.wait_group 0;",
        f"cp.async.commit_group; {SECOND} cp.async.commit_group; cp.async.wait_group 1;",
        "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;",
    ),
    ids=("all", "its group", "not the last group", "an empty group counts"),
)
def test_a_copy_that_is_waited_for(wait, schedule):
    assert run(f"{COPY} {wait} {READ}", schedule)[:256].tolist() == list(range(256))


@pytest.mark.parametrize(
    "wait",
    (
        "",
        "cp.async.commit_group;",
        "cp.async.wait_group 0;",
        "cp.async.commit_group; cp.async.wait_group 1;",
        f"cp.async.commit_group; {SECOND} cp.async.commit_group; cp.async.wait_group 2;",
    ),
    ids=("none", "no wait", "no group", "not the last group", "not the last two"),
)
def test_a_wait_that_does_not_cover_the_copy(wait):
    """A read in flight: reported by the late schedule. The early one has the bytes there at once."""
    with pytest.raises(UninitialisedRead, match="in flight"):
        run(f"{COPY} {wait} {READ}")
    assert run(f"{COPY} {wait} {READ}", "early")[:256].tolist() == list(range(256))


def test_groups_are_counted_per_thread():
    """Half of a warp commits once more, so that its copy is not among the last group."""
    body = f"{COPY} cp.async.commit_group; setp.lt.u32 %p1, %r1, LIMIT; @%p1 cp.async.commit_group;"
    body += f"cp.async.wait_group 1; {READ}"
    run(body.replace("LIMIT", "64"))
    with pytest.raises(UninitialisedRead, match=r"lanes \[16\]"):
        run(body.replace("LIMIT", "16"), threads=32)


@SCHEDULES
@pytest.mark.parametrize(("size", "kind"), ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")))
def test_bytes_that_are_not_read_become_zero(size, kind, schedule):
    """How many are read may be a number, a register, or missing; what lies beyond is not touched."""
    clear = "mov.u32 %r9, -1; st.shared.v4.u32 [%r3], {%r9, %r9, %r9, %r9};"
    for count, given in ((0, ", 0"), (1, ", 1"), (size - 1, ", %r10"), (4, ", %r10"), (size, "")):
        copy = f"mov.u32 %r10, {count}; cp.async.{kind}.shared.global [%r3], [%rd3], {size}{given};"
        y = run(f"{clear} {copy} cp.async.wait_all; {READ}", schedule)[:256].view(64, 4).view(torch.uint8)
        expected = torch.full((64, 16), 255, dtype=torch.uint8)
        expected[:, :size] = 0
        source = torch.arange(256, dtype=torch.int32).view(64, 4).view(torch.uint8)
        expected[:, :count] = source[:, :count]
        assert torch.equal(y, expected), count


def test_what_is_not_read_may_be_out_of_bounds():
    far = "mov.u32 %r10, COUNT; cp.async.cg.shared.global [%r3], [%rd3+2048], 16, %r10; cp.async.wait_all;"
    run(far.replace("COUNT", "0"))
    with pytest.raises(OutOfBounds):
        run(far.replace("COUNT", "16"))


def test_the_source_is_aligned_to_what_is_written():
    """Even where less is read."""
    shifted = "mov.u32 %r10, 4; cp.async.cg.shared.global [%r3], [%rd3+SHIFT], 16, %r10; cp.async.wait_all;"
    run(shifted.replace("SHIFT", "16"))
    with pytest.raises(Misaligned):
        run(shifted.replace("SHIFT", "4"))


def test_the_target_must_be_shared_memory():
    with pytest.raises(OutOfBounds):
        run("cp.async.cg.shared.global [%r3+3584], [%rd3], 16; cp.async.wait_all;")


@SCHEDULES
def test_others_need_a_barrier_after_the_wait(schedule):
    body = f"{OTHER} {COPY} cp.async.wait_all; BARRIER ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;"
    for seed in range(4):
        y = run(body.replace("BARRIER", "bar.sync 0;"), schedule, seed)
        assert y[:256:4].tolist() == [4 * (i ^ 32) for i in range(64)]
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(body.replace("BARRIER", ""), schedule, seed)


def test_a_barrier_before_the_wait_is_too_early():
    body = f"{OTHER} {COPY} FIRST ld.shared.u32 %r5, [%r4]; st.global.u32 [%rd4], %r5;"
    for seed in range(4):
        run(body.replace("FIRST", "cp.async.wait_all; bar.sync 0;"), seed=seed)
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(body.replace("FIRST", "bar.sync 0; cp.async.wait_all;"), seed=seed)


@SCHEDULES
def test_a_copy_over_what_another_warp_reads(schedule):
    """A ring of stages that is refilled before all have read."""
    body = f"""{OTHER} {COPY} cp.async.wait_all; bar.sync 0; ld.shared.u32 %r5, [%r4]; BARRIER
        cp.async.cg.shared.global [%r3], [%rd3+1024], 16; cp.async.wait_all;"""
    for seed in range(4):
        run(body.replace("BARRIER", "bar.sync 0;"), schedule, seed)
        with pytest.raises((SharedRace, UninitialisedRead)):
            run(body.replace("BARRIER", ""), schedule, seed)


def test_a_store_into_a_copy_in_flight():
    with pytest.raises(SharedRace, match="in flight"):
        run(f"{COPY} st.shared.u32 [%r3], %r1; cp.async.wait_all;")
    run(f"{COPY} cp.async.wait_all; st.shared.u32 [%r3], %r1;")


def test_late_copies_read_their_source_late():
    """What the source holds when the copy lands is not defined while it changes: late reads the new value."""
    body = f"{COPY} mov.u32 %r9, 77; st.global.u32 [%rd3], %r9; cp.async.wait_all; {READ}"
    assert run(body, "late")[:256:4].tolist() == [77] * 64
    assert run(body, "early")[:256:4].tolist() == list(range(0, 256, 4))
