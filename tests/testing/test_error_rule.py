"""The error rule catches planted errors, and passes correct rounding."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.testing import error_rule

HALF = [torch.bfloat16, torch.float16]


def tensors(dtype, n=4096):
    """(oracle, eager): float64 values, and the same correctly rounded."""
    oracle = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return oracle, oracle.to(dtype)


def reason(actual, eager, oracle, dtype, floor=0.0):
    return testing.compare(actual, eager, oracle, dtype, floor)[-1]


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_correct_rounding_passes(dtype):
    oracle, eager = tensors(dtype)
    assert reason(oracle.to(dtype), eager, oracle, dtype) == ""


@pytest.mark.parametrize("dtype", HALF)
def test_one_element_off_by_two_steps_is_caught(dtype):
    oracle, eager = tensors(dtype)
    actual = eager.clone()
    at = oracle.abs().argmax()
    # the allowance is eager's worst error, half a step of the largest value, and one step
    actual[at] += 2 * testing.rounding_step(oracle[at], dtype).to(dtype)
    assert "max error" in reason(actual, eager, oracle, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_one_step_on_one_element_passes(dtype):
    oracle, eager = tensors(dtype)
    actual = eager.clone()
    at = oracle.abs().argmin()
    actual[at] += testing.rounding_step(oracle[at], dtype).to(dtype)
    assert reason(actual, eager, oracle, dtype) == ""


@pytest.mark.parametrize("dtype", HALF)
def test_a_small_error_in_every_element_is_caught_by_the_mean(dtype):
    oracle, eager = tensors(dtype)
    actual = (oracle + 0.6 * testing.rounding_step(oracle, dtype)).to(dtype)
    assert "mean error" in reason(actual, eager, oracle, dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_truncation_instead_of_rounding_is_caught(dtype):
    oracle, eager = tensors(dtype)
    step = testing.rounding_step(oracle, dtype)
    truncated = (torch.trunc(oracle / step) * step).to(dtype)
    assert "mean error" in reason(truncated, eager, oracle, dtype)


@pytest.mark.parametrize("n", [32, 100, 500])
@pytest.mark.parametrize("dtype", HALF)
def test_truncation_is_caught_in_few_elements(dtype, n):
    """What is called chance grows as elements become fewer."""
    oracle, eager = tensors(dtype, n)
    step = testing.rounding_step(oracle, dtype)
    truncated = (torch.trunc(oracle / step) * step).to(dtype)
    assert "mean error" in reason(truncated, eager, oracle, dtype)


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


def test_a_wrong_shape_is_caught():
    oracle, eager = tensors(torch.float32)
    assert "shape" in reason(eager.unsqueeze(0), eager, oracle, torch.float32)
    assert "shape" in reason(eager[:-1], eager, oracle, torch.float32)


def test_empty_tensors_pass():
    empty = torch.empty(0, 3)
    assert reason(empty, empty, empty.double(), torch.float32) == ""


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_rounding_step_is_the_spacing_of_the_dtype(dtype):
    values = torch.tensor([1.0, 1.5, 2.0, 1000.0, 0.0371, -5.0], dtype=torch.float64)
    for value in values.to(dtype):
        magnitude = value.abs()
        above = torch.nextafter(magnitude, torch.tensor(float("inf"), dtype=dtype))
        assert testing.rounding_step(value.double(), dtype) == above.double() - magnitude.double()


@pytest.mark.parametrize(
    "op",
    [
        "layer_norm",
        "linear",
        "linear_int8",
        "linear_norm",
        "embedding",
        "first_attention",
        "cross_entropy",
        "packing",
        "pooling",
    ],
)
def test_a_broken_backend_fails_its_cases(op, monkeypatch):
    """The smallest cases of every op catch a forward that is one per cent off."""
    from fastbert.backends import aten

    name = f"{op}_fwd"
    good = getattr(aten, name)

    def off(*args):
        out = good(*args)
        return out * 1.01 if isinstance(out, torch.Tensor) else (out[0] * 1.01, *out[1:])

    monkeypatch.setattr(aten, name, off)
    for case in testing.small_cases(op):
        rows = testing.run_case(case, "aten", torch.float32)
        also = ["dpacked"] if op == "packing" else []  # the backward of `unpack` is `pack`
        also += ["dhidden"] if op == "pooling" and case.mode == "max" else []  # it looks for y's elements
        assert [row.quantity for row in rows if not row.passed] == [case.output_names[0], *also]


@pytest.mark.parametrize("op", ["layer_norm", "linear", "embedding", "cross_entropy"])
def test_a_broken_backward_fails_its_cases(op, monkeypatch):
    from fastbert.backends import aten

    good = getattr(aten, f"{op}_bwd")

    def off(*args):
        out = good(*args)
        return out * 1.01 if isinstance(out, torch.Tensor) else tuple(t * 1.01 for t in out)

    monkeypatch.setattr(aten, f"{op}_bwd", off)
    for case in testing.small_cases(op):
        rows = testing.run_case(case, "aten", torch.float32)
        failed = {row.quantity for row in rows if not row.passed}
        exact = {"dresidual"} if op == "linear" else set()  # computed by the op, not by the backend
        assert failed == {row.quantity for row in rows if row.quantity.startswith("d")} - exact


def test_a_backend_that_is_wrong_from_its_second_call_on_fails(monkeypatch):
    """As a kept launch could be: a self-check on a GPU makes two calls of every case."""
    from fastbert.backends import aten

    good, calls = aten.linear_fwd, []

    def later(*args):
        calls.append(args)
        y, pre = good(*args)
        return (y if len(calls) % 2 else y * 1.01), pre

    monkeypatch.setattr(aten, "linear_fwd", later)
    case = testing.small_cases("linear")[0]
    once, twice = (testing.run_case(case, "aten", torch.float32, calls=n, backward=False) for n in (1, 2))
    assert [row.passed for row in once] == [True]
    calls.clear()
    assert [row.passed for row in testing.run_case(case, "aten", torch.float32, calls=2, backward=False)] == [
        True,
        False,
    ]
    assert [row.quantity for row in twice] == ["y", "y"]


@pytest.mark.parametrize(("device", "calls"), [("cpu", 1), ("cuda", 2)])
def test_a_self_check_on_a_gpu_calls_twice(device, calls, monkeypatch):
    asked = []
    monkeypatch.setattr(error_rule, "run_case", lambda *_, **options: asked.append(options["calls"]) or [])
    assert error_rule.self_check("linear", "aten", torch.device(device), torch.float32) is None
    assert set(asked) == {calls}
