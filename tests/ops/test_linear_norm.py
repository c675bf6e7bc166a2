"""fastbert.ops.linear_norm: its edges, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.checks import FLOATS
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear_norm import ARRIVALS, linear_norm, new_arrivals, pays
from fastbert.runtime import dispatch
from fastbert.runtime.table import HALF
from fastbert.testing.op_cases.linear_norm import LinearNormCase, bench

BACKENDS = ("reference", "aten")


def operands(rows=7, depth=12, out=10, dtype=torch.float64, **options):
    return LinearNormCase(rows, depth, out, **options).inputs(dtype, "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_bias", [True, False])
def test_is_linear_and_layer_norm(backend, bias, norm_bias):
    made = operands(bias=bias, norm_bias=norm_bias)
    product = linear(made["x"], made["weight"], made["bias"])
    expected = layer_norm(
        product, made["norm_weight"], made["norm_bias"], residual=made["residual"], eps=1e-3
    )
    with dispatch.use_backend(backend):
        torch.testing.assert_close(linear_norm(**made, eps=1e-3), expected)
    assert not made["arrivals"].any()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_norms_in_another_dtype(dtype):
    made = operands(dtype=dtype)
    wide = {n: made[n].double() for n in ("norm_weight", "norm_bias")}
    assert torch.equal(linear_norm(**made | wide), linear_norm(**made))


F64 = torch.float64


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.tensor(1.0, dtype=F64)}, ValueError, "x: expected shape"),
        ({"weight": torch.zeros(10, 12)}, TypeError, "weight: "),
        ({"weight": torch.zeros(10, 11, dtype=F64)}, ValueError, "weight: expected shape"),
        ({"bias": torch.zeros(9, dtype=F64)}, ValueError, "bias: "),
        ({"bias": torch.zeros(10)}, TypeError, "bias: "),
        ({"residual": torch.zeros(7, 10)}, TypeError, "residual: "),
        ({"residual": torch.zeros(6, 10, dtype=F64)}, ValueError, "residual: "),
        ({"norm_weight": torch.zeros(9)}, ValueError, "norm_weight: "),
        ({"norm_bias": torch.zeros(1)}, ValueError, "norm_bias: "),
        ({"eps": float("nan")}, ValueError, "eps: "),
        ({"arrivals": torch.zeros(ARRIVALS)}, TypeError, "arrivals: expected int32"),
        ({"arrivals": torch.zeros(1, dtype=torch.int32)}, ValueError, "arrivals: "),
        ({"arrivals": torch.zeros(2 * ARRIVALS, dtype=torch.int32)[::2]}, ValueError, "arrivals: "),
        ({"arrivals": torch.zeros(ARRIVALS, dtype=torch.int32, device="meta")}, ValueError, "arrivals: "),
    ],
)
def test_refuses(change, error, words):
    with pytest.raises(error, match=words):
        linear_norm(**operands() | change)


def test_counters_are_zeros():
    made = new_arrivals(torch.device("cpu"))
    assert (made.dtype, made.tolist()) == (torch.int32, [0] * ARRIVALS)


def test_never_pays_on_a_cpu():
    for dtype in FLOATS:
        assert not pays(torch.empty(4, 8, dtype=dtype), 8)
    with dispatch.use_backend("cpu"):  # which lacks the op
        assert not pays(torch.empty(4, 8, dtype=torch.bfloat16), 8)


def test_only_few_rows_are_timed():
    """Calls that no model makes decide nothing."""
    assert [case.rows for case in bench((128,))] == [128, 128]
    assert [case.rows for case in bench((128, 129))] == [256, 256]
