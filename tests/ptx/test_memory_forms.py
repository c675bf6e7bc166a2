"""Loads, stores, asynchronous copies and atomics, one form at a time."""

from __future__ import annotations

import itertools
import re
import zlib

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import Misaligned, OutOfBounds, Program, SharedRace, UninitialisedRead
from tests.ptx.forms import NVCC, TRITON

SCHEDULES = ("late", "early")


@pytest.fixture
def random(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def program(body: str, threads: int = 32, shared: int = 2048, parameters: str = ".param .u64 out") -> Program:
    return Program(
        f""".version 8.7
.target sm_80
.address_size 64
.visible .entry k({parameters})
.reqntid {threads}, 1, 1
{{
.reg .pred %p<8>;
.reg .b16 %h<8>;
.reg .b32 %r<32>;
.reg .b64 %rd<16>;
.shared .align 16 .b8 memory[{shared}];
{body}
ret;
}}
"""
    )


def launch(body: str, arguments: list, threads: int = 32, **more: object) -> None:
    shape = {name: more.pop(name) for name in ("shared", "parameters") if name in more}
    program(body, threads, **shape).launch("k", (1, 1, 1), (threads, 1, 1), arguments, **more)


# ---- loads and stores


def moved(form: str) -> tuple[int, int, str]:
    """(values, bytes of each, register prefix) of a load or store."""
    count = int((re.search(r"\.v(\d)", form) or ["", "1"])[1])
    size = int(re.search(r"(\d+)$", form)[1]) // 8
    return count, size, {1: "h", 2: "h", 4: "r", 8: "rd"}[size]


MOVES = sorted({f for f in (*TRITON, *NVCC) if re.match(r"(ld|st)\.(global|shared)", f)})


@pytest.mark.parametrize("form", MOVES)
def test_loads_and_stores(form, random):
    """From global memory through shared memory to global memory; the form takes part, b forms do the rest."""
    count, size, prefix = moved(form)
    start = {"h": 1, "r": 10, "rd": 5}[prefix]
    names = [f"%{prefix}{start + i}" for i in range(count)]
    vector = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    plain = f"{f'v{count}.' if count > 1 else ''}b{8 * size}"

    def step(opcode: str, space: str) -> str:
        return form if form.startswith(f"{opcode}.{space}") else f"{opcode}.{space}.{plain}"

    body = f"""
ld.param.u64 %rd0, [source];
ld.param.u64 %rd1, [target];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd2, %r0, {count * size};
add.s64 %rd0, %rd0, %rd2;
add.s64 %rd1, %rd1, %rd2;
mov.u32 %r1, memory;
mad.lo.s32 %r2, %r0, {count * size}, %r1;
sub.s32 %r3, 31, %r0;
mad.lo.s32 %r4, %r3, {count * size}, %r1;
{step("ld", "global")} {vector}, [%rd0 + {count * size}];
{step("st", "shared")} [%r2], {vector};
bar.sync 0;
{step("ld", "shared")} {vector}, [%r4];
{step("st", "global")} [%rd1], {vector};
"""
    source = random.integers(0, 256, (33, count * size)).astype(np.uint8)
    target = np.zeros((32, count * size), np.uint8)
    launch(body, [source, target], parameters=".param .u64 source, .param .u64 target")
    np.testing.assert_array_equal(target, source[1:][::-1])


@pytest.mark.parametrize("kind", ["s8", "u8", "s16", "u16", "s32", "u32"])
def test_loads_extend_to_the_register(kind, random):
    """By the type's sign, up to 32 or 64 bits."""
    for register, prefix in ((32, "r"), (64, "rd")):
        if isa.width(kind) >= register:
            continue
        body = f"""
ld.param.u64 %rd0, [source];
ld.param.u64 %rd1, [target];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd2, %r0, {isa.width(kind) // 8};
mul.wide.u32 %rd3, %r0, {register // 8};
add.s64 %rd0, %rd0, %rd2;
add.s64 %rd1, %rd1, %rd3;
ld.global.{kind} %{prefix}5, [%rd0];
st.global.b{register} [%rd1], %{prefix}5;
"""
        source = random.integers(0, 256, 32 * isa.width(kind) // 8).astype(np.uint8)
        target = np.zeros(32, {32: np.uint32, 64: np.uint64}[register])
        launch(body, [source, target], parameters=".param .u64 source, .param .u64 target")
        patterns = source.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[isa.width(kind)]).astype(np.uint64)
        want = isa.from_integers(isa.to_integers(patterns, kind), f"b{register}")
        np.testing.assert_array_equal(target.astype(np.uint64), want)


@pytest.mark.parametrize("kind", ["b32", "b64", "s32", "u32", "u64", "f32", "f64", "v2.u32"])
def test_loads_of_parameters(kind):
    """At offsets of a struct given by value, with negative numbers."""
    size = 8 if kind in ("b64", "u64", "f64", "v2.u32") else 4
    loaded = {4: "%r5", 8: "%rd5"}[size] if kind != "v2.u32" else "{%r5, %r6}"
    pack = "mov.b64 %rd5, {%r5, %r6};" if kind == "v2.u32" else ""
    body = f"""
ld.param.{kind} {loaded}, [given + 16];
{pack}
ld.param.u64 %rd0, [target];
st.global.b{8 * size} [%rd0], {"%r5" if size == 4 else "%rd5"};
"""
    given = bytes(range(100, 132))
    target = np.zeros(8, np.uint8)
    launch(body, [given, target], parameters=".param .align 8 .b8 given[32], .param .u64 target")
    assert target.tobytes()[:size] == given[16 : 16 + size]


# ---- cp.async


COPY = """
ld.param.u64 %rd0, [source];
ld.param.u64 %rd1, [target];
mov.u32 %r0, %tid.x;
mul.wide.u32 %rd2, %r0, 16;
add.s64 %rd0, %rd0, %rd2;
add.s64 %rd1, %rd1, %rd2;
mov.u32 %r1, memory;
mad.lo.s32 %r2, %r0, 16, %r1;
add.s32 %r3, %r2, 1024;
mov.b32 %r8, 0x5a5a5a5a;
"""
STORED = """
ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];
st.global.v4.b32 [%rd1], {%r10, %r11, %r12, %r13};
"""
TWO = ".param .u64 source, .param .u64 target"


def copied(lines: str, random: np.random.Generator, **more: object) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel brings from `source`, 16 bytes per lane."""
    source = random.integers(0, 256, (96, 16)).astype(np.uint8)
    target = np.zeros((32, 16), np.uint8)
    launch(COPY + lines + STORED, [source, target], parameters=TWO, shared=4096, **more)
    return source, target


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_copies_fill_with_zeros(kind, size, schedule, random):
    """The source size may be a number, a register, or missing; what lies beyond it is not touched."""
    fill = "st.shared.v4.b32 [%r2], {%r8, %r8, %r8, %r8};\n"
    for taken in sorted({0, 1, size // 2, size - 1, size, None}, key=str):
        given = "" if taken is None else f", {taken}"
        if taken == size // 2:
            given = ", %r4"
            fill += f"mov.u32 %r4, {taken};\n"
        copy = f"{fill} cp.async.{kind}.shared.global [%r2], [%rd0], {size}{given};\n"
        source, target = copied(
            copy + "cp.async.commit_group; cp.async.wait_group 0;", random, schedule=schedule
        )
        kept = size if taken is None else taken
        want = np.full((32, 16), 0x5A, np.uint8)
        want[:, :size] = 0
        want[:, :kept] = source[:32, :kept]
        np.testing.assert_array_equal(target, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_of_nothing_touch_no_source(schedule, random):
    """As Triton masks loads: source size 0 and a wild address."""
    lines = """
setp.lt.u32 %p0, %r0, 7;
selp.b32 %r4, 16, 0, %p0;
selp.b64 %rd3, %rd0, 65536, %p0;
cp.async.cg.shared.global [ %r2 + 0 ], [ %rd3 + 0 ], 0x10, %r4;
cp.async.commit_group;
cp.async.wait_group 0;
"""
    source, target = copied(lines, random, schedule=schedule)
    np.testing.assert_array_equal(target[:7], source[:7])
    assert not target[7:].any()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_leaves_the_last_groups(schedule, random):
    """Three groups, two different waits: the one that is read has landed, a later one may not have."""
    three = "".join(
        f"cp.async.cg.shared.global [%r{r}], [%rd0 + {512 * i}], 16; cp.async.commit_group;\n"
        for i, r in enumerate((2, 3, 4))
    )
    setup = "add.s32 %r4, %r2, 2048;\n"
    for pending in (0, 1, 2):
        source, target = copied(f"{setup}{three}cp.async.wait_group {pending};", random, schedule=schedule)
        np.testing.assert_array_equal(target, source[:32])
    # the third group is read after all were waited for
    moves = f"{setup}{three}cp.async.wait_group 0; mov.b32 %r2, %r4;"
    source, target = copied(moves, random, schedule=schedule)
    np.testing.assert_array_equal(target, source[64:])


@pytest.mark.parametrize(("register", "pending"), [(3, 2), (3, 3), (4, 1), (2, 3)])
def test_a_group_that_was_not_waited_for(register, pending, random):
    """Late: what a wait leaves out is still in flight."""
    three = "".join(
        f"cp.async.cg.shared.global [%r{r}], [%rd0 + {512 * i}], 16; cp.async.commit_group;\n"
        for i, r in enumerate((2, 3, 4))
    )
    lines = f"add.s32 %r4, %r2, 2048;\n{three}cp.async.wait_group {pending}; mov.b32 %r2, %r{register};"
    with pytest.raises(UninitialisedRead, match="flight"):
        copied(lines, random, schedule="late")


def test_a_copy_in_no_group(random):
    """cp.async.wait_all waits for it, wait_group does not."""
    copy = "cp.async.cg.shared.global [%r2], [%rd0], 16;\n"
    source, target = copied(f"{copy} cp.async.wait_all;", random)
    np.testing.assert_array_equal(target, source[:32])
    with pytest.raises(UninitialisedRead, match="flight"):
        copied(f"{copy} cp.async.wait_group 0;", random)


def test_stores_under_a_copy(random):
    with pytest.raises(SharedRace):
        copied(
            "cp.async.cg.shared.global [%r2], [%rd0], 16; st.shared.b32 [%r2], %r8; cp.async.wait_all;",
            random,
        )


def test_the_source_changes_under_a_copy(random):
    """A late copy takes what is there when it lands."""
    lines = """
cp.async.cg.shared.global [%r2], [%rd1], 16;
st.global.v4.b32 [%rd1], {%r8, %r8, %r8, %r8};
cp.async.wait_all;
"""
    _, target = copied(lines, random, schedule="late")
    assert (target == 0x5A).all()
    _, target = copied(lines, random, schedule="early")
    assert (target == 0).all()


def test_copies_of_another_warp_need_a_barrier(random):
    """Each warp waits for its own copies; only the barrier behind makes them those of all."""
    lines = """
ld.param.u64 %rd0, [source]; ld.param.u64 %rd1, [target];
mov.u32 %r0, %tid.x; mul.wide.u32 %rd2, %r0, 16; add.s64 %rd0, %rd0, %rd2; add.s64 %rd1, %rd1, %rd2;
mov.u32 %r1, memory; mad.lo.s32 %r2, %r0, 16, %r1;
cp.async.cg.shared.global [%r2], [%rd0], 16; cp.async.commit_group;
{first}
xor.b32 %r3, %r0, 32; mad.lo.s32 %r2, %r3, 16, %r1;
{second}
"""
    source = random.integers(0, 256, (64, 16)).astype(np.uint8)

    def run(first: str) -> np.ndarray:
        target = np.zeros((64, 16), np.uint8)
        body = lines.format(first=first, second=STORED)
        launch(body, [source, target], threads=64, parameters=TWO)
        return target

    target = run("cp.async.wait_group 0; bar.sync 0;")
    np.testing.assert_array_equal(target, source[np.arange(64) ^ 32])
    with pytest.raises((SharedRace, UninitialisedRead)):
        run("cp.async.wait_group 0;")
    with pytest.raises((SharedRace, UninitialisedRead)):
        run("bar.sync 0; cp.async.wait_group 0;")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copies_outside(schedule, random):
    with pytest.raises(OutOfBounds):
        copied(
            "cp.async.cg.shared.global [%r2], [%rd0 + 1552], 16; cp.async.wait_all;",
            random,
            schedule=schedule,
        )
    with pytest.raises(OutOfBounds):
        copied(
            "cp.async.cg.shared.global [%r2 + 4096], [%rd0], 16; cp.async.wait_all;",
            random,
            schedule=schedule,
        )
    with pytest.raises(Misaligned):
        copied(
            "cp.async.cg.shared.global [%r2 + 4], [%rd0], 16; cp.async.wait_all;", random, schedule=schedule
        )
    with pytest.raises(Misaligned):
        copied(
            "cp.async.cg.shared.global [%r2], [%rd0 + 8], 16; cp.async.wait_all;", random, schedule=schedule
        )


# ---- atomics


ADD = "atom.global.gpu.acq_rel.add.u32"
ATOMICS = [ADD, "atom.global.add.u32", "red.global.add.u32", "atom.shared.add.u32", "atom.global.add.f32"]


@pytest.mark.parametrize(("form", "blocks"), list(itertools.product(ATOMICS, (1, 3))))
def test_atomics_count(form, blocks):
    """Every lane gets another number, and the sum counts all; for those that the emulator knows."""
    shared = ".shared" in form
    one = "0f3F800000" if form.endswith("f32") else "1"
    place = "%r1" if shared else "%rd0"
    result = "" if form.startswith("red") else "%r5, "
    body = f"""
ld.param.u64 %rd0, [counter];
ld.param.u64 %rd1, [target];
mov.u32 %r0, %tid.x;
mov.u32 %r1, memory;
mov.u32 %r2, %ctaid.x;
mov.u32 %r5, 0;
setp.eq.u32 %p0, %r0, 0;
@%p0 st.shared.b32 [%r1], %r5;
bar.sync 0;
{form} {result}[{place}], {one};
mad.lo.s32 %r3, %r2, 64, %r0;
mul.wide.u32 %rd2, %r3, 4;
add.s64 %rd1, %rd1, %rd2;
st.global.b32 [%rd1], %r5;
"""
    counter, target = np.zeros(1, np.int32), np.full(64 * blocks, -1, np.int32)
    made = program(body, 64, parameters=".param .u64 counter, .param .u64 target")
    made.launch("k", (blocks, 1, 1), (64, 1, 1), [counter, target])
    total = 64 if shared else 64 * blocks
    if not shared:
        sum_of = counter.view(np.float32) if form.endswith("f32") else counter
        assert sum_of[0] == total
    if result:
        got = target.view(np.float32) if form.endswith("f32") else target
        expected = np.tile(np.arange(64), blocks) if shared else np.arange(total)
        np.testing.assert_array_equal(np.sort(got), np.sort(expected))
