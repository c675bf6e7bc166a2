"""The Triton linear's backward: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.ops.activation import ACTIVATIONS, slope_ref
from fastbert.ops.linear import LinearNeeds, LinearSaved
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    assert_bit_equal,
    fuzz,
    in_float64,
    kernels_of,
    normal,
)

kernels = kernels_of("linear_backward")
pytestmark = pytest.mark.usefixtures("checked_memory")


def arguments(rows, in_features, out_features, dtype=torch.float32, activation="gelu", seed=7):
    """Arguments of `linear_bwd` that ask for everything."""
    g = torch.Generator().manual_seed(seed)
    randn = normal(g, dtype)

    return {
        "dy": randn(rows, out_features),
        "x": randn(rows, in_features),
        "weight": randn(out_features, in_features, scale=in_features**-0.5),
        "pre": None if activation is None else randn(rows, out_features, scale=2.0),
        "activation": activation,
        "need": LinearNeeds(),
    }


def run(args, module=kernels):
    dy, *saved, need = args.values()
    return module.linear_bwd(dy, LinearSaved(*saved), need)


def passed(dy, pre, activation, need_g=True, need_dbias=True):
    """The pass before the products: (g, dbias)."""
    return kernels._activation_bwd(dy, pre, activation, need_g, need_dbias)


def assert_pass_right(args):
    """g and dbias against float64: g rounded once, dbias summed in float32 of g before it is rounded."""
    dy, pre, activation = args["dy"], args["pre"], args["activation"]
    g, dbias = passed(dy, pre, activation)
    wide = in_float64(args)
    slope = 1.0 if activation is None else slope_ref(wide["pre"], activation)
    truth = wide["dy"] * slope
    step = testing.rounding_step(truth, dy.dtype)
    near = 0.51 if dy.dtype != torch.float32 else 2.0
    error = 4e-7 if dy.dtype != torch.bfloat16 else 4e-6  # of the slope: where it is about 0
    assert ((g.double() - truth).abs() <= near * step + error * wide["dy"].abs()).all()
    total = truth.sum(0)
    allowed = near * testing.rounding_step(total, dy.dtype) + error * wide["dy"].abs().sum(0)
    assert (dbias.dtype, dbias.shape) == (dy.dtype, total.shape)
    assert ((dbias.double() - total).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_g_is_correctly_rounded(dtype, activation):
    args = arguments(64, 8, 768, dtype, activation)
    g, _ = passed(args["dy"], args["pre"], activation)
    wide = in_float64(args)
    expected = (wide["dy"] * slope_ref(wide["pre"], activation)).to(dtype)
    assert (g == expected).double().mean() >= 0.999


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slopes_everywhere(activation, dtype):
    """Over all of float16's range, including zeros of the derivative and far tails."""
    z = torch.cat([torch.linspace(-14, 14, 4001), torch.logspace(-6, 4.8, 301)]).to(dtype)
    z = torch.cat([z, -z, torch.zeros(1, dtype=dtype)])
    z = torch.cat([z, z.new_zeros(-len(z) % 16)]).reshape(-1, 16).to(DEVICE)
    assert_pass_right(arguments(*z.shape, 16, dtype, activation) | {"pre": z, "dy": torch.ones_like(z)})


def test_gelu_near_0_is_rounded_about_once_in_float32():
    """To a step of 0.5 to 1: PyTorch's gradient is, and most pre-activations lie there."""
    pre = torch.linspace(-1.0, 1.0, 4096, device=DEVICE).reshape(64, 64)
    g, _ = passed(torch.ones_like(pre), pre, "gelu")
    error = (g.double() - slope_ref(pre.double(), "gelu")).abs()
    assert error.max() <= 1.25e-7
    assert error.mean() <= 2e-8


def test_exact_on_small_integers():
    args = arguments(40, 6, 20, activation="relu")
    args |= {name: (args[name] * 3).round() for name in ("dy", "x", "weight", "pre")}
    assert_bit_equal(run(args), run(args, reference))
    args |= {"pre": None, "activation": None}
    assert_bit_equal(run(args), run(args, reference))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 47, 48, 49, 65])
@pytest.mark.parametrize("out_features", [1, 15, 17, 256, 257])
def test_edges_of_tiles(rows, out_features):
    """Around the edges of tiles (8 x 256 or 128 x 16); more than six tiles share six programs."""
    which = (rows + out_features) % 5
    activation = (None, *ACTIVATIONS)[which]
    assert_pass_right(arguments(rows, 3, out_features, DTYPES[rows % 3], activation))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_in_float32(dtype):
    """Sums of 3,000 ones, and of numbers that are lost if g is rounded before it is summed."""
    dy = torch.ones(3000, 2, dtype=dtype, device=DEVICE)
    assert torch.equal(passed(dy, None, None)[1], torch.full((2,), 3000.0, device=DEVICE).to(dtype))
    dy, pre = dy[:1500], torch.full((1500, 2), 0.3, dtype=dtype, device=DEVICE)
    slope = slope_ref(pre[:1].double(), "gelu")[0]
    assert torch.equal(passed(dy, pre, "gelu")[1], (1500 * slope).to(dtype))


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_what_is_needed(needs, activation):
    """Shapes and values are the reference's; inputs of unneeded gradients are None."""
    args = arguments(21, 12, 33, activation=activation)
    args |= {"need": LinearNeeds(*map(bool, needs))}
    args |= {"weight": args["weight"] if needs[0] else None, "x": args["x"] if needs[1] else None}
    for a, e in zip(run(args), run(args, reference), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("activation", "need_g", "need_dbias", "names"),
    [
        (None, True, False, []),
        (None, True, True, ["_linear_bwd_kernel", "_sum_partials_kernel"]),
        ("gelu", True, False, ["_linear_bwd_kernel"]),
        ("gelu", False, True, ["_linear_bwd_kernel", "_sum_partials_kernel"]),
        ("gelu", False, False, []),
    ],
)
def test_nothing_is_launched_or_stored_for_nothing(activation, need_g, need_dbias, names, monkeypatch):
    launched, given = [], []
    launch = kernels.launch

    def spy(kernel, grid, device, *args, **config):
        launched.append(kernel.fn.__name__)
        given.append(args)
        launch(kernel, grid, device, *args, **config)

    monkeypatch.setattr(kernels, "launch", spy)
    args = arguments(5, 4, 6, activation=activation)
    g, _ = passed(args["dy"], args["pre"], activation, need_g, need_dbias)
    assert launched == names
    if names:
        assert (given[0][2] is not None) == (need_g and activation is not None)
        assert (given[0][3] is not None) == need_dbias
    assert (g is args["dy"]) == (activation is None or not need_g)


@pytest.mark.sweep
@fuzz(15)
@given(
    st.integers(1, 80),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from([None, *ACTIVATIONS]),
    st.integers(0, 2**20),
)
def test_fuzz(rows, out_features, dtype, activation, seed):
    assert_pass_right(arguments(rows, 2, out_features, dtype, activation, seed))
