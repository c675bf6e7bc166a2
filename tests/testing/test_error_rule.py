"""The error rule catches planted errors, and passes correct rounding."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends import aten
from fastbert.runtime import dispatch

HALF = [torch.bfloat16, torch.float16]


def tensors(dtype, n=4096):
    """(oracle, eager): float64 values, and the same correctly rounded."""
    oracle = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return oracle, oracle.to(dtype)


def reason(actual, eager, oracle, dtype, floor=0.0):
    return testing.compare(actual, eager, oracle, dtype, floor)[-1]


def truncated(oracle, dtype):
    step = testing.rounding_step(oracle, dtype)
    return (torch.trunc(oracle / step) * step).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_what_half_precision_may_be_off_by(dtype):
    oracle, eager = tensors(dtype)
    step = testing.rounding_step(oracle, dtype)
    assert reason(oracle.to(dtype), eager, oracle, dtype) == ""
    # the allowance is eager's worst error, half a step of the largest value, and one step
    for at, steps, fault in ((oracle.abs().argmax(), 2, "max error"), (oracle.abs().argmin(), 1, "")):
        actual = eager.clone()
        actual[at] += steps * step[at].to(dtype)
        found = reason(actual, eager, oracle, dtype)
        assert fault in found
        assert bool(fault) is bool(found)
    # a small error in every element, and truncation instead of rounding
    for actual in ((oracle + 0.6 * step).to(dtype), truncated(oracle, dtype)):
        assert "mean error" in reason(actual, eager, oracle, dtype)


@pytest.mark.parametrize("n", [32, 100, 500])
@pytest.mark.parametrize("dtype", HALF)
def test_truncation_is_caught_in_few_elements(dtype, n):
    """What is called chance grows as elements become fewer."""
    oracle, eager = tensors(dtype, n)
    assert "mean error" in reason(truncated(oracle, dtype), eager, oracle, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_a_mean_that_few_elements_make_may_differ_by_chance(dtype):
    """14 of 4096 errors and 10 of them, all else alike: as good; but not 60."""
    oracle = torch.zeros(4096, dtype=torch.float64)
    eager, actual, worse = (torch.full_like(oracle, 2.0**-24) for _ in range(3))
    eager[:10], actual[100:114], worse[100:160] = 2.0**-8, 2.0**-8, 2.0**-8
    assert reason(actual.to(dtype), eager.to(dtype), oracle, dtype) == ""
    assert "mean error" in reason(worse.to(dtype), eager.to(dtype), oracle, dtype)
    # all a little larger: no chance
    larger = (eager * 1.25).to(dtype)
    assert reason(larger, eager.to(dtype), oracle, dtype) != ""


def test_float32_is_held_to_eager_and_the_floor():
    oracle, eager = tensors(torch.float32)
    assert reason(eager, eager, oracle, torch.float32) == ""
    actual = eager.clone()
    actual[0] += 1e-5
    assert "max error" in reason(actual, eager, oracle, torch.float32)
    assert reason(actual, eager, oracle, torch.float32, floor=2e-5) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_a_value_that_is_not_finite_is_caught(dtype, value):
    oracle, eager = tensors(dtype)
    actual = eager.clone()
    actual[7] = value
    assert "NaN or infinity" in reason(actual, eager, oracle, dtype)
    assert "NaN or infinity" in reason(actual, actual, oracle, dtype), "eager's own NaN is no excuse"


def test_an_infinity_of_the_truth_must_be_there_with_its_sign():
    oracle = torch.tensor([1.0, float("-inf")], dtype=torch.float64)
    right = oracle.float()
    assert reason(right, right, oracle, torch.float32) == ""
    assert reason(right.abs(), right, oracle, torch.float32) != ""
    assert reason(right.clamp(min=-3e38), right, oracle, torch.float32) != ""


def test_shapes():
    oracle, eager = tensors(torch.float32)
    assert "shape" in reason(eager.unsqueeze(0), eager, oracle, torch.float32)
    assert "shape" in reason(eager[:-1], eager, oracle, torch.float32)
    empty = torch.empty(0, 3)
    assert reason(empty, empty, empty.double(), torch.float32) == ""


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_rounding_step_is_the_spacing_of_the_dtype(dtype):
    values = torch.tensor([1.0, 1.5, 2.0, 1000.0, 0.0371, -5.0], dtype=torch.float64)
    for value in values.to(dtype):
        magnitude = value.abs()
        above = torch.nextafter(magnitude, torch.tensor(float("inf"), dtype=dtype))
        assert testing.rounding_step(value.double(), dtype) == above.double() - magnitude.double()


def one_per_cent_off(monkeypatch, name, scaled):
    good = getattr(aten, name)

    def off(*args):
        out = good(*args)
        return out * 1.01 if isinstance(out, torch.Tensor) else scaled(out)

    monkeypatch.setattr(aten, name, off)


@pytest.mark.parametrize("op", [op for op in dispatch.OPS if op not in ("attention", "feed_forward")])
def test_a_broken_backend_fails_its_cases(op, monkeypatch):
    """The smallest cases of every op catch a forward that is one per cent off."""
    one_per_cent_off(monkeypatch, f"{op}_fwd", lambda out: (out[0] * 1.01, *out[1:]))
    for case in testing.small_cases(op):
        rows = testing.run_case(case, "aten", torch.float32)
        also = ["dpacked"] if op == "packing" else []  # the backward of `unpack` is `pack`
        also += ["dhidden"] if op == "pooling" and case.mode == "max" else []  # it looks for y's elements
        also += ["dweight", "dx", "dbias"] if op == "linear_cross_entropy" else []  # those of the loss
        failed = [row.quantity for row in rows if not row.passed]
        assert failed[0] == case.output_names[0]
        assert {*failed[1:]} <= {*also}


@pytest.mark.parametrize("op", ["layer_norm", "linear", "embedding", "cross_entropy"])
def test_a_broken_backward_fails_its_cases(op, monkeypatch):
    one_per_cent_off(monkeypatch, f"{op}_bwd", lambda out: tuple(t * 1.01 for t in out))
    for case in testing.small_cases(op):
        rows = testing.run_case(case, "aten", torch.float32)
        failed = {row.quantity for row in rows if not row.passed}
        exact = {"dresidual"} if op == "linear" else set()  # computed by the op, not by the backend
        assert failed == {row.quantity for row in rows if row.quantity.startswith("d")} - exact


def test_a_backend_that_is_wrong_from_its_second_call_on_fails(monkeypatch):
    """As a kept launch could be: a self-check on a GPU makes two calls of every case."""
    good, calls = aten.linear_fwd, []

    def later(*args):
        calls.append(args)
        y, pre = good(*args)
        return (y if len(calls) == 1 else y * 1.01), pre

    monkeypatch.setattr(aten, "linear_fwd", later)
    rows = testing.run_case(testing.small_cases("linear")[0], "aten", torch.float32, calls=2, backward=False)
    assert [(row.quantity, row.passed) for row in rows] == [("y", True), ("y", False)]


def test_an_id_names_what_is_not_at_its_default():
    ids = [case.id for case in testing.small_cases("linear")]
    assert ids == ["5x24x40-gelu", "3x17x9-residual", "6x24x48-gelu-first"]


@pytest.mark.parametrize("op", dispatch.OPS)
def test_eager_pytorch_computes_what_the_reference_does(op):
    """Its error is the yardstick: one that computes something else would let any kernel pass."""
    for case in testing.cases(op):
        inputs = case.inputs(torch.float64, "cpu")
        # eager rounds some results to float32
        eager, wanted = case.eager(**inputs), case.oracle(**inputs)
        torch.testing.assert_close(eager, wanted, rtol=1e-5, atol=1e-5, check_dtype=False)
