"""What only gated products of csrc/cuda/linear*.cu have, emulated; the rest: test_cuda_linear.py."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends import cuda
from fastbert.ops.activation import ACTIVATIONS, GATES, gradient_ref
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, assert_same_values, randn
from tests.support.cuda_draws import whole_numbers

BF16 = torch.bfloat16


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient(linear, kernels_only, activation, dtype, gated):
    """More rows than warps, and a second block of columns."""
    dy, pre = randn(19, 264, dtype=dtype), randn(19, 528, dtype=dtype, seed=1)
    truth = gradient_ref(dy.double(), pre.double(), activation, gated)
    g, dbias = linear.gradient(dy, pre, activation, True, True, gated)
    assert_rounds_to(g, truth, 64, "g")
    assert_rounds_to(dbias, truth.sum(0), 256, "dbias")
    only, none = linear.gradient(dy, pre, activation, True, False, gated)
    assert_same_bits(only, g)
    assert none.shape == (0,)


def test_bias_gradient_of_many_rows(linear, kernels_only):
    """More rows than blocks of the pass; where the slope is 1."""
    dy = whole_numbers(601, 16, dtype=torch.float16)
    pre = torch.cat(
        (torch.full((601, 16), 32.0), whole_numbers(601, 16, dtype=torch.float32, seed=1)), 1
    ).half()
    dbias = linear.linear_bwd(dy, LinearSaved(None, None, pre, "relu", "first"), LinearNeeds(False, False))[2]
    da, db = (dy.float() * pre[:, 16:].float()).sum(0), 32 * dy.float().sum(0)
    assert_same_values(dbias, torch.cat((da, db)).half())


@pytest.mark.parametrize("activation", ("gelu", "silu", "relu"))
def test_what_is_not_finite_stays_in_its_row_and_column(linear, kernels_only, activation):
    x, weight = randn(20, 16, dtype=BF16), randn(48, 16, dtype=BF16, seed=1)
    x[18, 0] = weight[9, 0] = weight[24 + 11, 0] = float("nan")
    y, pre = linear.linear_fwd(LinearInputs(x, weight, activation=activation, gated="first"), True)
    bad = torch.zeros(20, 24, dtype=torch.bool)
    bad[18] = bad[:, 9] = bad[:, 11] = True
    assert torch.equal(torch.isnan(y), bad)
    g, _ = linear.gradient(torch.ones_like(y), pre, activation, True, False, "first")
    both = torch.cat((bad, bad), 1)
    assert torch.isfinite(g[~both]).all()
    assert torch.isnan(g[18]).sum() >= 24


@pytest.mark.parametrize(
    ("changes", "message"),
    (({"pre": 0}, "pre: "), ({"activation": 0}, "gate: needs pre and an activation")),
    ids=str,
)
def test_refusals_of_the_gradient(emulated, changes, message):
    at = randn(16, 16, dtype=BF16).data_ptr()
    own = {"dtype": 1, "rows": 2, "columns": 8, "dy": at, "pre": at, "activation": 1, "exact": True}
    own |= {"g": at, "sums": 0, "parts": 1, "gate": 1, "device": 0, "stream": 0}
    with pytest.raises((ValueError, RuntimeError), match=message):
        cuda.device.extension.cuda_linear_gradient(*(own | changes).values())
    assert emulated.launches == []
