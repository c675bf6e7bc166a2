"""What the tests of the Triton kernels share: inputs and comparisons. Fixtures are in tests/triton."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from fastbert import testing
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from fastbert.testing import triton_interpreter, verdicts
from tests.support.triton_sanitizer import lazy_rows

DEVICE = triton_interpreter.device()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF = (torch.bfloat16, torch.float16)

interpreted = pytest.mark.skipif(not triton_interpreter.interpreting(), reason="needs Triton's interpreter")
needs_lazy_memory = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="needs lazily mapped memory: the interpreter"
)


def kernels_of(op: str) -> types.ModuleType:
    """The module of kernels of an op; skips the tests that ask where Triton is not installed."""
    return pytest.importorskip(
        f"fastbert.kernels.{op}", reason="Triton is not installed", exc_type=ImportError
    )


def fuzz(examples: int) -> settings:
    """Hypothesis, with the same examples at every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def fuzz_tests(check: Callable, drawn: SearchStrategy, few: int, many: int) -> tuple[Callable, Callable]:
    """(`test_fuzz` of the sweep, `test_fuzz_long`): `check(*drawn)` for a few examples, and for many."""

    def of(mark: pytest.MarkDecorator, examples: int) -> Callable:
        @mark
        @fuzz(examples)
        @given(drawn)
        def test_fuzz(drawn):
            check(*drawn)

        return test_fuzz

    return of(pytest.mark.sweep, few), of(pytest.mark.slow, many)


def set_backends(monkeypatch: pytest.MonkeyPatch, op: str, *backends: str) -> None:
    """Make these the backends of `op` on this device, best first, and forget all verdicts."""
    monkeypatch.setitem(TABLE[DEVICE.type], op, backends)
    monkeypatch.setattr(dispatch, "_resolved", {})
    monkeypatch.setattr(verdicts, "found", {})


def counted(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType, name: str) -> list[str]:
    """A list to which every call of `module.name` appends."""
    calls, original = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: (calls.append(name), original(*args))[1])
    return calls


# --- inputs -------------------------------------------------------------------------------------------------


def normal(g: torch.Generator, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """`randn(*shape, scale=1.0, shift=0.0)`, which draws from `g` and rounds to `dtype`."""

    def randn(*shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * scale + shift).to(dtype).to(DEVICE)

    return randn


def packed(lengths, width, dtype=torch.float32, tail=0, integer=torch.int32, seed=0):
    """(hidden states of sequences of these lengths and `tail` rows of NaN behind them, cu_seqlens)."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sum(lengths) + tail, width, generator=g).to(dtype)
    hidden[sum(lengths) :] = torch.nan
    ends = torch.tensor([0, *accumulate(lengths)], dtype=integer)
    return hidden.to(DEVICE), ends.to(DEVICE)


def padded(t: torch.Tensor, pad: int) -> torch.Tensor:
    """The same values with `pad` elements between rows, NaN or a number."""
    fill = float("nan") if t.is_floating_point() else 77
    wide = torch.full((t.shape[0], t.shape[1] + pad), fill, dtype=t.dtype, device=t.device)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def far(t: torch.Tensor, gap: int = 8) -> torch.Tensor:
    """The same values in rows 2**30 + `gap` elements apart; see `needs_lazy_memory`."""
    return lazy_rows(*t.shape, 2**30 + gap, t.dtype).copy_(t)


class HugeStrides(types.SimpleNamespace):
    """`torch` for a launcher, whose matrices get rows 2**30 elements apart."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, dtype, device):
        if len(shape) == 2:
            return lazy_rows(*shape, 2**30 + 16, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def empty_like(self, t):
        return self.empty(t.shape, t.dtype, t.device)


# --- comparisons --------------------------------------------------------------------------------------------


def in_float64(args: dict[str, object]) -> dict[str, object]:
    """The arguments, with floating-point tensors in float64."""
    floating = {k: v for k, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return args | {k: v.double() for k, v in floating.items()}


def assert_bit_equal(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """The same number of tensors, each of the same dtype, shape and values."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == e.dtype, i
        assert a.shape == e.shape, i
        assert torch.equal(a, e), i


def lucky_yardstick(
    row: testing.Row, case: testing.Case, dtype: torch.dtype, seed: int, elements: int
) -> bool:
    """With few elements eager's error may be small by luck: then twice that and 4 floors are allowed.

    Dropout scales the floor of float32 as it scales the result.
    """
    if elements >= 1000:
        return False
    if "mean error" in row.reason:
        return row.mean_error <= row.eager_mean_error * (1 + 4 / elements**0.5)
    inputs = case.inputs(dtype, DEVICE, seed)
    floor = 4 * case.floor(inputs, row.quantity) / (1 - case.dropout_p) if dtype == torch.float32 else 0.0
    return row.max_error <= 2 * row.eager_max_error + floor


def assert_repeats(report, run: Callable[[], Iterable[torch.Tensor]], times: int = 3) -> None:
    """Calls are bit-equal, and without atomics. `report`: that of `checked_memory`."""
    first = run()
    for _ in range(times if DEVICE.type == "cpu" else 250):
        assert_bit_equal(run(), first)
    assert report.atomics == 0
