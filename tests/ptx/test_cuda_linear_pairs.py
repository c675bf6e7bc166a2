"""Pairs of blocks that share the weight's tiles (csrc/cuda/linear_hopper.cuh) return single blocks' bits."""

from __future__ import annotations

import functools

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import GATES
from fastbert.testing.op_cases import linear as linear_cases
from tests.ptx.test_cuda_linear_hopper import BF16, call
from tests.support.cpu_truth import HALF, assert_same_bits, randn
from tests.support.cuda_draws import whole_numbers

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

hopper_product = launchers.hopper_product
# rows, columns, depth, blocks: pairs of tiles are 256 x 192, steps 64 deep, and the ring has 5 slots
SHAPES = (
    (5, 8, 8, 2),  # the second block has no rows
    (256, 192, 320, 7),
    (130, 200, 64, 2),  # tiles of one step, which both groups take in turns
    (300, 392, 456, 4),  # 6 pairs of 8 steps, whose last rows one block has: the ring turns
    (2100, 200, 72, 4),  # a second group of row tiles
)


def in_pairs(emulated, *args):
    """(y, pre) by the kernel of pairs; an even number of blocks, at most so many as asked for."""
    made = emulated.launcher(functools.partial(hopper_product, pairs=True))(*args)
    launch = emulated.launches[-1]
    assert "hopper_pair_kernel" in launch.kernel
    assert launch.grid[0] % 2 == 0
    return made


@pytest.mark.parametrize(
    ("schedule", "dtype"), (("late", BF16), ("early", HALF[1]), ("late", HALF[1])), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact(emulated, shape, schedule, dtype):
    """Ragged rows, columns and depths; odd numbers of row tiles; more tiles than blocks."""
    rows, columns, depth, blocks = shape
    x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, columns))
    bias = whole_numbers(columns, dtype=dtype, most=1, seed=3)
    y, pre = call(emulated, x, weight, bias, "gelu", True, blocks)
    emulated.schedule, emulated.seed = schedule, HALF.index(dtype)
    found = in_pairs(emulated, x, weight, bias, "gelu", True, blocks)
    assert torch.equal(found[1], (x.float() @ weight.float().T + bias.float()).to(dtype))
    assert_same_bits(found[1], pre)
    assert_same_bits(found[0], y)
    pairs = -(-rows // 256) * -(-columns // 192)
    assert emulated.launches[-1].grid == (2 * min(pairs, blocks // 2), 1, 1)


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("shape", ((5, 8, 8, 2), (130, 200, 64, 3), (300, 264, 456, 4)), ids=str)
def test_gated_integers_are_exact(emulated, shape, gated):
    """Each block copies one half of the weight's rows."""
    rows, columns, depth, blocks = shape
    for dtype, activation, schedule in ((BF16, "gelu", "late"), (HALF[1], "silu", "early")):
        x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, 2 * columns))
        options = None, activation, True, blocks, gated
        y, pre = call(emulated, x, weight, *options)
        emulated.schedule, emulated.seed = schedule, columns
        found = in_pairs(emulated, x, weight, *options)
        assert torch.equal(found[1], (x.float() @ weight.float().T).to(dtype))
        assert_same_bits(found[1], pre)
        assert_same_bits(found[0], y)


def test_every_schedule_returns_the_same_bits(emulated):
    x, weight = (randn(n, 336, dtype=BF16, seed=n) for n in (270, 400))
    y, pre = call(emulated, x, weight, None, "gelu_tanh", True, 2)
    for schedule, seed, blocks in (("late", 0, 2), ("early", 1, 2), ("late", 3, 4), ("late", 4, 6)):
        emulated.schedule, emulated.seed = schedule, seed
        found = in_pairs(emulated, x, weight, None, "gelu_tanh", True, blocks)
        assert_same_bits(found[0], y)
        assert_same_bits(found[1], pre)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "case",
    (
        linear_cases.LinearCase(520, 264, 200, "gelu"),
        linear_cases.LinearCase(513, 256, 200, "gelu_tanh"),
        *(
            linear_cases.LinearCase(513, 256, 208, name, gated=gated)
            for name, gated in (("gelu", "first"), ("silu", "second"))
        ),
    ),
    ids=repr,
)
def test_error_rule(emulated, monkeypatch, case, dtype):
    monkeypatch.setattr(launchers, "hopper_product", functools.partial(hopper_product, pairs=True))
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []
    assert any("hopper_pair_kernel" in launch.kernel for launch in emulated.launches)


def test_a_pair_needs_two_blocks_and_is_asked_for(emulated):
    x, weight = (whole_numbers(n, 256, dtype=BF16, most=1, seed=n) for n in (512, 16))
    with pytest.raises(RuntimeError, match="in pairs 2"):
        in_pairs(emulated, x, weight, None, "gelu", False, 1)
    emulated.launcher(launchers.linear_fwd)(x, weight, None, "gelu", None, False)
    assert "hopper_kernel" in emulated.launches[-1].kernel
