"""The Triton 8-bit product: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert.kernels import tuning
from fastbert.ops.activation import ACTIVATIONS
from fastbert.ops.linear_int8 import (
    LinearInt8Inputs,
    linear_int8,
    linear_int8_ref,
    panel_maker,
    quantize_rows,
)
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import DEVICE, DTYPES, fuzz_tests, kernels_of

kernels = kernels_of("linear_int8")
pytestmark = pytest.mark.usefixtures("checked_memory")
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def arguments(rows, depth, out, dtype=torch.bfloat16, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=g) + torch.randn(rows, 1, generator=g)
    given = {
        "x": x.to(dtype),
        "weight": torch.randint(-127, 128, (out, depth), generator=g).to(torch.int8),
        "scale": (0.5 + torch.rand(out, generator=g)) / (73 * depth**0.5),
        "bias": torch.randn(out, generator=g).to(dtype),
        "activation": None,
    }
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (given | options).items()}


def product(**args):
    return kernels.linear_int8_fwd(LinearInt8Inputs(**args))


def near_ties(count=64, width=40):
    """Rows in which one more rounding changes an integer: (k + 1/2) step, and the floats beside it."""
    g = torch.Generator().manual_seed(3)
    lo, hi = -torch.rand(count, 1, generator=g), torch.rand(count, 1, generator=g)
    step = (hi - lo) / 255
    k = torch.floor((lo + (hi - lo) * torch.rand(count, width, generator=g)) / step)
    x = (k + 0.5) * step
    x = torch.where(torch.rand(x.shape, generator=g) < 0.3, torch.nextafter(x, x + 1), x).clamp(lo, hi)
    x[:, :1], x[:, 1:2] = lo, hi
    return x.to(DEVICE)


def assert_rounded(x, smooth=None, input_range=None):
    """The integers of the contract, to the bit."""
    v, offset, step = kernels.quantized_rows(x, smooth, input_range)
    centred, zero, expected = quantize_rows(x, smooth, input_range)
    assert (v.dtype, offset.dtype, step.dtype) == (torch.int8, torch.int32, torch.float32)
    torch.testing.assert_close(step, expected[:, 0], rtol=0, atol=0, equal_nan=True)
    finite = expected[:, 0].isfinite()
    assert torch.equal((v + offset[:, None])[finite].float(), centred[finite])
    assert torch.equal(128 - offset[finite].float(), zero[finite, 0])


def assert_right(args):
    """The same integers, and an epilogue as close as float32 and one rounding allow."""
    y = product(**args)
    truth = linear_int8_ref(**{k: v for k, v in (args | {"x": args["x"].float()}).items() if k != "panels"})
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[y.dtype]
    assert (y.dtype, y.shape, y.is_contiguous()) == (args["x"].dtype, truth.shape, True)
    assert ((y.float() - truth).abs() <= step * truth.abs() + 2e-5 + step / 64).all()
    return y


# --- rows ---------------------------------------------------------------------------------------------------


@DTYPE
@pytest.mark.parametrize("depth", [1, 2, 15, 16, 17, 96, 700, 1025])
def test_rows_are_those_of_the_contract(depth, dtype):
    for rows in (1, 3, 70):
        assert_rounded(arguments(rows, depth, 1, dtype)["x"])
    assert_rounded(arguments(5, depth, 1, dtype)["x"].abs() + 3)
    assert_rounded(-arguments(5, depth, 1, dtype)["x"].abs() - 3)
    assert_rounded(torch.zeros(3, depth, dtype=dtype, device=DEVICE))


def test_ties():
    x = near_ties()
    assert_rounded(x)
    # Under a step of exactly 1 halves are exact: zero odd, zero even
    whole = (x * 100).round() / 2
    whole[:, 0], whole[:, 1] = -101.0, 154.0
    whole[::2, 0], whole[::2, 1] = -100.0, 155.0
    assert_rounded(whole)


@pytest.mark.parametrize("block", [32, 4096])
def test_smooth_and_wide_rows(block, monkeypatch):
    """In one block of columns, and in several of which the last one is cut."""
    monkeypatch.setattr(kernels, "ONE_BLOCK", block)
    x = near_ties(7, 75)
    assert_rounded(x)
    x[3, 70], x[4, 71], x[5, 3] = 9.0, -9.0, 1e30
    assert_rounded(x)
    smooth = (torch.arange(75.0, device=DEVICE) / 20 - 1.5).exp2()
    assert_rounded(x, smooth)
    for ends in ((-0.7, 0.4), (-40.0, 30.0), (0.5, 2.0), (-2.0, -0.5), (-3e38, 3e38)):
        for factors in (None, smooth):
            assert_rounded(x, factors, torch.tensor(ends, device=DEVICE))


@pytest.mark.parametrize("block", [32, 4096])
def test_rows_without_a_finite_range(block, monkeypatch):
    """Their step is NaN, and rows beside them are as before. 1e-37 and 1e-44 have a step of 1."""
    monkeypatch.setattr(kernels, "ONE_BLOCK", block)
    x = torch.randn(8, 70, device=DEVICE)
    x[1, 3], x[2, 69], x[3, 40], x[4, 0] = torch.nan, torch.nan, torch.inf, -torch.inf
    x[5], x[7] = 1e-44, 1e-37
    x[6, 0], x[6, 1] = 3e38, -3e38
    assert_rounded(x)
    wide = kernels.quantized_rows(x, None, torch.tensor([-1.0, 1.0], device=DEVICE))[2]
    assert wide.isnan().tolist() == [False, True, True, True, True, False, False, False]
    step = kernels.quantized_rows(x, None)[2]
    assert step.isnan().tolist() == [False, True, True, True, True, False, True, False]
    y = product(**arguments(8, 70, 9, torch.float32) | {"x": x})
    assert y.isnan().all(1).tolist() == step.isnan().tolist()
    assert not y[[0, 5, 7]].isnan().any()


# --- the product --------------------------------------------------------------------------------------------


@DTYPE
@pytest.mark.parametrize(("rows", "depth", "out"), [(1, 1, 1), (17, 33, 31), (16, 64, 32), (35, 70, 65)])
def test_edges_of_tiles(rows, depth, out, dtype):
    assert_right(arguments(rows, depth, out, dtype))


@pytest.mark.parametrize("gated", [None, "first", "second"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues(activation, gated):
    args = arguments(19, 40, 70, torch.float32, activation=activation, gated=gated)
    y = assert_right(args)
    assert y.shape == (19, 70 if gated is None else 35)
    assert_right(args | {"bias": None})
    assert_right(args | {"smooth": (torch.arange(40.0, device=DEVICE) / 20 - 1).exp2()})
    assert_right(args | {"input_range": torch.tensor([-0.5, 1.0], device=DEVICE)})
    assert_right(args | {"x": args["x"].bfloat16()})


def test_the_largest_integers():
    """255 · 127 · in is exact in int32, and not in float32."""
    x = torch.zeros(3, 1100, device=DEVICE)
    x[:2], x[1, ::2], x[2, 0] = 255.0, 1.0, 255.0
    weight = torch.full((2, 1100), 127, dtype=torch.int8, device=DEVICE)
    weight[1] = -127
    weight[0, 1099] = 126
    one = torch.ones(2, device=DEVICE)
    y = product(x=x, weight=weight, scale=one)
    exact = x.long() @ weight.T.long()
    assert torch.equal(y, exact.float())


def test_panels_are_channel_sums():
    """Made once per weight by the backend that serves; panels of another size are not read."""
    args = arguments(5, 40, 24, torch.float32)
    with dispatch.use_backend(linear_int8="triton"):
        make = panel_maker(DEVICE, torch.float32)
        panels = make(args["weight"])
        assert torch.equal(panels.view(torch.int32), args["weight"].sum(1, dtype=torch.int32))
        expected = linear_int8(**args)
        assert torch.equal(linear_int8(**args, panels=panels), expected)
        assert torch.equal(linear_int8(**args, panels=panels[:-1]), expected)
        assert not torch.equal(linear_int8(**args, panels=make(args["weight"] + 1)), expected)


def test_rows_in_floating_point_are_handed_on():
    args = arguments(19, 40, 70, torch.float32, activation="gelu")
    with dispatch.use_backend(linear_int8="triton"):
        y = linear_int8(**args, float_rows=True)
    torch.testing.assert_close(y, linear_int8_ref(**args, float_rows=True))


def test_tiles_by_rows():
    """Few rows have small tiles; a gate's two accumulators take as many registers as one."""
    for capability in ((8, 0), (9, 0), (12, 0)):
        tall = [kernels.config(rows, False, capability).block_m for rows in (1, 32, 33, 512, 513)]
        assert tall == [32, 32, 64, 64, 128]
        for rows in (1, 64, 4096):
            plain, gated = (kernels.config(rows, gated, capability) for gated in (False, True))
            assert plain.block_n == 2 * gated.block_n
    assert kernels.config(5, False, tuning.device_of(torch.device("cpu")).capability).block_m == 16


def check(rows, depth, out, dtype, gated, activation, seed):
    args = arguments(rows, depth, 2 * out if gated else out, DTYPES[dtype], seed)
    assert_rounded(args["x"])
    assert_right(args | {"gated": gated, "activation": activation})


test_fuzz, test_fuzz_long = fuzz_tests(
    check,
    st.tuples(
        *(st.integers(1, 70), st.integers(1, 140), st.integers(1, 70), st.integers(0, 2)),
        *(st.sampled_from([None, "first", "second"]), st.sampled_from([None, *ACTIVATIONS])),
        st.integers(0, 9),
    ),
    12,
    200,
)
