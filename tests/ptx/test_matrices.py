"""ldmatrix, stmatrix, movmatrix and mma.sync against the tables in `isa.py`, and what they report."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import DivergentBarrier, Misaligned, OutOfBounds, Program, SharedRace
from tests.ptx.emulator import UninitialisedRead, run_instruction

LANES = np.arange(isa.WARP)
BYTES = 4096


@pytest.fixture
def random(request):
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def registers(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def declared(*prefixes: tuple[str, int]) -> list[str]:
    return [f".reg .b32 %{prefix}<{count}>;" for prefix, count in prefixes]


def rows(random: np.random.Generator, count: int) -> np.ndarray:
    """Offsets of 16 bytes each, none twice, for the lanes that give them; the others' must not matter."""
    at = random.permutation(BYTES // 16)[: isa.WARP] * 16
    at[8 * count :] = 0xFFFFFFF0
    return at


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans, random):
    shared, at = random.bytes(BYTES), rows(random, count)
    line = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers('d', count)}, [%at];"
    names = [f"%d{i}" for i in range(count)]
    got = run_instruction([*declared(("d", count)), ".reg .b32 %at;", line], {"%at": at}, names, shared=shared)
    for name, want in zip(names, isa.ldmatrix(shared, at, count, bool(trans)), strict=True):
        np.testing.assert_array_equal(np.asarray(got[name]).astype(np.uint64), want)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count, trans, random):
    shared, at = random.bytes(BYTES), rows(random, count)
    values = [random.integers(0, 1 << 32, isa.WARP, dtype=np.uint64) for _ in range(count)]
    line = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%at], {registers('s', count)};"
    inputs = {"%at": at} | {f"%s{i}": v for i, v in enumerate(values)}
    lines = [*declared(("s", count)), ".reg .b32 %at;", line]
    got = run_instruction(lines, inputs, [], shared=shared, target="sm_90")
    assert got["shared"] == isa.stmatrix(shared, at, values, bool(trans))


def test_movmatrix(random):
    values = random.integers(0, 1 << 32, isa.WARP, dtype=np.uint64)
    lines = [*declared(("s", 1), ("d", 1)), "movmatrix.sync.aligned.m8n8.trans.b16 %d0, %s0;"]
    got = run_instruction(lines, {"%s0": values}, ["%d0"])
    np.testing.assert_array_equal(np.asarray(got["%d0"]).astype(np.uint64), isa.movmatrix(values))


SHAPES = [("bf16", 16), ("bf16", 8), ("f16", 16), ("f16", 8), ("tf32", 8)]


def product(kind: str, k: int, a: list, b: list, c: list) -> np.ndarray:
    """The float32 16 x 8 matrix that the emulator gives."""
    lines = declared(("a", len(a)), ("b", len(b)), ("c", 4), ("d", 4))
    left, right = registers("a", len(a)), registers("b", len(b))
    lines.append(
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 "
        f"{registers('d', 4)}, {left}, {right}, {registers('c', 4)};"
    )
    inputs = {f"%{n}{i}": v for n, vs in (("a", a), ("b", b), ("c", c)) for i, v in enumerate(vs)}
    got = run_instruction(lines, inputs, [f"%d{i}" for i in range(4)])
    words = [np.asarray(got[f"%d{i}"]).astype(np.uint64) for i in range(4)]
    return isa.to_floats(isa.gathered(words, (16, 8), isa.place_c, 1), "f32")


def fragments(kind: str, k: int, left: np.ndarray, right: np.ndarray, added: np.ndarray) -> tuple[list, ...]:
    """Registers that hold three matrices of patterns."""
    if kind == "tf32":
        a, b = isa.scattered(left, 4, isa.place_a_tf32, 1), isa.scattered(right, 2, isa.place_b_tf32, 1)
    elif k == 16:
        a, b = isa.scattered(left, 4, isa.place_a, 2), isa.scattered(right, 2, isa.place_b, 2)
    else:
        a, b = isa.scattered(left, 2, isa.place_a_k8, 2), isa.scattered(right, 1, isa.place_b_k8, 2)
    return a, b, isa.scattered(added, 4, isa.place_c, 1)


def patterns(kind: str, values: np.ndarray) -> np.ndarray:
    if kind == "tf32":
        return isa.from_floats(values.astype(np.float32), "f32") & np.uint64(0xFFFFE000)
    if kind == "bf16":
        return isa.from_floats(isa.nearest_bf16(values.astype(np.float32)), "bf16")
    return isa.from_floats(values.astype(np.float16), "f16")


@pytest.mark.parametrize("kind, k", SHAPES)
def test_mma_of_integers_is_exact(kind, k, random):
    """With each position of A and B telling itself apart: a wrong lane or half gives a wrong integer."""
    left, right = random.integers(-9, 10, (16, k)), random.integers(-9, 10, (k, 8))
    added = random.integers(-1000, 1000, (16, 8))
    words = patterns(kind, left), patterns(kind, right), isa.from_floats(added.astype(np.float32), "f32")
    got = product(kind, k, *fragments(kind, k, *words))
    np.testing.assert_array_equal(got, left @ right + added)


@pytest.mark.parametrize("kind, k", SHAPES)
def test_mma_of_any_bits(kind, k, random):
    """Infinities, NaN and subnormal numbers as in float64; the error in proportion to the terms."""
    for usual in (False, True):
        words = []
        for count in (4 if k == 16 or kind == "tf32" else 2, 2 if k == 16 or kind == "tf32" else 1, 4):
            some = random.integers(0, 1 << 32, (count, isa.WARP), dtype=np.uint64)
            # an exponent of half the range or less: no infinities and NaN
            words.append(list(some & np.uint64(0xBFFFBFFF) if usual else some))
        got, want = product(kind, k, *words), isa.mma(*words, kind, k)
        bound = isa.mma_bound(*words, kind, k)
        finite = np.isfinite(bound) & (bound < 2.0**127)
        assert finite.any() or not usual
        error = np.abs(got.astype(np.float64) - want)[finite]
        assert (error <= 20 * 2.0**-23 * bound[finite] + 2.0**-149).all()
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_array_equal(np.isposinf(got[~finite]), np.isposinf(want.astype(np.float32)[~finite]))


def one_warp(body: str, threads: str = "32", shared: int = 1024) -> Program:
    return Program(
        f""".version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 out)
.reqntid {threads}, 1, 1
{{
.reg .pred %p<4>;
.reg .b32 %r<16>;
.reg .b64 %rd<4>;
.shared .align 16 .b8 memory[{shared}];
mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 4;
mov.u32 %r2, memory;
add.u32 %r1, %r1, %r2;
{body}
ret;
}}
"""
    )


LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r1];"
STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r0, %r0, %r0, %r0};"
FILL = "st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};"


def launch(body: str, threads: int = 32, shared: int = 1024) -> None:
    one_warp(body, str(threads), shared).launch("k", (1, 1, 1), (threads, 1, 1), [np.zeros(64, np.int32)])


def test_matrices_go_through_what_was_stored():
    launch(f"{FILL} bar.warp.sync -1; {LOAD} {STORE}")


def test_rows_that_nobody_wrote():
    with pytest.raises(UninitialisedRead, match="ldmatrix"):
        launch(LOAD)


def test_a_register_that_nobody_wrote():
    with pytest.raises(UninitialisedRead, match="stmatrix"):
        launch("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r1], {%r9};")


@pytest.mark.parametrize("line", [LOAD, STORE])
def test_rows_outside_and_between(line):
    with pytest.raises(OutOfBounds):
        launch(f"{FILL} {line}", shared=512 - 16)
    with pytest.raises(Misaligned):
        launch(f"{FILL} add.u32 %r1, %r1, 8; {line}", shared=1024)


@pytest.mark.parametrize("line", [LOAD, STORE])
def test_a_part_of_the_warp(line):
    with pytest.raises(DivergentBarrier):
        launch(f"{FILL} setp.lt.u32 %p0, %r0, 31; @%p0 {line}")


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize("first, second", [(FILL, LOAD), (STORE, LOAD), (STORE, FILL)])
def test_matrices_of_another_warp(first, second, barrier):
    """Warp 1 writes, warp 0 reads or writes the same rows."""
    body = f"""
and.b32 %r3, %r0, 31; shl.b32 %r1, %r3, 4; add.u32 %r1, %r1, %r2;
setp.lt.u32 %p0, %r0, 32;
@%p0 bra SKIP;
{first}
SKIP:
{"bar.sync 0;" if barrier else ""}
setp.ge.u32 %p1, %r0, 32;
@%p1 bra DONE;
{second}
DONE:
"""
    if barrier:
        launch(body, 64)
    else:
        # a load that comes first finds nothing written
        with pytest.raises((SharedRace, UninitialisedRead)):
            launch(body, 64)


def test_stores_race_with_loads_of_another_warp():
    body = f"""
{FILL}
bar.sync 0;
and.b32 %r3, %r0, 31; shl.b32 %r1, %r3, 4; add.u32 %r1, %r1, %r2;
{LOAD}
setp.lt.u32 %p0, %r0, 32;
@%p0 bra DONE;
{STORE}
DONE:
"""
    for seed in range(2):
        with pytest.raises(SharedRace):
            one_warp(body, "64").launch("k", (1, 1, 1), (64, 1, 1), [np.zeros(64, np.int32)], seed=seed)
