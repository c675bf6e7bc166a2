"""The Triton linear: on the GPU where there is one, else in the interpreter under the sanitizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from fastbert import testing
from fastbert.backends import reference
from fastbert.backends.cuda import linear as cuda_linear
from fastbert.ops.activation import ACTIVATIONS, activate_ref
from fastbert.ops.linear import LinearInputs
from fastbert.testing.op_cases.linear import LinearCase
from tests.support.cpu_truth import activation64
from tests.support.triton_fixtures import (
    DEVICE,
    DTYPES,
    HALF,
    assert_bit_equal,
    fuzz_tests,
    kernels_of,
    normal,
)

kernels = kernels_of("linear")
pytestmark = pytest.mark.usefixtures("checked_memory")
tuning = kernels.tuning


def check(case: LinearCase, dtype: torch.dtype, seed: int = 0) -> None:
    (row,) = testing.run_case(case, "triton", dtype, DEVICE, backward=False, seed=seed)
    elements = case.rows * case.out_features
    lucky = (
        elements < 1000
        and "mean error" in row.reason
        and row.mean_error <= row.eager_mean_error * (1 + 4 / elements**0.5)
    )
    assert row.passed or lucky, row.reason


def forward_args(rows, in_features, out_features, dtype=torch.float32, activation="gelu", save=True):
    """Arguments of `linear_fwd`, all of different sizes, so that none can be swapped unseen."""
    g = torch.Generator().manual_seed(7)
    randn = normal(g, dtype)

    return {
        "x": randn(rows, in_features),
        "weight": randn(out_features, in_features, scale=in_features**-0.5),
        "bias": randn(out_features, scale=0.5),
        "activation": activation,
        "residual": randn(rows, out_features, scale=2.0),
        "save": save,
    }


def inputs_of(args):
    """(inputs, save) of `forward_args`, as the launcher takes them."""
    return LinearInputs(**{name: arg for name, arg in args.items() if name != "save"}), args["save"]


# --- the error rule -----------------------------------------------------------------------------------------


# Edges of the tiles in every dimension: 16 and 32 rows, 32 and 64 columns, depth 32 and 64; in both ranks of
# the ladder, aligned (multiples of 8) and not.
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 31, 32, 33, 65])
@pytest.mark.parametrize(("in_features", "out_features"), [(8, 64), (64, 72), (65, 40), (40, 31), (33, 129)])
def test_edges_of_tiles(rows, in_features, out_features):
    dtype = DTYPES[(rows + in_features) % 3]
    check(LinearCase(rows, in_features, out_features, list(ACTIVATIONS)[rows % 4], residual=True), dtype)


# More row tiles than a group has, and not a multiple of it; more tiles than programs.
@pytest.mark.parametrize("rows", [129, 160, 200])
def test_tile_order(rows, transport):
    check(LinearCase(rows, 16, 200), torch.float16)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tma", [True, False])
def test_parts_of_the_accumulator(split, tma, exact_gelu):
    if tma and DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no TMA")
    config = kernels.Config(32, 64, 32, 4, 2, split, tma, group_m=2, bias_first=split < 4)
    args = forward_args(37, 40, 136, torch.bfloat16)
    actual = kernels.linear_fwd_with(config, *inputs_of(args))
    for a, e in zip(actual, reference.linear_fwd(*inputs_of(args)), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("depth", [48, 128])  # blocks of 64, the last one partial or whole
def test_exact_on_small_integers(depth, transport):
    g = torch.Generator().manual_seed(3)

    def integers(*shape):
        return torch.randint(-2, 3, shape, generator=g).to(DEVICE)

    x, weight, bias, residual = integers(37, depth), integers(72, depth), integers(72), integers(37, 72)
    pre = (x.double() @ weight.double().T + bias).long()
    assert pre.abs().max() <= 255  # exact in bfloat16
    for dtype in DTYPES:
        args = [t.to(dtype) for t in (x, weight, bias)]
        actual = kernels.linear_fwd(LinearInputs(*args, "relu", residual.to(dtype)), True)
        assert_bit_equal(actual, ((pre.clamp_min(0) + residual).to(dtype), pre.to(dtype)))


@pytest.mark.parametrize("depth", (511, 512, 513, 576, 1024, 1088, 1100))
def test_parts_of_a_deep_sum(depth):
    """Of whole parts, with a shorter last one, and of depths that are no multiple of a tile: in one."""
    g = torch.Generator().manual_seed(3)
    x, weight = (torch.randint(-2, 3, (rows, depth), generator=g).float().to(DEVICE) for rows in (5, 8))
    y, _ = kernels.linear_fwd(LinearInputs(x, weight), False)
    assert torch.equal(y, (x.double() @ weight.double().T).float())


# --- activations --------------------------------------------------------------------------------------------


def activated(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The kernel's activation of each element of the vector `z`, which is the bias of a product with 0."""
    return kernels.linear_fwd(LinearInputs(z.new_zeros(1, 1), z.new_zeros(len(z), 1), z, activation), False)[
        0
    ][0]


def samples() -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.cat([torch.randn(3072, generator=g), torch.rand(1024, generator=g) * 15 - 9]).to(DEVICE)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_correctly_rounded(dtype, activation, exact_gelu):
    z = samples().to(dtype)
    expected = activation64(z, activation)[0].to(dtype)
    assert (activated(z, activation) == expected).double().mean() >= 0.999


# The share of correctly rounded results at unit scale; the largest relative error of the tail before they are
# rounded, for |z| < 2 and < 4
CHEAP = {torch.bfloat16: (0.95, 5.2e-4, 5.2e-4), torch.float16: (0.87, 4.1e-4, 2.7e-3)}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_cheap_gelu(dtype):
    """Off by little where gelu is not tiny, and nearer to the truth than PyTorch's two ops."""
    share, most, far = CHEAP[dtype]
    g = torch.Generator().manual_seed(11)
    pre = torch.randn(8192, generator=g).to(DEVICE)
    z = pre.to(dtype)
    y, right = activated(z, "gelu"), activation64(z, "gelu")[0]
    assert share <= (y == right.to(dtype)).double().mean() < 0.999  # the exact one has more
    z = torch.linspace(-4, 8, 20_001, device=DEVICE).to(dtype)
    y, right = activated(z, "gelu").double(), activation64(z, "gelu")[0]
    step = torch.finfo(dtype).eps * 2.0 ** right.abs().log2().floor()
    step = step.clamp_min(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    bound = torch.where(z.abs() < 2, most, far)
    assert ((y - right).abs() <= bound * (right - z.double().clamp_min(0)).abs() + step * 0.5001).all()
    ours, eager = gelu_errors(pre, dtype)
    for some in (pre < 0, pre > 0):
        assert ours[some].norm() <= eager[some].norm()


def gelu_errors(pre: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's errors and those of PyTorch's two ops, at pre-activations that PyTorch has to round."""
    weight = torch.cat([pre.to(dtype).unsqueeze(1), (pre - pre.to(dtype).float()).to(dtype).unsqueeze(1)], 1)
    exact = activation64(weight.double().sum(1), "gelu")[0]
    ones = torch.ones(1, 2, dtype=dtype, device=DEVICE)
    ours = kernels.linear_fwd(LinearInputs(ones, weight, activation="gelu"), False)[0][0].double()
    eager = torch.nn.functional.gelu((ones @ weight.T)[0]).double()
    return (ours - exact).abs(), (eager - exact).abs()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_cheap_gelu_in_every_stretch(dtype):
    """The fit spends its error where PyTorch's is large too: down to -4.5 ours is nowhere larger."""
    pre = -torch.arange(9, device=DEVICE).repeat_interleave(2000) / 2
    pre = pre - torch.rand(len(pre), generator=torch.Generator().manual_seed(3)).to(DEVICE) / 2
    ours, eager = gelu_errors(pre, dtype)
    assert (ours.view(9, 2000).amax(1) <= eager.view(9, 2000).amax(1)).all()


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_cheap_gelu_at_its_ends(dtype):
    z = torch.tensor([float("nan"), float("inf"), 0.0, 100.0, 1e4, -1e4, -float("inf")], dtype=dtype)
    y = activated(z.to(DEVICE), "gelu")
    assert y[0].isnan()
    assert y[1:5].tolist() == [float("inf"), 0.0, 100.0, z[4].item()]
    assert y[5:].abs().max() <= 1e-34
    z = -torch.rand(4096, generator=torch.Generator().manual_seed(2)) * 16 - 4
    y = activated(z.to(dtype).to(DEVICE), "gelu").double()
    assert (y - activation64(z.to(dtype).to(DEVICE), "gelu")[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("module", [kernels.activation_kernels, cuda_linear], ids=["triton", "cuda"])
def test_exact_gelu_is_asked_for_by_the_environment(monkeypatch, module):
    wants = module._wants_exact_gelu
    for value, wanted in ((None, False), ("", False), ("0", False), ("1", True)):
        if value is None:
            monkeypatch.delenv("FASTBERT_EXACT_GELU", raising=False)
        else:
            monkeypatch.setenv("FASTBERT_EXACT_GELU", value)
        assert wants() is wanted
    monkeypatch.setenv("FASTBERT_EXACT_GELU", "yes")
    with pytest.raises(ValueError, match="FASTBERT_EXACT_GELU: expected 0, 1 or nothing, got 'yes'"):
        wants()


def test_float32_adds_the_bias_last():
    """Added first, a large bias would be rounded again at every step of the product."""
    args = forward_args(20, 512, 40, activation=None) | {"residual": None}
    args["bias"] = args["bias"] * 1e4
    y = kernels.linear_fwd(*inputs_of(args))[0].double()
    exact = args["x"].double() @ args["weight"].double().T + args["bias"].double()
    step = torch.finfo(torch.float32).eps * 2.0 ** exact.abs().log2().floor()
    assert ((y - exact).abs() <= 0.52 * step + 4e-6).all()


@pytest.mark.sweep
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_in_float32(activation):
    z = samples()
    expected = activation64(z, activation)[0]
    actual = activated(z, activation).double()
    assert (actual - expected).abs().max() <= 1e-6
    assert ((actual - expected) / expected).nan_to_num().abs().max() <= 2e-5  # in the tail too


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_of_what_is_not_finite(activation, dtype, exact_gelu):
    z = torch.tensor([float("nan"), float("inf"), 0.0, 100.0], dtype=dtype, device=DEVICE)
    y = activated(z, activation)
    assert y[0].isnan()
    far = [1.0, 0.0, 1.0] if activation == "tanh" else [float("inf"), 0.0, 100.0]
    assert y[1:].tolist() == far
    if activation in ("gelu", "relu"):
        assert activated(z.new_tensor([-float("inf"), -100.0]), activation).tolist() == [0.0, 0.0]


def test_the_activation_takes_the_unrounded_product(exact_gelu):
    args = forward_args(64, 64, 128, torch.bfloat16) | {"residual": None}
    y, pre = kernels.linear_fwd(*inputs_of(args))
    exact = args["x"].double() @ args["weight"].double().T + args["bias"].double()
    assert (y == activate_ref(exact, "gelu").bfloat16()).double().mean() >= 0.99
    assert (pre == exact.bfloat16()).double().mean() >= 0.99


# --- layouts ------------------------------------------------------------------------------------------------


def test_a_start_that_is_not_aligned():
    args = forward_args(20, 40, 72, torch.bfloat16)
    shifted = torch.empty(20 * 48 + 1, dtype=torch.bfloat16, device=DEVICE)[1:].view(20, 48)[:, :40]
    shifted.copy_(args["x"])
    assert_bit_equal(
        kernels.linear_fwd(*inputs_of(args | {"x": shifted})), kernels.linear_fwd(*inputs_of(args))
    )


def test_single_columns_whose_stride_says_nothing():
    g = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(8, 2, 4, generator=g).bfloat16().to(DEVICE)[:, :1, 0] for _ in range(2))
    assert x.stride() == (8, 4)
    y = kernels.linear_fwd(LinearInputs(x, weight), False)[0]
    assert torch.equal(y, x * weight.T)


def test_one_row_expanded_to_many():
    args = forward_args(1, 40, 72)
    many = args | {"x": args["x"].expand(33, 40), "residual": args["residual"].expand(33, 72)}
    assert not kernels.fits_tensor_map(many["x"])  # the interpreter accepts them, a tensor map does not
    y, one = kernels.linear_fwd(*inputs_of(many))[0], kernels.linear_fwd(*inputs_of(args))[0]
    torch.testing.assert_close(y, one.expand(33, 72), rtol=0, atol=1e-6)  # tiles may differ


def test_nan_stays_in_its_row_and_column(transport):
    args = forward_args(40, 40, 72)
    clean = kernels.linear_fwd(*inputs_of(args))
    args["x"][33, 5] = float("nan")
    args["weight"][70, 39] = float("nan")
    for a, b in zip(clean, kernels.linear_fwd(*inputs_of(args)), strict=True):
        assert b[33].isnan().all()
        assert b[:, 70].isnan().all()
        rows, cols = (torch.arange(n, device=DEVICE) for n in b.shape)
        kept = (rows != 33)[:, None] & (cols != 70)[None, :]
        assert torch.equal(a[kept], b[kept])


# --- the contract -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_what_forward_returns(activation, save, transport):
    args = forward_args(9, 40, 72, activation=activation, save=save)
    for optional in ((), ("bias",), ("residual",), ("bias", "residual")):
        given_args = args | dict.fromkeys(optional)
        actual, expected = (m.linear_fwd(*inputs_of(given_args)) for m in (kernels, reference))
        for a, e in zip(actual, expected, strict=True):
            assert (a.dtype, a.shape) == (e.dtype, e.shape)
            torch.testing.assert_close(a, e)


# --- configs ------------------------------------------------------------------------------------------------


def test_only_devices_with_tma_and_aligned_half_precision_get_tma():
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (13, 0)):
        for dtype in DTYPES:
            for aligned in (True, False):
                wanted = capability[0] in (9, 10, 12) and dtype in HALF and aligned
                assert {c.tma for c in kernels.ladder(dtype, aligned, capability)} == {wanted}


def test_many_lengths_meet_few_configs(noted):
    kernels.config_for.cache_clear()
    asked = noted(kernels, "config_for", lambda rows, *key: rows)
    weight = torch.zeros(8, 8, dtype=torch.bfloat16, device=DEVICE)
    for rows in (1, 3, 33, 63, 64, 65, 128):
        kernels.linear_fwd(LinearInputs(weight.new_zeros(rows, 8), weight), False)
    assert asked == [1, 4, 64, 64, 64, 128, 128]


# --- fuzz ---------------------------------------------------------------------------------------------------


@st.composite
def fuzzed_cases(draw):
    size = st.one_of(st.integers(1, 70), st.sampled_from([8, 16, 32, 64, 96]))
    case = LinearCase(
        rows=draw(st.integers(1, 70)),
        in_features=draw(size),
        out_features=draw(size),
        activation=draw(st.sampled_from([None, *ACTIVATIONS])),
        bias=draw(st.booleans()),
        residual=draw(st.booleans()),
    )
    return case, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20))


test_fuzz, test_fuzz_long = fuzz_tests(check, fuzzed_cases(), 40, 2000)
