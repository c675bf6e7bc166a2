"""Drawn shapes of the CUDA kernels, as nvcc compiles them for sm_90a, in the PTX emulator.

128 calls of attention and 160 of linear, forward and backward, each with its own schedule of copies and order
of warps.
"""

import random

import pytest

from fastbert import testing
from fastbert.backends.cuda import linear as launchers
from tests.support.cuda_draws import HALF, check_drawn_products, drawn_case, lucky_yardstick


def draw_order(emulated, rng: random.Random) -> str:
    emulated.schedule, emulated.seed = rng.choice(("late", "early")), rng.randint(0, 2**31)
    return f"schedule {emulated.schedule}, seed {emulated.seed}"


@pytest.mark.parametrize("part", range(8))
def test_attention(emulated, part):
    """16 calls, by the error rule."""
    rng = random.Random(1000 + part)
    for i in range(16):
        case, dtype, order = drawn_case(rng), rng.choice(HALF), draw_order(emulated, rng)
        rows = testing.run_case(case, "cuda", dtype, seed=100 * part + i)
        assert rows
        failed = [r for r in rows if not r.passed and not lucky_yardstick(r, case, dtype)]
        assert [f"{r.quantity}: {r.reason}" for r in failed] == [], f"{case.id} {dtype} {order}"
    assert len(emulated.launches) >= 3 * 16


@pytest.mark.parametrize("part", range(8))
def test_linear(emulated, part):
    """20 calls of integers, whose results must be exact."""
    rng = random.Random(1000 + part)

    def in_the_emulator(launcher):
        return lambda *args: emulated.launcher(launcher)(*args)

    for _ in range(20):
        draw_order(emulated, rng)
        check_drawn_products(
            rng, in_the_emulator(launchers.linear_fwd_with), in_the_emulator(launchers.linear_bwd_with)
        )
    assert len(emulated.launches) >= 3 * 20
