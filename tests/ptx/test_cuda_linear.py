"""csrc/cuda/linear*.cu as nvcc compiles them for sm_80, with their host code, in the PTX emulator."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import feed_forward
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import slope_ref
from fastbert.testing.op_cases import feed_forward as feed_forward_cases
from fastbert.testing.op_cases import linear as linear_cases
from tests.support.cpu_truth import randn

HALF = (torch.bfloat16, torch.float16)

pytest_plugins = ("tests.support.ptx_fixtures",)


def whole_numbers(*shape, dtype, seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=g).to(dtype)


def call(emulated, function, *args):
    """A launcher that is no part of the backend's namespace."""
    return emulated.launcher(function)(*args)


def equal(actual, truth):
    assert torch.equal(actual.float(), truth.to(actual.dtype).float())


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("plan", ((16, 1), (32, 2), (64, 1), (64, 3), (128, 1), (128, 2)), ids=str)
def test_every_forward_tile(emulated, plan, schedule):
    """Integers, so that the result is exact; rows and columns past a tile, depth past the ring's slots."""
    emulated.schedule = schedule
    for dtype, seed in zip(HALF, (1, 2), strict=True):
        emulated.seed = seed
        rows, depth, out = plan[0] + 3, 296, 137
        x, weight = (whole_numbers(n, depth, dtype=dtype, seed=n) for n in (rows, out))
        bias, residual = (
            whole_numbers(out, dtype=dtype, seed=3),
            whole_numbers(rows, out, dtype=dtype, seed=4),
        )
        z = x.float() @ weight.float().T + bias.float()
        y, pre = call(emulated, launchers.linear_fwd_with, plan, x, weight, bias, "relu", residual, True)
        equal(y, z.relu() + residual.float())
        equal(pre, z)
        equal(
            call(emulated, launchers.linear_fwd_with, plan, x, weight, bias, None, residual, False)[0],
            z + residual.float(),
        )
    assert emulated.launches


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize(("tile", "slots"), ((16, 9), (32, 8), (64, 6)))
def test_a_block_with_a_multiprocessor_to_itself_has_a_longer_ring(emulated, tile, slots, schedule):
    """Few steps and many blocks have the short one; depth up to and past the longer one's slots."""
    emulated.schedule = schedule

    def product(rows, depth, out, parts=1):
        x, weight = (whole_numbers(n, depth, dtype=torch.bfloat16, seed=n) for n in (rows, out))
        y, _ = call(emulated, launchers.linear_fwd_with, (tile, parts), x, weight, None, None, None, False)
        equal(y, x.float() @ weight.float().T)
        # that of the product: with parts another one adds them
        return emulated.launches[-min(parts, 2)].shared_bytes // ((tile + 128) * 64 * 2)

    for depth in (193, 64 * (slots - 1), 64 * slots + 8, 64 * (2 * slots + 1) - 8):
        assert product(tile + 3, depth // 8 * 8 + 8, 137) == slots
    assert product(5, 192, 8) == 4
    assert product(5, 7 * 64, 8, parts=2) == 4
    assert product(5, 8 * 64, 8, parts=2) == slots
    if tile == 16:
        # 132 multiprocessors
        assert product(12 * tile, 256, 11 * 128) == slots
        assert product(12 * tile + 1, 256, 11 * 128) == 4


@pytest.mark.parametrize("schedule", ("late", "early"))
@pytest.mark.parametrize("plan", ((64, 1), (64, 2), (128, 1), (128, 2)), ids=str)
def test_every_backward_tile(emulated, plan, schedule):
    emulated.schedule = schedule
    rows, depth, out = 131, 136, 200
    for dtype in HALF:
        dy, x, weight = (
            whole_numbers(*size, dtype=dtype, seed=i)
            for i, size in enumerate(((rows, out), (rows, depth), (out, depth)))
        )
        plans = plan, (128, plan[1])
        dx, dweight, dbias = call(
            emulated, launchers.linear_bwd_with, plans, dy, x, weight, None, None, True, True, True
        )
        equal(dx, dy.float() @ weight.float())
        equal(dweight, dy.float().T @ x.float())
        equal(dbias, dy.float().sum(0))
        pre = randn(rows, depth, dtype=dtype)
        g, sums = call(emulated, feed_forward.inner_gradient, dy, weight, pre, "gelu", True, plan)
        truth = (dy.double() @ weight.double()) * slope_ref(pre.double(), "gelu")
        assert (g.double() - truth).abs().max() < 0.2
        assert (sums.double() - truth.sum(0)).abs().max() < 2.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("case", (*linear_cases.CASES, *feed_forward_cases.CASES), ids=repr)
def test_error_rule(emulated, case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []
