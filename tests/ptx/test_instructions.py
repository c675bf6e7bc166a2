"""Each instruction of the emulator by itself, against `isa.py`: random numbers and hostile ones."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import run_instruction

INTEGERS = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF]
INTEGERS += [0x10000, 0xFF00FF, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0x12345678, 0x4321FEDC]
INTEGERS += [1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1, (1 << 64) - 128]
# bit patterns: zeros, ones, subnormal numbers, the largest, infinities, NaNs, ties of rounding to bf16 and
# f16, limits of integers, limits of 2^x
FLOAT32 = [0x00000000, 0x3F800000, 0x3F800001, 0x3F000000, 0x3FC00000, 0x40200000, 0x00000001, 0x007FFFFF]
FLOAT32 += [0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x3F808000, 0x3F818000]
FLOAT32 += [0x3F808001, 0x3F807FFF, 0x7F7F8000, 0x7F7F7FFF, 0x00008000, 0x00018000, 0x477FEFFF, 0x477FF000]
FLOAT32 += [0x33000000, 0x33000001, 0x33800000, 0x33C00000, 0x387FE000, 0x3A000FFF, 0x4B7FFFFF, 0x4EFFFFFF]
FLOAT32 += [0x4F000000, 0x4F800000, 0x5F000000, 0x5F800000, 0x43000000, 0x42FE0000, 0x42FDFFFF, 0x42FC0000]
FLOAT32 += [0x43150000, 0x43160000, 0x3DCCCCCD, 0x40490FDB, 0x3EAAAAAB]
FLOAT32 += [pattern | 0x80000000 for pattern in FLOAT32]
FLOAT16 = [0x0000, 0x3C00, 0x3C01, 0x3800, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0x7C00, 0x7E00, 0x7C01, 0x7FFF]
FLOAT16 += [pattern | 0x8000 for pattern in FLOAT16]
BFLOAT16 = [0x0000, 0x3F80, 0x3F81, 0x3F00, 0x0001, 0x007F, 0x0080, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81, 0x7FFF]
BFLOAT16 += [pattern | 0x8000 for pattern in BFLOAT16]
FLOAT64 = [0, 0x3FF0000000000000, 1, 0x7FF0000000000000, 0x7FF8000000000000, 0x7FEFFFFFFFFFFFFF]
FLOAT64 += [0x3FF0000010000000, 0x3FF0000030000000, 0x3FF0000010000001]
FLOAT64 += [0x36A0000000000000, 0x47EFFFFFF0000000]
FLOAT64 += [pattern | 1 << 63 for pattern in FLOAT64]


def hostile(kind: str) -> list[int]:
    """Patterns of a type."""
    if kind == "pred":
        return [0, 1]
    if kind in ("f16x2", "bf16x2"):
        short = hostile(kind[:-2])
        return [a | b << 16 for a, b in zip(short, short[5:] + short[:5], strict=True)]
    known = {"f32": FLOAT32, "f16": FLOAT16, "bf16": BFLOAT16, "f64": FLOAT64}
    mask = (1 << isa.width(kind)) - 1
    return known.get(kind) or sorted({pattern & mask for pattern in INTEGERS})


def random_patterns(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    """Half of them any bits, half of a usual size: small integers, numbers about 1."""
    mask = (1 << isa.width(kind)) - 1
    some = random.integers(0, 1 << 64, count, dtype=np.uint64) & np.uint64(mask)
    if kind in ("f32", "f64", "f16"):
        dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[kind]
        usual = isa.from_floats(random.standard_normal(count).astype(dtype), kind)
    elif kind == "bf16":
        usual = isa.from_floats(isa.nearest_bf16(random.standard_normal(count).astype(np.float32)), kind)
    elif kind.endswith("x2"):
        usual = random_patterns(kind[:-2], count, random)
        usual = usual | random_patterns(kind[:-2], count, random) << np.uint64(16)
    else:
        usual = random.integers(0, 70, count).astype(np.uint64) & np.uint64(mask)
    return np.where(np.arange(count) % 2 == 0, some, usual)


def operands(form: isa.Form, random: np.random.Generator) -> list[np.ndarray]:
    """All pairs of hostile patterns (of three or more operands, many), then random ones; a multiple of 32."""
    lists = [hostile(kind) for kind in form.operands]
    if len(lists) <= 2:
        rows = list(itertools.product(*lists))
        if len(rows) > 1600:
            # the first of each list with each, and with minus: zeros, infinities, NaN
            first = [(some[:16] + some[len(some) // 2 :][:16]) for some in lists]
            rows = [*itertools.product(*first), *(rows[i] for i in random.permutation(len(rows))[:800])]
    else:
        rows = [
            tuple(some[i] for some, i in zip(lists, at, strict=True)) for at in _indices(lists, 1200, random)
        ]
    extra = 192 + -len(rows) % 32
    columns = [np.array(column, np.uint64) for column in zip(*rows, strict=True)]
    return [
        np.concatenate([column, random_patterns(kind, extra, random)])
        for column, kind in zip(columns, form.operands, strict=True)
    ]


def _indices(lists: list[list[int]], count: int, random: np.random.Generator) -> np.ndarray:
    return np.stack([random.integers(0, len(some), count) for some in lists], 1)


def register_bits(kind: str) -> int:
    """Of the register that holds a value; predicates travel as 32 bits, bytes as 16."""
    return 32 if kind == "pred" else max(isa.width(kind), 16)


def lines_of(form: isa.Form) -> tuple[list[str], list[str], list[str]]:
    """PTX for one instruction between registers, and the names that hold its operands and its results."""
    declared, before, after, sources, results = [], [], [], [], []
    names = {}
    for i, kind in enumerate(form.operands):
        names[f"a{i}"] = f"%a{i}"
        sources.append(f"%a{i}")
        declared.append(f".reg .b{register_bits(kind)} %a{i};")
        if kind == "pred":
            declared.append(f".reg .pred %pa{i};")
            before.append(f"setp.ne.b32 %pa{i}, %a{i}, 0;")
            names[f"a{i}"] = f"%pa{i}"
    for i, kind in enumerate(form.results):
        names[f"d{i}"] = f"%d{i}"
        results.append(f"%d{i}")
        declared.append(f".reg .b{register_bits(kind)} %d{i};")
        if kind == "pred":
            declared.append(f".reg .pred %pd{i};")
            after.append(f"selp.b32 %d{i}, 1, 0, %pd{i};")
            names[f"d{i}"] = f"%pd{i}"
    return [*declared, *before, form.text().format(**names), *after], sources, results


def run(form: isa.Form, columns: list[np.ndarray]) -> list[np.ndarray]:
    """The emulator's results."""
    lines, sources, results = lines_of(form)
    found = run_instruction(lines, dict(zip(sources, columns, strict=True)), results)
    return [found[name].astype(np.uint64) for name in results]


def extended(bits: np.ndarray, kind: str) -> np.ndarray:
    """What a register of 16 bits holds of a byte."""
    if kind in ("s8", "u8"):
        return isa.from_integers(isa.to_integers(bits, kind), "b16")
    return bits


def differences(form: isa.Form, columns: list[np.ndarray], got: list[np.ndarray]) -> list[str]:
    """A line for each wrong lane."""
    defined = np.ones(len(columns[0]), bool)
    if form.defined is not None:
        with np.errstate(all="ignore"):
            defined = np.asarray(form.defined(*form.values(columns)), bool)
        assert defined.any()
    wrong = []
    for kind, have, want in zip(form.results, got, form(columns), strict=True):
        same = have == extended(want, kind)
        if isa.is_float(kind):
            a, b = isa.to_floats(have, kind), isa.to_floats(want, kind)
            if kind in ("f32", "f64") or form.name.startswith(("abs", "neg")):
                same |= np.isnan(a) & np.isnan(b)
            if form.error is not None:
                relative, absolute = form.error
                with np.errstate(all="ignore"):
                    near = (
                        np.abs(a.astype(np.float64) - b) <= relative * np.abs(b.astype(np.float64)) + absolute
                    )
                same |= near & (np.signbit(a) == np.signbit(b))
        if form.name.startswith(("abs", "neg")) and kind in ("f16x2", "bf16x2"):
            same |= nan_halves(have, want, kind[:-2])
        for lane in np.flatnonzero(~same & defined):
            given = ", ".join(f"{int(c[lane]):#x}" for c in columns)
            wrong.append(f"{form.name} {given}: {int(have[lane]):#x}, expected {int(want[lane]):#x}")
    return wrong


def nan_halves(have: np.ndarray, want: np.ndarray, kind: str) -> np.ndarray:
    """Whether halves agree, or are both NaN."""
    same = np.ones(len(have), bool)
    for shift in (0, 16):
        a, b = ((w >> np.uint64(shift)) & np.uint64(0xFFFF) for w in (have, want))
        same &= (a == b) | (isa.is_nan(a, kind) & isa.is_nan(b, kind))
    return same


@pytest.mark.parametrize("opcode", sorted({name.partition(".")[0] for name in isa.FORMS}))
def test_scalar_forms(opcode):
    random, wrong = np.random.default_rng(zlib.crc32(opcode.encode())), []
    for form in isa.FORMS.values():
        if form.name.partition(".")[0] == opcode:
            columns = operands(form, random)
            wrong += differences(form, columns, run(form, columns))[:4]
    assert wrong == [], "\n".join(wrong)


def test_bytes_that_prmt_drops_need_no_value():
    """LLVM names a register that nothing writes where it packs fewer than four bytes."""
    lines = [".reg .b32 %d;", ".reg .b32 %a;", ".reg .b32 %never;", "prmt.b32 %d, %a, %never, 0x3210;"]
    given = np.arange(isa.WARP) * 0x01234567
    got = run_instruction(lines, {"%a": given}, ["%d"])
    np.testing.assert_array_equal(got["%d"], given & 0xFFFFFFFF)


@pytest.mark.parametrize("sizes", ((32, 16), (64, 32), (64, 16)), ids=str)
def test_moves_of_pieces(sizes):
    random = np.random.default_rng(1)
    for form in isa.pieces(*sizes):
        columns = [random_patterns(kind, 64, random) for kind in form.operands]
        assert differences(form, columns, run(form, columns)) == []
