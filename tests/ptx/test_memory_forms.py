"""Loads, stores and atomics, one form at a time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import Program
from tests.ptx.texts import kernel

TWO = ".param .u64 source, .param .u64 target"


def launch(
    body: str, arguments: list, threads: int = 32, blocks: int = 1, parameters: str = TWO, shared: int = 2048
) -> None:
    program = Program(kernel(body, parameters, shared=shared))
    program.launch("k", (blocks, 1, 1), (threads, 1, 1), arguments)


# ---- loads and stores


SIZES = [(count, size) for count in (1, 2, 4) for size in (1, 2, 4, 8) if count * size <= 16]


@pytest.mark.parametrize("hints", ("", ".nc.L1::evict_last"), ids=("plain", "hints"))
@pytest.mark.parametrize(("count", "size"), SIZES)
def test_loads_and_stores(count, size, hints, random):
    """From global memory through shared memory to global memory."""
    prefix, start = {1: ("h", 1), 2: ("h", 1), 4: ("r", 10), 8: ("rd", 5)}[size]
    names = [f"%{prefix}{start + i}" for i in range(count)]
    vector = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    kind = f"{f'v{count}.' if count > 1 else ''}{'u' if hints else 'b'}{8 * size}"
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
ld.global{hints}.{kind} {vector}, [%rd0 + {count * size}];
st.shared.{kind} [%r2], {vector};
bar.sync 0;
ld.shared.{kind} {vector}, [%r4];
st.global.{kind} [%rd1], {vector};
"""
    source = random.integers(0, 256, (33, count * size)).astype(np.uint8)
    target = np.zeros((32, count * size), np.uint8)
    launch(body, [source, target])
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
        launch(body, [source, target])
        patterns = source.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[isa.width(kind)]).astype(np.uint64)
        want = isa.from_integers(isa.to_integers(patterns, kind), f"b{register}")
        np.testing.assert_array_equal(target.astype(np.uint64), want)


# ---- atomics


ADD = "atom.global.gpu.acq_rel.add.u32"
ATOMICS = [ADD, "red.global.add.u32", "atom.shared.add.u32", "atom.global.add.f32"]


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
    launch(body, [counter, target], 64, blocks, ".param .u64 counter, .param .u64 target")
    total = 64 if shared else 64 * blocks
    if not shared:
        sum_of = counter.view(np.float32) if form.endswith("f32") else counter
        assert sum_of[0] == total
    if result:
        got = target.view(np.float32) if form.endswith("f32") else target
        expected = np.tile(np.arange(64), blocks) if shared else np.arange(total)
        np.testing.assert_array_equal(np.sort(got), np.sort(expected))
