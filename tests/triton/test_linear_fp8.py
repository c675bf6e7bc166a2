"""The Triton pass that rounds rows to E4M3: on a GPU of 8-bit floats, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert.backends.aten import linear_fp8 as aten
from fastbert.ops.activation import ACTIVATIONS, activate_ref
from fastbert.ops.linear_fp8 import FP8, linear_fp8, linear_fp8_ref
from fastbert.ops.linear_fp8 import rounded_rows as contract
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import DEVICE, DTYPES, counted, fuzz_tests, kernels_of

kernels = kernels_of("linear_fp8")
pytestmark = pytest.mark.usefixtures("checked_memory")
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rows_of(rows, depth, dtype=torch.bfloat16, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, rows)[:, None]
    return (torch.randn(rows, depth, generator=g) * sizes).to(dtype).to(DEVICE)


def operands(rows=7, depth=32, out=48):
    weight, scale = contract(rows_of(out, depth, torch.float32, 1))
    return rows_of(rows, depth), weight, scale.flatten(), rows_of(1, out, seed=2)[0]


def assert_rounded(x, expected=None):
    """To the bit, of the contract."""
    q, step = kernels.rounded_rows(x)
    wanted, its_step = contract(x) if expected is None else expected
    assert (q.dtype, q.shape, q.is_contiguous()) == (FP8, x.shape, True)
    assert (step.dtype, step.shape) == (torch.float32, (len(x), 1))
    assert torch.equal(step, its_step)
    assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8))


@DTYPE
@pytest.mark.parametrize("depth", [1, 2, 15, 16, 17, 96, 700, 1025])
def test_rows_are_those_of_the_contract(depth, dtype):
    for rows in (1, 3, 70):
        assert_rounded(rows_of(rows, depth, dtype))
    assert_rounded(torch.zeros(3, depth, dtype=dtype, device=DEVICE))


def test_every_number_and_every_tie():
    """All numbers of E4M3 under a step of 1, the middles between them, and the floats beside the middles."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [torch.nextafter(middles, middles + side) for side in (1, -1)]
    x = torch.cat([numbers, middles, *beside, *(-each for each in (numbers, middles, *beside))])[None]
    q, step = kernels.rounded_rows(x.to(DEVICE))
    assert step.item() == 1
    assert torch.equal(q.float().cpu(), x.to(FP8).float())


def test_the_ends_of_float32():
    """A step below 2**-126 is 1; the largest element is 448 steps."""
    x = torch.tensor([[3.0, -8.96], [1e-44, 0.0], [3e38, -1e38], [6e-36, -1e-36], [5e-36, 0]], device=DEVICE)
    assert_rounded(x)
    q, step = kernels.rounded_rows(x)
    assert (step[:, 0] == 1).tolist() == [False, True, False, False, True]
    assert q.float().abs().amax(1).tolist() == [448, 0, 448, 448, 0]


@pytest.mark.parametrize("block", [32, 4096])
def test_wide_rows(block, monkeypatch):
    """In one block of columns, and in several of which the last one is cut: the largest is anywhere."""
    monkeypatch.setattr(kernels, "ONE_BLOCK", block)
    x = rows_of(9, 75)
    for row, column in enumerate((0, 31, 32, 63, 64, 74)):
        x[row, column] = -1000.0
    assert_rounded(x)


@pytest.mark.parametrize("block", [32, 4096])
def test_a_row_that_is_not_finite(block, monkeypatch):
    """Its product is NaN: each element that is not finite becomes NaN. Rows beside it are as before."""
    monkeypatch.setattr(kernels, "ONE_BLOCK", block)
    x = rows_of(6, 70)
    clean, steps = kernels.rounded_rows(x)
    x[1, 3], x[2, 69], x[4, 0] = torch.nan, torch.inf, -torch.inf
    q, step = kernels.rounded_rows(x)
    values = q.float()
    assert values[[1, 2, 4], [3, 69, 0]].isnan().all()
    assert torch.equal(values[[0, 3, 5]], clean.float()[[0, 3, 5]])
    assert torch.equal(step[[0, 3, 5]], steps[[0, 3, 5]])


@DTYPE
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_rounded_to_the_rows_dtype_first(activation, dtype, monkeypatch):
    """Almost all of it is the correctly rounded one; with the exact gelu, whatever environment is set."""
    monkeypatch.setattr(kernels.activation_kernels, "EXACT_GELU", True)
    x = rows_of(7, 75, dtype).clamp(-30, 30)
    for block in (32, 4096):
        monkeypatch.setattr(kernels, "ONE_BLOCK", block)
        q, step = kernels.rounded_rows(x, activation)
        exact = activate_ref(x.double(), activation).to(dtype)
        wanted, its_step = contract(exact)
        torch.testing.assert_close(step, its_step, rtol=2e-6, atol=0)
        assert (q.float() == wanted.float()).double().mean() >= 0.99
    monkeypatch.setattr(kernels.activation_kernels, "EXACT_GELU", False)
    torch.testing.assert_close(kernels.rounded_rows(x, activation)[1], step, rtol=0.02, atol=1e-6)


def test_rows_of_float32_have_the_exact_gelu_always(monkeypatch):
    x, steps = rows_of(7, 75, torch.float32).clamp(-3, 0.9), []
    for exact in (True, False):
        monkeypatch.setattr(kernels.activation_kernels, "EXACT_GELU", exact)
        steps.append(kernels.rounded_rows(x, "gelu")[1])
    assert torch.equal(*steps)


# --- the op -------------------------------------------------------------------------------------------------


@pytest.fixture
def multiplied(monkeypatch):
    """Without a product of rows in 8-bit floats here, one by the reference's arithmetic."""
    if not aten._scales_rows(DEVICE):

        def product(q, step, weight, scale, bias):
            y = (q.double() @ weight.double().T * step.double() * scale.double()).float()
            return (y if bias is None else y + bias.float()).bfloat16()

        monkeypatch.setattr(aten, "_scales_rows", lambda device: True)
        monkeypatch.setattr(aten, "product", product)


@pytest.mark.parametrize(("activation", "gated"), [(None, None), ("gelu", None), ("gelu", "first")])
def test_the_op_rounds_by_this_pass(activation, gated, multiplied, monkeypatch):
    calls = counted(monkeypatch, kernels, "rounded_rows")
    x, weight, scale, bias = operands()
    with dispatch.use_backend(linear_fp8="triton"):
        y = linear_fp8(x, weight, scale, bias, activation, gated)
        assert len(calls) == 1
        # What the product does not take is left to `aten`
        odd = operands(depth=17)
        assert torch.equal(linear_fp8(*odd), linear_fp8_ref(*odd))
        assert len(calls) == 1
    with dispatch.use_backend(linear_fp8="aten"):
        assert torch.equal(y, linear_fp8(x, weight, scale, bias, activation, gated))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_an_activation_of_the_input(activation, multiplied):
    x, weight, scale, bias = operands()
    with dispatch.use_backend(linear_fp8="triton"):
        y = linear_fp8(x / 30, weight, scale, bias, input_activation=activation)
    expected = aten.product(*kernels.rounded_rows(x / 30, activation), weight, scale, bias)
    assert torch.equal(y, expected)
    assert not torch.equal(y, linear_fp8(x / 30, weight, scale, bias))


def check(rows, depth, dtype, seed):
    assert_rounded(rows_of(rows, depth, DTYPES[dtype], seed))


test_fuzz, test_fuzz_long = fuzz_tests(
    check, st.tuples(st.integers(1, 70), st.integers(1, 300), st.integers(0, 2), st.integers(0, 9)), 12, 200
)
