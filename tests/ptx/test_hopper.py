"""Forms of sm_90 against `isa.py` and NumPy, and what they report."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import (
    Deadlock,
    DivergentBarrier,
    Misaligned,
    OutOfBounds,
    Program,
    ProxyWarning,
    SharedRace,
    UninitialisedRead,
    run_instruction,
    tensor_map,
)
from tests.ptx.emulator.reports import BadLaunch
from tests.ptx.texts import kernel

SCHEDULES = ("late", "early")


def program(body: str, parameters: str, shared: int = 65536) -> Program:
    """%r0 is the thread, %p0 whether it is the first, %p1 true."""
    start = "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.pred %p1, -1;"
    return Program(kernel(f"{start}\n{body}", parameters, shared=shared, target="sm_90a"))


# ---- wgmma


def layout(major: str, width: int, rows: int) -> tuple[int, int, int]:
    """(leading, stride, bytes) that pack an operand of so many rows (m or n) and 16 of k without gaps."""
    units = -(-rows // 8)
    if major == "k":
        if width == 0:
            return 128 * units, 128, 256 * units  # all rows of one unit of k, then the other
        return 16, 8 * width, 8 * width * units
    if width == 0:
        return 128 * units, 128, 256 * units
    blocks = -(-rows // (width // 2))
    return 16 * width, 8 * width, 16 * width * blocks


def put(image: bytearray, matrix: np.ndarray, start: int, major: str, width: int) -> int:
    """Write a (rows, 16) matrix of patterns where a descriptor says, and return the descriptor."""
    leading, stride, size = layout(major, width, len(matrix))
    assert start + size <= len(image)
    for (i, k), pattern in np.ndenumerate(matrix):
        at = isa.shared_place(i, k, start, leading, stride, width, major)
        image[at : at + 2] = int(pattern).to_bytes(2, "little")
    return isa.descriptor(start, leading, stride, width)


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"%d{first + i}" for i in range(count)) + "}"


def results(n: int) -> str:
    """Each thread stores its accumulators, one after another."""
    lines = [f"ld.param.u64 %rd0, [target]; mul.wide.u32 %rd1, %r0, {2 * n}; add.s64 %rd0, %rd0, %rd1;"]
    lines += [f"st.global.b32 [%rd0 + {4 * i}], %d{i};" for i in range(n // 2)]
    return "\n".join(lines)


def integers(random: np.random.Generator, rows: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    values = random.integers(-9, 10, (rows, 16))
    if kind == "bf16":
        return values, isa.from_floats(isa.nearest_bf16(values.astype(np.float32)), "bf16")
    return values, isa.from_floats(values.astype(np.float16), "f16")


N64 = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16"
FENCE = "fence.proxy.async.shared::cta;\n"
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;\n", "wgmma.wait_group.sync.aligned {};\n"
DONE = COMMIT + WAIT.format(0)


def product(n: int, body: str, image: bytes, schedule: str, more: str = "", given: tuple = ()) -> np.ndarray:
    """The 64 x n matrix that 128 threads hold after the statements; `more` declares what is `given`."""
    target = np.zeros((128, n // 2), np.float32)
    made = program(body + results(n), f".param .u64 target{more}", shared=len(image))
    made.launch("k", (1,), (128,), [target, *given], schedule=schedule, shared=bytes(image))
    found = np.full((64, n), np.nan)
    for thread in range(128):
        for i in range(n // 2):
            found[isa.place_d_wgmma(thread, i)] = target[thread, i]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("majors", ["k k", "k mn", "mn k", "mn mn"])
def test_products_of_shared_memory(majors, width, schedule, random):
    """Every layout of both operands, exact integers; with and without what the accumulators held; signs."""
    for n, kind in ((8, "bf16"), (24, "f16"), (64, "bf16"), (256, "bf16")):
        major_a, major_b = majors.split()
        left, a = integers(random, 64, kind)
        right, b = integers(random, n, kind)
        image = bytearray(random.bytes(49152))
        descriptor_a = put(image, a, 0, major_a, width)
        descriptor_b = put(image, b, 16384, major_b, width)
        form = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}"
        transposed = f"{int(major_a == 'mn')}, {int(major_b == 'mn')}"
        sums = names(0, n // 2)
        held = " ".join(f"mov.b32 %d{i}, 0f42C80000;" for i in range(n // 2))
        body = f"""
{held}
mov.b64 %rd2, {descriptor_a};
mov.b64 %rd3, {descriptor_b};
wgmma.fence.sync.aligned;
{form} {sums}, %rd2, %rd3, 0, 1, 1, {transposed};
{DONE}
{form} {sums}, %rd2, %rd3, %p1, 1, 1, {transposed};
{form} {sums}, %rd2, %rd3, %p1, -1, 1, {transposed};
{form} {sums}, %rd2, %rd3, 1, 1, 1, {transposed};
{DONE}
"""
        np.testing.assert_array_equal(product(n, body, image, schedule), 2 * left @ right.T)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [0, 32, 64, 128])
@pytest.mark.parametrize("major", ["k", "mn"])
def test_products_of_registers(major, width, schedule, random):
    """A in four registers per thread."""
    left, a = integers(random, 64, "bf16")
    right, b = integers(random, 64, "bf16")
    image = bytearray(random.bytes(32768))
    descriptor = put(image, b, 4096, major, width)
    held = isa.scattered(a, 4, isa.place_d_wgmma, 2, lanes=128)
    given = np.stack(held, 1).astype(np.uint32)
    lines = "\n".join(f"ld.global.b32 %d{300 + i}, [%rd4 + {4 * i}];" for i in range(4))
    body = f"""
ld.param.u64 %rd4, [given]; mul.wide.u32 %rd5, %r0, 16; add.s64 %rd4, %rd4, %rd5;
{lines}
mov.b64 %rd3, {descriptor};
wgmma.fence.sync.aligned;
{N64} {names(0, 32)}, {names(300, 4)}, %rd3, 0, 1, 1, {int(major == "mn")};
{DONE}
"""
    found = product(64, body, image, schedule, ", .param .u64 given", (given,))
    np.testing.assert_array_equal(found, left @ right.T)


N8 = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
START = f"""
mov.b64 %rd2, {isa.descriptor(0, 128, 256, 0)}; mov.b64 %rd3, {isa.descriptor(4096, 128, 256, 0)};
mov.u32 %r2, memory; mad.lo.s32 %r3, %r0, 16, %r2;
mov.b32 %d100, 0; mov.b32 %d101, 0; mov.b32 %d102, 0; mov.b32 %d103, 0;
wgmma.fence.sync.aligned;
"""
SHARED = f"{N8} {names(0, 4)}, %rd2, %rd3, 0, 1, 1, 0, 0;\n"
HELD = f"{N8} {names(0, 4)}, {names(100, 4)}, %rd3, 0, 1, 1, 0;\n"
AGAIN = f"{N8} {names(0, 4)}, %rd2, %rd3, 1, 1, 1, 0, 0;\n"
OTHER = f"{N8} {names(8, 4)}, %rd2, %rd3, 0, 1, 1, 0, 0;\n"


def run_group(body: str, schedule: str = "late", shared: bytes = bytes(8192)) -> np.ndarray:
    target = np.zeros((128, 4), np.float32)
    made = program(START + body, ".param .u64 target", shared=8192)
    made.launch("k", (1,), (128,), [target], schedule=schedule, shared=shared)
    return target


WELL = {
    "one group": SHARED + DONE + results(8),
    "a continued sum": SHARED + AGAIN + COMMIT + AGAIN + DONE + results(8),
    "the first of two": SHARED + COMMIT + OTHER + COMMIT + WAIT.format(1) + results(8) + WAIT.format(0),
    "A may be read twice": HELD + HELD + DONE + results(8),
    "A is free after the wait": HELD + DONE + "mov.b32 %d100, 1;" + results(8),
    # what the statement itself reads
    "another descriptor meanwhile": f"{SHARED} mov.b64 %rd2, -1; mov.b64 %rd3, -1; {DONE}" + results(8),
    "memory is free after the wait": SHARED + DONE + "bar.sync 0; st.shared.b32 [%r3], %r0;" + results(8),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("body", WELL.values(), ids=WELL.keys())
def test_what_may_be_done(body, schedule):
    run_group(body, schedule)


PART = "setp.lt.u32 %p2, %r0, 31; @%p2 "
ILL = {
    "accumulators before the wait": (SHARED + COMMIT + results(8), UninitialisedRead),
    "a group that is not committed": (SHARED + WAIT.format(0) + results(8), UninitialisedRead),
    "a wait that leaves the group": (SHARED + COMMIT + WAIT.format(1) + results(8), UninitialisedRead),
    "the second of two": (OTHER + COMMIT + SHARED + COMMIT + WAIT.format(1) + results(8), UninitialisedRead),
    "the sum continued": (SHARED + COMMIT + AGAIN + COMMIT + WAIT.format(1) + results(8), UninitialisedRead),
    "accumulators written": (SHARED + "mov.b32 %d1, 0;" + DONE, UninitialisedRead),
    "A written": (HELD + "mov.b32 %d101, 1;" + DONE, UninitialisedRead),
    "A read": (
        HELD + COMMIT + "ld.param.u64 %rd0, [target]; @%p0 st.global.b32 [%rd0], %d101;" + WAIT.format(0),
        UninitialisedRead,
    ),
    "sums never written": (AGAIN + DONE, UninitialisedRead),
    "memory written": (SHARED + COMMIT + "st.shared.b32 [%r3], %r0;" + WAIT.format(0), SharedRace),
    "memory written after another warp's wait": (
        SHARED + DONE + "xor.b32 %r4, %r0, 96; mad.lo.s32 %r3, %r4, 16, %r2;"
        "st.shared.b32 [%r3], %r0;",
        SharedRace,
    ),
    "a part of the warp": (PART + SHARED, DivergentBarrier),
    "a part of the warp waits": (SHARED + COMMIT + PART + WAIT.format(0), DivergentBarrier),
    "outside": (f"mov.b64 %rd2, {isa.descriptor(7168, 128, 256, 0)};" + SHARED, OutOfBounds),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("body", "error"), ILL.values(), ids=ILL.keys())
def test_what_may_not_be_done(body, error, schedule):
    with pytest.raises(error):
        run_group(body, schedule)


def test_memory_that_nobody_wrote():
    with pytest.raises(UninitialisedRead, match="wgmma"):
        run_group(SHARED, shared=bytes(4096))


WRITTEN = """
mov.b32 %r5, 0;
mad.lo.s32 %r3, %r0, 64, %r2;
st.shared.v4.b32 [%r3], {%r5, %r5, %r5, %r5}; st.shared.v4.b32 [%r3 + 16], {%r5, %r5, %r5, %r5};
st.shared.v4.b32 [%r3 + 32], {%r5, %r5, %r5, %r5}; st.shared.v4.b32 [%r3 + 48], {%r5, %r5, %r5, %r5};
"""


def test_a_missing_proxy_fence_is_a_warning():
    rest = SHARED + DONE + results(8)
    with pytest.warns(ProxyWarning, match="line"):
        run_group(WRITTEN + "bar.sync 0;" + rest, shared=None)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("between", [FENCE + "bar.sync 0;", "bar.sync 0;" + FENCE])
def test_a_proxy_fence_before_or_behind_the_barrier(between):
    run_group(WRITTEN + between + SHARED + DONE + results(8), shared=None)


# ---- elect


@pytest.mark.parametrize("members", [0xFFFFFFFF, 0xFFFFFFF0])
def test_elect(members):
    """One lane of the members; the other lanes know which."""
    lanes = np.arange(32)
    lines = [".reg .b32 %d, %q, %l;", ".reg .pred %p, %m;", "mov.b32 %d, 99;", "mov.b32 %q, 7;"]
    lines += [f"shr.b32 %q, {members:#x}, %l;", "and.b32 %q, %q, 1;", "setp.ne.b32 %m, %q, 0;"]
    lines += ["mov.pred %p, 0;", f"@%m elect.sync %d|%p, {members:#x};", "selp.b32 %q, 1, 0, %p;"]
    got = run_instruction(lines, {"%l": lanes}, ["%d", "%q"], target="sm_90")
    chosen = np.flatnonzero(got["%q"])
    assert len(chosen) == 1
    inside = members >> lanes & 1
    np.testing.assert_array_equal(got["%d"], np.where(inside, chosen[0], 99))


# ---- registers of a warp group


@pytest.mark.parametrize("way", ["inc", "dec"])
def test_registers_are_given_and_taken(way):
    def run(body: str) -> None:
        program(body, ".param .u64 target").launch("k", (1,), (128,), [np.zeros(1, np.int32)])

    statement = f"setmaxnreg.{way}.sync.aligned.u32"
    for number in (24, 240, 256):
        run(f"{statement} {number};")
    for number in (16, 100, 264):
        with pytest.raises(BadLaunch, match="setmaxnreg"):
            run(f"{statement} {number};")
    with pytest.raises(DivergentBarrier, match="setmaxnreg"):
        run(f"setp.lt.u32 %p2, %r0, 31; @%p2 {statement} 40;")


# ---- mbarrier


BARRIER = """
mov.u32 %r2, memory;
@%p0 mbarrier.init.shared::cta.b64 [%r2], {count};
bar.sync 0;
"""


def wait(parity: int, label: str) -> str:
    return f"""
{label}:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], {parity};
@!%p2 bra {label};
"""


def counted(body: str, count: int = 1, threads: int = 64, **more: object) -> None:
    out = np.zeros(threads, np.int32)
    made = program(BARRIER.format(count=count) + body, ".param .u64 target", 1024)
    made.launch("k", (1,), (threads,), [out], limit=100_000, **more)


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r2];\n"


@pytest.mark.parametrize("seed", range(4))
def test_a_barrier_orders_what_came_before(seed):
    """Warp 1 writes and arrives, warp 0 waits and reads; twice, for both parities."""
    body = f"""
mov.u32 %r3, 0;
setp.ge.u32 %p3, %r0, 32;
@!%p3 bra READ;
st.shared.b32 [%r2 + 16], %r0;
{ARRIVE}
bra DONE;
READ:
{wait(0, "FIRST")}
ld.shared.b32 %r3, [%r2 + 16];
DONE:
"""
    counted(body, 32, seed=seed)
    with pytest.raises((SharedRace, UninitialisedRead)):
        counted(body.replace(wait(0, "FIRST"), ""), 32, seed=seed)


def test_parities_alternate():
    counted(
        ARRIVE + wait(0, "A") + "bar.sync 0;" + ARRIVE + wait(1, "B") + "bar.sync 0;" + ARRIVE + wait(0, "C"),
        64,
    )


@pytest.mark.parametrize(
    ("body", "count"),
    [(wait(0, "A"), 1), (ARRIVE + wait(0, "A") + wait(1, "B"), 64), (ARRIVE + wait(0, "A"), 65)],
    ids=["no warp arrives", "the next phase", "one too few"],
)
def test_waits_without_end(body, count):
    with pytest.raises(Deadlock):
        counted(body, count)


def test_the_phase_before_the_first_is_over():
    counted(wait(1, "A"))


def test_barriers_that_are_none():
    with pytest.raises(UninitialisedRead, match="mbarrier"):
        counted("add.u32 %r2, %r2, 64;" + ARRIVE)
    with pytest.raises(Misaligned):
        counted("add.u32 %r2, %r2, 4;" + ARRIVE)
    with pytest.raises((SharedRace, UninitialisedRead), match="mbarrier"):
        counted("bar.sync 0; @%p0 mbarrier.inval.shared::cta.b64 [%r2]; bar.sync 0;" + ARRIVE)
    expecting = "@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16; bar.sync 0;"
    with pytest.raises(DivergentBarrier, match="count"):
        counted(expecting + ARRIVE)
    with pytest.raises(SharedRace, match="in flight"):
        counted(expecting + "@%p0 mbarrier.inval.shared::cta.b64 [%r2];")


def test_a_barrier_is_not_initialised_again():
    with pytest.raises(SharedRace, match="invalidated"):
        counted("bar.sync 0; @%p0 mbarrier.init.shared::cta.b64 [%r2], 2;")


def test_a_barrier_is_used_again_after_inval():
    counted(
        "@%p0 mbarrier.inval.shared::cta.b64 [%r2]; bar.sync 0;"
        + BARRIER.format(count=64)
        + ARRIVE
        + wait(0, "A")
    )


# ---- tiles of tensors


LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group"
TILE = """
mov.u32 %r2, memory;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
add.u32 %r3, %r2, 1024;
mov.b64 %rd0, map; cvta.param.u64 %rd1, %rd0;
bar.sync 0;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
@%p0 {load} [%r3], [%rd1, {{%r8, %r9}}], [%r2];
"""
COORDINATES = "mov.u32 %r8, {x}; mov.u32 %r9, {y};\n"
TAKEN = """
ld.param.u64 %rd4, [target]; mul.wide.u32 %rd5, %r0, 16; add.s64 %rd4, %rd4, %rd5;
mad.lo.s32 %r4, %r0, 16, %r3;
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r4];
st.global.v4.b32 [%rd4], {%r10, %r11, %r12, %r13};
"""
PARAMETERS = ".param .align 64 .b8 map[128], .param .u64 target"


def tile(source: np.ndarray, box: tuple[int, int], width: int) -> bytes:
    strides = [s // source.itemsize for s in source.strides]
    return tensor_map(source.ctypes.data, source.itemsize, source.shape, strides, box, width)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_tiles_arrive_swizzled_and_filled_with_zeros(width, schedule, random):
    """Inside, over each edge, and outside; a tensor with gaps between its rows."""
    columns = (width or 64) // 2
    rows = 2048 // (2 * columns)
    wide = random.integers(1, 1 << 16, (48, 80)).astype(np.uint16)
    source = wide[:, :72]
    for x, y in ((0, 0), (16, 5), (60, 40), (-5, -3), (200, 0), (0, -64), (71, 47)):
        body = COORDINATES.format(x=x, y=y) + TILE.format(bytes=2048, load=LOAD) + wait(0, "A") + TAKEN
        target = np.zeros(1024, np.uint16)
        made = program(body, PARAMETERS, shared=4096)
        arguments = [tile(source, (rows, columns), width), target]
        made.launch("k", (1,), (128,), arguments, memory=[wide], schedule=schedule)
        want = np.zeros(1024, np.uint16)
        for i in range(rows):
            for j in range(columns):
                inside = 0 <= y + i < 48 and 0 <= x + j < 72
                at = isa.swizzle((i * columns + j) * 2, width) // 2
                want[at] = source[y + i, x + j] if inside else 0
        np.testing.assert_array_equal(target, want)


def load(
    then: str, bytes_: int = 2048, map_: bytes | None = None, schedule: str = "late", **more: object
) -> None:
    source = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    body = COORDINATES.format(x=0, y=0) + TILE.format(bytes=bytes_, load=LOAD) + then
    target = np.zeros(1024, np.uint16)
    made = program(body, PARAMETERS, shared=4096)
    arguments = [tile(source, (16, 64), 128) if map_ is None else map_, target]
    made.launch("k", (1,), (128,), arguments, memory=[source], schedule=schedule, limit=100_000, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("then", "bytes_", "error"),
    [
        (TAKEN, 2048, (UninitialisedRead, SharedRace)),
        (wait(0, "A"), 2064, Deadlock),
        (wait(0, "A"), 2032, Deadlock),
        (wait(0, "A") + wait(1, "B"), 2048, Deadlock),
        (
            "bar.sync 0; mad.lo.s32 %r4, %r0, 16, %r3; st.shared.b32 [%r4], %r0;" + wait(0, "A"),
            2048,
            SharedRace,
        ),
    ],
    ids=["not waited for", "more bytes", "fewer bytes", "no second tile", "written meanwhile"],
)
def test_tiles_that_are_not_waited_for(then, bytes_, error, schedule):
    if schedule == "early" and "st.shared" in then:
        pytest.skip("what lands at once is there before the write: no race")
    with pytest.raises(error):
        load(then, bytes_, schedule=schedule)


def test_a_tile_is_waited_for_before_the_end():
    """Shared memory is another block's when the block has ended."""
    with pytest.raises(SharedRace, match="the block ends"):
        load("")
    load(wait(0, "A"))


def test_a_read_before_the_tile_comes_needs_a_barrier():
    """Warps still read the buffer when the next tile is asked for."""
    again = f"""
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
@%p0 {LOAD} [%r3], [%rd1, {{%r8, %r9}}], [%r2];
{wait(1, "B")}
"""
    load(wait(0, "A") + TAKEN + "bar.sync 0;" + again)
    for seed in range(6):
        with pytest.raises((SharedRace, UninitialisedRead)):
            load(wait(0, "A") + TAKEN + again, seed=seed)


def test_addresses_of_tiles():
    with pytest.raises(OutOfBounds):
        load("", map_=tile(np.zeros((64, 64), np.uint16), (64, 64), 128), bytes_=8192)
    source = np.zeros((65, 64), np.uint16)
    outside = tensor_map(source.ctypes.data, 2, (65, 64), (64, 1), (16, 64), 128)
    with pytest.raises(OutOfBounds):
        load(wait(0, "A"), map_=outside)


PREFETCH = "mov.b64 %rd0, map; cvta.param.u64 %rd1, %rd0; @%p0 prefetch.tensormap [%rd1];"


def test_a_map_is_prefetched():
    source = np.zeros((64, 64), np.uint16)
    made = program(PREFETCH, PARAMETERS, shared=16)
    made.launch("k", (1,), (128,), [tile(source, (16, 64), 128), np.zeros(1, np.int32)])
    with pytest.raises(BadLaunch, match="is none"):
        made.launch("k", (1,), (128,), [bytes(128), np.zeros(1, np.int32)])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("width", [0, 32, 64, 128])
def test_tiles_are_stored(width, schedule, random):
    """What lies outside the tensor is left out."""
    columns = (width or 64) // 2
    rows = 2048 // (2 * columns)
    image = random.bytes(2048)
    words = np.frombuffer(image, np.uint16)
    for x, y in ((0, 0), (16, 5), (60, 40), (-5, -3), (200, 0)):
        wide = np.zeros((48, 80), np.uint16)
        goal = wide[:, :72]
        body = f"""
mov.u32 %r3, memory;
mov.b64 %rd0, map; cvta.param.u64 %rd1, %rd0;
{COORDINATES.format(x=x, y=y)}
@%p0 {STORE} [%rd1, {{%r8, %r9}}], [%r3];
@%p0 cp.async.bulk.commit_group;
@%p0 cp.async.bulk.wait_group 0;
"""
        made = program(body, PARAMETERS, shared=2048)
        arguments = [tile(goal, (rows, columns), width), np.zeros(1, np.int32)]
        made.launch("k", (1,), (128,), arguments, memory=[wide], schedule=schedule, shared=image)
        want = np.zeros((48, 80), np.uint16)
        for i in range(rows):
            for j in range(columns):
                if 0 <= y + i < 48 and 0 <= x + j < 72:
                    want[y + i, x + j] = words[isa.swizzle((i * columns + j) * 2, width) // 2]
        np.testing.assert_array_equal(wide, want)


def store(then: str, image: bytes | None = bytes(2048), before: str = "", **more: object) -> None:
    goal = np.zeros((64, 64), np.uint16)
    body = f"""
mov.u32 %r3, memory; mad.lo.s32 %r4, %r0, 16, %r3;
mov.b64 %rd0, map; cvta.param.u64 %rd1, %rd0;
{COORDINATES.format(x=0, y=0)}
{before}
@%p0 {STORE} [%rd1, {{%r8, %r9}}], [%r3];
@%p0 cp.async.bulk.commit_group;
{then}
"""
    made = program(body, PARAMETERS, shared=2048)
    arguments = [tile(goal, (16, 64), 128), np.zeros(1, np.int32)]
    made.launch("k", (1,), (128,), arguments, memory=[goal], shared=image, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_store_reads_stays_as_it_is(schedule):
    write = "st.shared.b32 [%r4], %r0;"
    waited = "@%p0 cp.async.bulk.wait_group.read 0;\n"
    store(waited + "bar.sync 0;" + write, schedule=schedule)
    for then in (
        "bar.sync 0;" + write + waited,
        waited + write,
        "@%p0 cp.async.bulk.wait_group.read 1; bar.sync 0;" + write,
    ):
        for seed in range(4):
            with pytest.raises(SharedRace):
                store(then, schedule=schedule, seed=seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_store_is_waited_for_before_the_end(schedule):
    """Shared memory is another block's when the block has ended."""
    with pytest.raises(SharedRace, match="end"):
        store("", schedule=schedule)


def test_stores_of_what_was_just_written():
    fill = "mov.b32 %r5, 7; st.shared.v4.b32 [%r4], {%r5, %r5, %r5, %r5};\n"
    waited = "@%p0 cp.async.bulk.wait_group 0;\n"
    store(waited, None, fill + FENCE + "bar.sync 0;")
    with pytest.warns(ProxyWarning):
        store(waited, None, fill + "bar.sync 0;")
    with pytest.raises((SharedRace, UninitialisedRead)):
        store(waited, None, fill + FENCE)


def test_labels_in_braces_are_local():
    """Inline assembly has its own `again` each time."""
    loop = "{{\nagain: add.u32 %d, %d, {0};\nsetp.lt.u32 %p, %d, {1};\n@%p bra again;\n}}"
    lines = [".reg .b32 %d;", ".reg .pred %p;", "mov.u32 %d, 0;", loop.format(1, 5), loop.format(100, 205)]
    assert set(run_instruction(lines, {}, ["%d"])["%d"]) == {205}
