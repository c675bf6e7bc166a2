"""The Triton layer_norm: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends import triton as backend
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import KINDS
from fastbert.testing.op_cases.layer_norm import LayerNormCase
from tests.support.launchers import layer_norm_bwd, layer_norm_fwd
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    assert_bit_equal,
    fuzz_tests,
    in_float64,
    kernels_of,
    lucky_yardstick,
    normal,
)

kernels = kernels_of("layer_norm")
pytestmark = pytest.mark.usefixtures("checked_memory")
ONE_BLOCK = ("FWD_ONE_BLOCK", "BWD_ONE_BLOCK")


@pytest.mark.parametrize("programs", [63, 64, 65, 129, 396])
def test_as_many_partial_sums_as_a_large_gpu_makes(programs):
    """The kernel that adds partial sums takes 64 at a time, more than the interpreter has programs."""
    partials = normal(torch.Generator().manual_seed(0), torch.float32)(3, programs, 40)
    outs = [torch.full((40,), float("nan"), device=DEVICE) for _ in range(3)]
    kernels.launch(
        kernels._sum_partials_kernel,
        (2, 3),
        DEVICE,
        partials,
        *outs,
        programs,
        HIDDEN=40,
        BLOCK_M=64,
        BLOCK_N=32,
        num_warps=4,
    )
    torch.testing.assert_close(torch.stack(outs).double(), partials.double().sum(1), rtol=1e-5, atol=1e-5)


def check(case: LayerNormCase, dtype: torch.dtype, seed: int = 0) -> None:
    rows = testing.run_case(case, "triton", dtype, DEVICE, seed=seed)
    assert len(rows) >= 3
    of_parameters = ("dweight", "dbias", "dx_bias")
    elements = {r.quantity: case.hidden * (r.quantity in of_parameters or case.rows) for r in rows}
    failed = [
        r for r in rows if not (r.passed or lucky_yardstick(r, case, dtype, seed, elements[r.quantity]))
    ]
    assert [f"{r.quantity}: {r.reason}" for r in failed] == []


def forward_args(
    rows,
    hidden,
    dtype=torch.float32,
    *,
    residual=True,
    x_bias=True,
    p=0.25,
    eps=1e-12,
    kind="layer_norm",
    return_sum=False,
    save=True,
):
    """Arguments of `layer_norm_fwd`, all of different sizes, so that none can be swapped unseen."""
    g = torch.Generator().manual_seed(7)
    randn = normal(g, dtype)

    return {
        "x": randn(rows, hidden),
        "weight": randn(hidden, scale=0.3, shift=1.0),
        "bias": randn(hidden, scale=0.2),
        "residual": randn(rows, hidden, scale=2.0) if residual else None,
        "x_bias": randn(hidden, scale=0.5) if x_bias else None,
        "eps": eps,
        "dropout_p": p,
        "seed": torch.tensor([99], device=DEVICE) if p else None,
        "offset": 11,
        "kind": kind,
        "return_sum": return_sum,
        "save": save,
    }


def backward(module, dy, args, saved, needs=(True,) * 4):
    """`needs`: of dx, dweight, dxbias and dresidual."""
    _, z, mean, rstd = saved
    z = z if z.numel() else args["x"]
    dropout = (args[name] for name in ("dropout_p", "seed", "offset"))
    return layer_norm_bwd(module, dy, z, args["weight"], mean, rstd, *dropout, *needs)


# --- the error rule -----------------------------------------------------------------------------------------


def everything(rows: int, hidden: int, **options: bool) -> LayerNormCase:
    """All options on that concern the rows."""
    return LayerNormCase(rows, hidden, residual=True, x_bias=True, dropout_p=0.25, **options)


# Masks, the pairing of Philox lanes with columns, rows that share a tile: each width has its own edge.
# `make test` takes the first and the last.
@pytest.mark.parametrize(
    "width", [*range(1, 131), kernels.FWD_ONE_BLOCK, kernels.FWD_ONE_BLOCK + 4, 384, 768]
)
def test_every_width(width):
    check(everything(3, width), DTYPES[width % 3])
    if width < 131:
        check(everything(3, width, norm="rms_norm", return_sum=True), DTYPES[(width + 1) % 3])
    check(everything(3, width, norm="no_norm"), DTYPES[(width + 2) % 3])
    if width < 16:
        check(everything(3, width), torch.float32)


# Around the tile heights of forward (64) and backward (16), and around 6 x 16 rows for its six programs.
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 63, 64, 65, 95, 96, 97, 130])
def test_row_counts(rows):
    check(everything(rows, 16), DTYPES[rows % 3])


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_outputs_are_correctly_rounded(dtype):
    args = forward_args(64, 768, dtype)
    y = layer_norm_fwd(kernels, *args.values())[0]
    expected = layer_norm_fwd(reference, *in_float64(args).values())[0].to(dtype)
    assert (y == expected).double().mean() >= 0.999


def test_variance_of_a_large_mean():
    # E[z²] - E[z]² in float32 would lose all digits here
    args = forward_args(5, 100, p=0.0) | {"eps": 1e-5}
    args["residual"] += 5000
    saved = layer_norm_fwd(kernels, *args.values())
    expected = layer_norm_fwd(reference, *in_float64(args).values())
    torch.testing.assert_close(saved[3].double(), expected[3], rtol=2e-4, atol=0)
    torch.testing.assert_close(saved[0].double(), expected[0], rtol=0, atol=5e-3)


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_eps(eps, hidden):
    args = forward_args(2, hidden, residual=False, x_bias=False, p=0.0, eps=eps)
    saved, expected = layer_norm_fwd(kernels, *args.values()), layer_norm_fwd(reference, *args.values())
    torch.testing.assert_close(saved[0], expected[0])
    torch.testing.assert_close(saved[3], expected[3])


def test_a_nan_stays_in_its_row():
    args = forward_args(8, 20, p=0.0)
    clean = layer_norm_fwd(kernels, *args.values())
    args["x"][3, 5] = float("nan")
    dirty = layer_norm_fwd(kernels, *args.values())
    others = [0, 1, 2, 4, 5, 6, 7]
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[others], b[others])
    assert dirty[0][3].isnan().all()
    dx_clean, dx_dirty = (backward(kernels, args["residual"], args, saved)[0] for saved in (clean, dirty))
    assert torch.equal(dx_clean[others], dx_dirty[others])


@pytest.mark.parametrize("where", ["x", "dy"])
def test_backward_of_one_number_a_row_is_zero_but_for_a_nan(where):
    args = forward_args(8, 1, p=0.0)
    dy = args["residual"].clone()
    (dy if where == "dy" else args["x"])[3] = float("nan")
    dx = backward(kernels, dy, args, layer_norm_fwd(kernels, *args.values()))[0]
    assert dx[3].isnan()
    assert (dx[[0, 1, 2, 4, 5, 6, 7]] == 0).all()


# --- dropout ------------------------------------------------------------------------------------------------

LARGEST = 2**32 - 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("seed", "offset", "p"),
    [
        (0, 0, 0.5),
        (1234, 3, 0.1),
        (-1, LARGEST, 0.25),
        (2**62 + 12345, 2**31, 0.999),
        (-(2**63), 2**31 - 1, 0.5),
    ],
)
@pytest.mark.parametrize("width", [1, 6, 130])
def test_dropout_bits_are_the_definitions(seed, offset, p, width):
    x = torch.ones(9, width, device=DEVICE)
    seed = torch.tensor([seed], device=DEVICE)
    weight = torch.ones(width, device=DEVICE)
    _, z, mean, rstd = layer_norm_fwd(kernels, x, weight, None, None, None, 1e-5, p, seed, offset, True)
    keep = keep_mask_2d(seed, offset, 9, width, p)
    assert torch.equal(z, torch.where(keep, torch.tensor(1 / (1 - p), device=DEVICE), 0.0))
    dy = torch.randn(9, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    dx, dresidual, *_ = layer_norm_bwd(
        kernels, dy, z, weight, mean, rstd, p, seed, offset, True, False, False, True
    )
    assert torch.equal(dx, torch.where(keep, dresidual * torch.tensor(1 / (1 - p), device=DEVICE), 0.0))


def test_dropout_of_the_first_words_of_random123():
    # Philox4x32-10, counter 0, key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (kat_vectors of Random123)
    lanes = torch.tensor([0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00])
    for lane in lanes.tolist():
        for p in (lane / 2**16, (lane + 0.6) / 2**16, (lane + 1) / 2**16):
            x, seed = torch.ones(1, 8, device=DEVICE), torch.tensor([0], device=DEVICE)
            z = layer_norm_fwd(kernels, x, x[0], None, None, None, 1e-5, p, seed, 0, True)[1]
            assert (z[0] != 0).tolist() == (lanes >= round(p * 2**16)).tolist()


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"residual": True},
        {"x_bias": True},
        {"p": 0.25},
        {"residual": True, "kind": "rms_norm", "return_sum": True},
        {"residual": True, "kind": "no_norm", "return_sum": True},
    ],
    ids=str,
)
def test_what_forward_saves(options, save, hidden):
    options = {"residual": False, "x_bias": False, "p": 0.0} | options
    args = forward_args(3, hidden, torch.bfloat16, **options, save=save)
    actual, expected = layer_norm_fwd(kernels, *args.values()), layer_norm_fwd(reference, *args.values())
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
    if actual[1].numel() > 0:  # with a residual or a mask, one in a thousand may be rounded differently
        assert (actual[1] == expected[1]).double().mean() >= 0.999
    if save:
        torch.testing.assert_close(actual[2], expected[2])
        torch.testing.assert_close(actual[3], expected[3])


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=4)), ids=str)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_what_backward_returns(needs, p, hidden):
    args = forward_args(18, hidden, torch.float32, p=p)
    saved = layer_norm_fwd(kernels, *args.values())
    dy = torch.randn(18, hidden, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    actual, expected = (backward(module, dy, args, saved, needs) for module in (kernels, reference))
    for a, e in zip(actual, expected, strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("which", ["weight", "bias", "x_bias"])
def test_parameters_in_float32_beside_half_inputs(dtype, which):
    args = forward_args(4, 50, dtype)
    wide = args | {which: args[which].float()}  # the same values: the same result to the bit
    assert_bit_equal(layer_norm_fwd(kernels, *wide.values()), layer_norm_fwd(kernels, *args.values()))


# --- fuzz ---------------------------------------------------------------------------------------------------


@st.composite
def fuzzed_cases(draw):
    dtype = draw(st.sampled_from(DTYPES))
    case = LayerNormCase(
        rows=draw(st.integers(1, 20)),
        hidden=draw(st.one_of(st.integers(1, 40), st.integers(1, 200))),
        residual=draw(st.booleans()),
        x_bias=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.1, 0.5])),
        bias=draw(st.booleans()),
        norm=draw(st.sampled_from(KINDS)),
        return_sum=draw(st.booleans()),
    )
    return case, dtype, draw(st.integers(0, 2**20))


test_fuzz, test_fuzz_long = fuzz_tests(check, fuzzed_cases(), 60, 3000)


# --- the backend --------------------------------------------------------------------------------------------


def test_backend_says_why_it_cannot_serve(monkeypatch):
    assert backend.available(DEVICE.type) is None
    assert backend.available("mps") == "device type mps is not supported"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in backend.available("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.available("cuda") == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert backend.available("cuda") == "compute capability 7.5 is below 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert backend.available("cuda") is None
