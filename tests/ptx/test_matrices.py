"""ldmatrix, stmatrix and mma.sync against the tables in `isa.py`, and what they report."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import (
    DivergentBarrier,
    Misaligned,
    OutOfBounds,
    Program,
    SharedRace,
    UninitialisedRead,
    run_instruction,
)
from tests.ptx.texts import kernel

BYTES = 4096


def registers(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def declared(*prefixes: tuple[str, int]) -> list[str]:
    return [f".reg .b32 %{prefix}<{count}>;" for prefix, count in prefixes]


def rows(random: np.random.Generator, count: int) -> np.ndarray:
    """Offsets of 16 bytes each, none twice, for the lanes that give them; other lanes' must not matter."""
    at = random.permutation(BYTES // 16)[: isa.WARP] * 16
    at[8 * count :] = 0xFFFFFFF0
    return at


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, trans, random):
    shared, at = random.bytes(BYTES), rows(random, count)
    line = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers('d', count)}, [%at];"
    names = [f"%d{i}" for i in range(count)]
    got = run_instruction(
        [*declared(("d", count)), ".reg .b32 %at;", line], {"%at": at}, names, shared=shared
    )
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


def product(form: str, a: list, b: list, c: list) -> np.ndarray:
    """The bits of the 16 x 8 matrix that the emulator gives."""
    counts = ("d", 4), ("a", 4), ("b", 2), ("c", 4)
    line = f"mma.sync.aligned.{form} {', '.join(registers(*each) for each in counts)};"
    inputs = {f"%{n}{i}": v for n, vs in (("a", a), ("b", b), ("c", c)) for i, v in enumerate(vs)}
    got = run_instruction([*declared(*counts), line], inputs, [f"%d{i}" for i in range(4)])
    words = [np.asarray(got[f"%d{i}"]).astype(np.uint64) for i in range(4)]
    return isa.gathered(words, (16, 8), isa.place_c, 1)


@pytest.mark.parametrize(("kind", "unit"), (("bf16", 1.0), ("f16", 1.0), ("f16", 2.0**-24)))
def test_mma_is_exact(kind, unit, random):
    """With each position of A and B telling itself apart: a wrong lane or half gives a wrong number.

    Multiples of 2^-24 are subnormal in f16.
    """
    left, right = random.integers(-9, 10, (16, 16)) * unit, random.integers(-9, 10, (16, 8))
    added = (random.integers(-1000, 1000, (16, 8)) * unit).astype(np.float32)

    def patterns(values: np.ndarray) -> np.ndarray:
        if kind == "bf16":
            return isa.from_floats(isa.nearest_bf16(values.astype(np.float32)), "bf16")
        return isa.from_floats(values.astype(np.float16), "f16")

    a, b = isa.scattered(patterns(left), 4, isa.place_a, 2), isa.scattered(patterns(right), 2, isa.place_b, 2)
    c = isa.scattered(isa.from_floats(added, "f32"), 4, isa.place_c, 1)
    found = product(f"m16n8k16.row.col.f32.{kind}.{kind}.f32", a, b, c)
    np.testing.assert_array_equal(isa.to_floats(found, "f32"), left @ right + added)


def test_mma_of_bytes(random):
    """m16n8k32: a register holds four bytes of a row of A or a column of B."""
    left, right = (random.integers(-128, 128, shape) for shape in ((16, 32), (32, 8)))
    added = random.integers(-(2**31), 2**31, (16, 8))
    added[:2] = [2**31 - 1], [-(2**31)]  # sums end at the limits

    def packed(rows: np.ndarray) -> np.ndarray:
        """(…, 4 n) bytes as (…, n) words, the first byte lowest."""
        return np.ascontiguousarray(rows.astype(np.int8)).view(np.uint32).astype(np.uint64)

    words = packed(left), packed(right.T)  # [16, 8], [8, 8]
    group, member = np.arange(32) // 4, np.arange(32) % 4
    a = [words[0][group + 8 * (r % 2), member + 4 * (r // 2)] for r in range(4)]
    b = [words[1][group, member + 4 * r] for r in range(2)]
    c = isa.scattered(isa.from_integers(added.ravel(), "s32").reshape(16, 8), 4, isa.place_c, 1)
    found = product("m16n8k32.row.col.satfinite.s32.s8.s8.s32", a, b, c)
    expected = np.clip(left @ right + added, -(2**31), 2**31 - 1)
    np.testing.assert_array_equal(isa.to_integers(found.ravel(), "s32"), expected.ravel())


LOAD = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r1];"
STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r0, %r0, %r0, %r0};"
FILL = "st.shared.v4.b32 [%r1], {%r0, %r0, %r0, %r0};"


def launch(body: str, threads: int = 32, shared: int = 1024) -> None:
    """%r0 is the thread, %r1 the place of its 16 bytes, %r2 that of all."""
    start = "mov.u32 %r0, %tid.x; mov.u32 %r2, memory; mad.lo.u32 %r1, %r0, 16, %r2;"
    program = Program(kernel(f"{start}\n{body}", ".param .u64 out", shared=shared, target="sm_90"))
    program.launch("k", (1, 1, 1), (threads, 1, 1), [np.zeros(64, np.int32)])


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
@pytest.mark.parametrize(("first", "second"), [(FILL, LOAD), (STORE, LOAD), (STORE, FILL)])
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
