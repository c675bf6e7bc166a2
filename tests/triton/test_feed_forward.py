"""The Triton feed-forward block: on the GPU where there is one, else in the interpreter, sanitized."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.activation import ACTIVATIONS, slope_ref
from fastbert.ops.feed_forward import FeedForwardNeeds, FeedForwardSaved
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

kernels = kernels_of("feed_forward")
pytestmark = pytest.mark.usefixtures("checked_memory")


def arguments(rows, out, inner, dtype=torch.float32, activation="gelu", seed=7):
    """Arguments of `inner_gradient` that ask for everything."""
    randn = normal(torch.Generator().manual_seed(seed), dtype)
    return {
        "dy": randn(rows, out),
        "down_weight": randn(out, inner, scale=out**-0.5),
        "pre": randn(rows, inner, scale=2.0),
        "activation": activation,
        "need_dbias": True,
    }


def run(args):
    return kernels.inner_gradient(*args.values())


def assert_right(args):
    """g and dbias against float64, within what float32's sums and one rounding at each store allow."""
    dy, weight, pre = (args[name] for name in ("dy", "down_weight", "pre"))
    wide = in_float64(args)
    slope = slope_ref(wide["pre"], args["activation"])
    truth = wide["dy"] @ wide["down_weight"] * slope
    size = wide["dy"].abs() @ wide["down_weight"].abs()  # of the product's terms
    half = dy.dtype != torch.float32
    off = {torch.bfloat16: 8e-5, torch.float16: 2e-5, torch.float32: 1e-6}[dy.dtype]
    allowed = 0.51 * testing.rounding_step(truth, dy.dtype) + off * size
    g, dbias = run(args)
    assert (g.dtype, g.shape) == (dy.dtype, pre.shape)
    assert ((g.double() - truth).abs() <= allowed).all()
    total = truth.sum(0)
    # in half precision the sums may be of g as it is stored
    allowed = allowed.sum(0) if half else off * size.sum(0)
    assert (dbias.dtype, dbias.shape) == (dy.dtype, weight.shape[1:])
    assert ((dbias.double() - total).abs() <= allowed + 0.51 * testing.rounding_step(total, dy.dtype)).all()


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_exact_gelu_has_an_exact_slope(dtype, monkeypatch):
    """99.9% correctly rounded where the product is exact; the cheap slope's share is less."""
    args = arguments(256, 8, 64, dtype)
    args |= {"dy": torch.ones_like(args["dy"]), "down_weight": torch.full_like(args["down_weight"], 0.125)}
    expected = slope_ref(args["pre"].double(), "gelu").to(dtype)
    shares = []
    for exact in (True, False):
        monkeypatch.setattr(kernels.activation_kernels, "EXACT_GELU", exact)
        shares.append((run(args)[0] == expected).double().mean().item())
    assert shares[0] >= 0.999 > shares[1]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slopes_everywhere(activation, dtype):
    """Over all of float16's range: dy is one column of ones, and so is the weight."""
    z = torch.cat([torch.linspace(-14, 14, 501), torch.logspace(-6, 4.8, 61)]).to(dtype)
    z = torch.cat([z, -z, torch.zeros(1, dtype=dtype)])
    z = torch.cat([z, z.new_zeros(-len(z) % 16)]).reshape(-1, 16).to(DEVICE)
    args = arguments(z.shape[0], 1, 16, dtype, activation)
    args |= {name: torch.ones_like(args[name]) for name in ("dy", "down_weight")}
    assert_right(args | {"pre": z})


@pytest.mark.parametrize("inner", [20, 48])
def test_exact_on_small_integers(inner):
    args = arguments(40, 6, inner, activation="relu")
    args |= {name: (args[name] * 3).round() for name in ("dy", "down_weight", "pre")}
    product = args["dy"] @ args["down_weight"]
    g = torch.where(args["pre"] > 0, product, 0)
    assert_bit_equal(run(args), (g, g.sum(0)))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 65, 97])
@pytest.mark.parametrize("inner", [1, 8, 31, 32, 33, 64, 72, 129])
def test_edges_of_tiles(rows, inner):
    """Around the edges of tiles, of 16 or 32 rows and 32 or 64 columns; by TMA where rows are of 16 bytes."""
    which = rows + inner
    out = (8, 33, 64, 80)[which % 4]
    assert_right(arguments(rows, out, inner, DTYPES[rows % 3], tuple(ACTIVATIONS)[which % len(ACTIVATIONS)]))


@pytest.mark.sweep
def test_sums_are_kept_in_float32():
    """96 tiles of 32 rows whose sum, 32.125, bfloat16 does not have."""
    config = kernels.linear.ladder(torch.bfloat16, True, (0, 0))[0]
    assert config.block_m == 32
    dy = torch.ones(96 * 32, 8, dtype=torch.bfloat16, device=DEVICE)
    dy[::32] = 1.125
    weight = torch.eye(8, dtype=dy.dtype, device=DEVICE)
    for by_product in (True, False):
        dbias = kernels.inner_gradient_with(
            config, dy, weight, torch.ones_like(dy), "relu", True, by_product
        )[1]
        assert dbias.tolist() == [3088.0] * 8  # 3,084 rounded once; of rounded sums it would be 3,072


@pytest.mark.parametrize("name", ["dy", "down_weight", "pre"])
def test_a_start_that_no_tensor_map_has(name, noted):
    """Any matrix may begin between two multiples of 16 bytes; then none moves by TMA."""
    args = arguments(19, 24, 72, torch.bfloat16)
    moved = torch.empty(args[name].numel() + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(
        args[name].shape
    )
    assert moved.copy_(args[name]).data_ptr() % 16
    taken = noted(kernels, "inner_gradient_with", lambda config, *rest: config.tma)
    assert_right(args)
    assert_right(args | {name: moved})
    assert taken == [True, False]


@pytest.mark.parametrize("needs", [tuple(bool(i >> b & 1) for b in range(4)) for i in range(16)], ids=str)
def test_only_what_is_needed(needs):
    """Shapes and values are the reference's; what unneeded gradients would need is None."""
    need = FeedForwardNeeds(*needs)
    args = arguments(21, 12, 33)
    randn = normal(torch.Generator().manual_seed(1), torch.float32)
    saved = FeedForwardSaved(
        randn(21, 10) if need.dup_weight else None,
        randn(33, 10) if need.dx else None,
        args["down_weight"] if need.g else None,
        args["pre"] if need.g else None,
        randn(21, 33) if need.ddown_weight else None,
        "gelu",
    )
    given = args["dy"], saved, need
    for a, e in zip(backend.feed_forward_bwd(*given), reference.feed_forward_bwd(*given), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_wide_weights_have_gradients_in_float32():
    args = arguments(21, 16, 32, torch.bfloat16)
    x, inner = (normal(torch.Generator().manual_seed(i), torch.bfloat16)(21, n) for i, n in ((1, 8), (2, 32)))
    up = normal(torch.Generator().manual_seed(3), torch.bfloat16)(32, 8)
    given = args["dy"], FeedForwardSaved(x, up, args["down_weight"], args["pre"], inner, "gelu")
    half, wide = (backend.feed_forward_bwd(*given, FeedForwardNeeds(*(True,) * 4, w)) for w in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(wide[::2], half[::2], strict=True))
    for a, b in zip(wide[1::2], half[1::2], strict=True):
        assert a.dtype == torch.float32
        assert not torch.equal(a, a.bfloat16().float())
        torch.testing.assert_close(a, b.float(), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("need_dbias", [False, True])
def test_nothing_is_launched_for_nothing(need_dbias, monkeypatch):
    launched, launch = [], kernels.launch

    def spy(kernel, grid, device, *args, **config):
        launched.append(kernel.fn.__name__)
        if kernel.fn.__name__ == "_feed_forward_bwd_kernel":
            assert (args[4] is not None) == need_dbias
        launch(kernel, grid, device, *args, **config)

    monkeypatch.setattr(kernels, "launch", spy)
    g, dbias = run(arguments(5, 4, 6) | {"need_dbias": need_dbias})
    assert launched == ["_feed_forward_bwd_kernel"] + ["_sum_partials_kernel"] * need_dbias
    assert (g.shape, dbias.shape) == ((5, 6), (6,) if need_dbias else (0,))


@pytest.mark.sweep
@fuzz(15)
@given(
    st.integers(1, 80),
    st.integers(1, 90),
    st.integers(1, 200),
    st.sampled_from(DTYPES),
    st.sampled_from(list(ACTIVATIONS)),
    st.integers(0, 2**20),
)
def test_fuzz(rows, out, inner, dtype, activation, seed):
    assert_right(arguments(rows, out, inner, dtype, activation, seed))
