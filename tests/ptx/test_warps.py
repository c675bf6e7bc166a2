"""What the lanes of a warp do together: shfl, redux, votes; against `isa.py`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import isa
from tests.ptx.emulator import run_instruction


@pytest.mark.parametrize("mode", ["bfly", "idx"])
def test_shfl(mode, random):
    """Every offset and segment; the clamp of the whole segment, and any other."""
    values = random.integers(0, 1 << 32, isa.WARP, dtype=np.uint64)
    lines = [".reg .b32 %d, %v, %by, %c, %q;", ".reg .pred %p;"]
    lines += [f"shfl.sync.{mode}.b32 %d|%p, %v, %by, %c, -1;", "selp.b32 %q, 1, 0, %p;"]
    for segment in (32, 16, 8, 4, 2, 1):
        for any_clamp in (False, True):
            clamp = np.full(isa.WARP, 31)
            offset = np.full(isa.WARP, int(random.integers(0, segment)))
            if any_clamp:
                clamp, offset = random.integers(0, 32, isa.WARP), random.integers(0, 64, isa.WARP)
            c = clamp | (32 - segment) << 8
            got = run_instruction(lines, {"%v": values, "%by": offset, "%c": c}, ["%d", "%q"])
            want, inside = isa.shfl(mode, values, offset, c)
            np.testing.assert_array_equal(np.asarray(got["%d"]).astype(np.uint64), want)
            np.testing.assert_array_equal(np.asarray(got["%q"]).astype(bool), inside)


def test_shfl_within_a_part_of_the_warp(random):
    """Lanes of the mask read each other, in a branch that other lanes do not take."""
    values = random.integers(0, 1 << 32, isa.WARP, dtype=np.uint64)
    lane = np.arange(isa.WARP)
    lines = [".reg .b32 %d;", ".reg .b32 %v;", ".reg .b32 %l;", ".reg .pred %p;"]
    lines += ["mov.b32 %d, %v;", "setp.lt.u32 %p, %l, 8;", "@%p shfl.sync.bfly.b32 %d, %v, 1, 31, 0xff;"]
    got = run_instruction(lines, {"%v": values, "%l": lane}, ["%d"])
    want = np.where(lane < 8, values[lane ^ 1], values)
    np.testing.assert_array_equal(np.asarray(got["%d"]).astype(np.uint64), want)


@pytest.mark.parametrize("kind", ("s32", "u32"))
@pytest.mark.parametrize("op", ("add", "min", "max"))
def test_redux(op, kind, random):
    for members in (0xFFFFFFFF, 0x0000FFFF, 0x80000001):
        values = random.integers(0, 1 << 32, isa.WARP, dtype=np.uint64)
        lines = [".reg .b32 %d;", ".reg .b32 %v;", ".reg .b32 %m;", ".reg .pred %p;", "mov.b32 %d, 7;"]
        lines += ["setp.ne.b32 %p, %m, 0;", f"@%p redux.sync.{op}.{kind} %d, %v, {members:#x};"]
        chosen = members >> np.arange(isa.WARP) & 1
        got = run_instruction(lines, {"%v": values, "%m": chosen}, ["%d"])
        want = np.where(chosen, isa.redux(op, values, members, kind), 7)
        np.testing.assert_array_equal(np.asarray(got["%d"]).astype(np.int64) & 0xFFFFFFFF, want)


@pytest.mark.parametrize("chance", (0.0, 0.5, 1.0))
def test_votes(chance, random):
    values = (random.random(isa.WARP) < chance).astype(np.int64)
    lines = [".reg .b32 %d, %e, %v;", ".reg .pred %p, %q;", "setp.ne.b32 %p, %v, 0;"]
    lines += ["vote.sync.ballot.b32 %d, %p, -1;", "vote.sync.any.pred %q, %p, -1;", "selp.b32 %e, 1, 0, %q;"]
    got = run_instruction(lines, {"%v": values}, ["%d", "%e"])
    assert set(got["%d"]) == {sum(int(v) << i for i, v in enumerate(values))}
    assert set(got["%e"]) == {int(values.any())}
