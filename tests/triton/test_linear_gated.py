"""The Triton linear with a gated activation: on the GPU where there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends import reference
from fastbert.ops.activation import ACTIVATIONS, GATES
from fastbert.ops.linear import LinearInputs
from fastbert.testing.op_cases.linear import LinearCase
from tests.support.cpu_truth import activation64
from tests.support.triton_fixtures import DEVICE, DTYPES, assert_bit_equal, kernels_of, normal
from tests.triton.test_linear import inputs_of

kernels = kernels_of("linear_gated")
pytestmark = pytest.mark.usefixtures("checked_memory")
BF16 = torch.bfloat16


def arguments(rows, in_features, columns, dtype=torch.float32, activation="gelu", save=True, gated="first"):
    """Arguments of `linear_fwd`, all of different sizes, so that none can be swapped unseen."""
    randn = normal(torch.Generator().manual_seed(7), dtype)
    return {
        "x": randn(rows, in_features),
        "weight": randn(2 * columns, in_features, scale=in_features**-0.5),
        "bias": randn(2 * columns, scale=0.5),
        "activation": activation,
        "residual": randn(rows, columns, scale=2.0),
        "save": save,
        "gated": gated,
    }


def expected(args):
    return reference.linear_fwd(*inputs_of(args))


def backward_arguments(rows, columns, dtype=torch.float32, activation="gelu", gated="first"):
    """Arguments of `gate_bwd` that ask for everything."""
    randn = normal(torch.Generator().manual_seed(5), dtype)
    dy, pre = randn(rows, columns), randn(rows, 2 * columns, scale=2.0)
    return dict(dy=dy, pre=pre, activation=activation, need_g=True, need_dbias=True, gated=gated)


# Edges of the tiles: 16 and 32 rows, 16 and 32 columns, depth 32 and 64; aligned and not.
@pytest.mark.parametrize("rows", [1, 16, 33, 65])
@pytest.mark.parametrize(("in_features", "columns"), [(8, 32), (64, 40), (65, 20), (40, 17), (33, 65)])
def test_edges_of_tiles(rows, in_features, columns):
    dtype = DTYPES[(rows + in_features) % 3]
    gated, activation = GATES[rows % 2], list(ACTIVATIONS)[(rows + columns) % 5]
    case = LinearCase(rows, in_features, 2 * columns, activation, residual=rows > 16, gated=gated)
    for row in testing.run_case(case, "triton", dtype, DEVICE):
        elements = rows * columns
        lucky = elements < 1000 and "mean error" in row.reason
        assert row.passed or (lucky and row.mean_error <= row.eager_mean_error * (1 + 4 / elements**0.5))


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tma", [True, False])
def test_parts_of_the_accumulators(split, tma, exact_gelu):
    if tma and DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this GPU has no TMA")
    config = kernels.linear.Config(32, 64, 32, 4, 2, split, tma, group_m=2, bias_first=split < 4)
    args = arguments(37, 40, 136, BF16)
    for a, e in zip(kernels.linear_fwd_with(config, *inputs_of(args)), expected(args), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("depth", [48, 128, 1088])  # the last block partial or whole; float32 in parts
@pytest.mark.parametrize("gated", GATES)
def test_exact_on_small_integers(depth, gated, transport):
    g = torch.Generator().manual_seed(3)

    def integers(*shape, most=2):
        return torch.randint(-most, most + 1, shape, generator=g).to(DEVICE)

    x, weight = integers(37, depth, most=1), integers(72, depth, most=1)
    weight[:, 48:] *= integers(72, depth - 48, most=2) == 2  # most are 0: the sums stay small
    bias, residual = integers(72), integers(37, 36)
    pre = (x.double() @ weight.double().T + bias).long()
    a, b = pre.split(36, 1)
    y = a.clamp(min=0) * b if gated == "first" else a * b.clamp(min=0)
    for dtype in DTYPES:
        given = [t.to(dtype) for t in (x, weight, bias)]
        found = kernels.linear_fwd(LinearInputs(*given, "relu", residual.to(dtype), gated), True)
        assert torch.equal(found[1], pre.to(dtype))
        assert torch.equal(found[0], (y + residual).to(dtype))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", GATES)
def test_what_forward_returns(activation, gated, transport):
    for save, optional in (
        (True, ()),
        (False, ("bias",)),
        (True, ("residual",)),
        (False, ("bias", "residual")),
    ):
        args = arguments(9, 40, 72, activation=activation, save=save, gated=gated) | dict.fromkeys(optional)
        for a, e in zip(kernels.linear_fwd(*inputs_of(args)), expected(args), strict=True):
            assert (a.dtype, a.shape) == (e.dtype, e.shape)
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 17), (70, 300), (1100, 9)])
def test_the_gradient(rows, columns, gated):
    for dtype, activation in zip(DTYPES, ("gelu", "silu", "tanh"), strict=True):
        args = backward_arguments(rows, columns, dtype, activation, gated)
        dy, pre = args["dy"].double(), args["pre"].double()
        a, b = pre.split(columns, 1) if gated == "first" else pre.split(columns, 1)[::-1]
        act, slope = activation64(a, activation)
        parts = dy * b * slope, dy * act
        truth = torch.cat(parts if gated == "first" else parts[::-1], 1)
        g, dbias = kernels.gate_bwd(*args.values())
        near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
        torch.testing.assert_close(g, truth.to(dtype), **near)
        torch.testing.assert_close(dbias.double(), truth.sum(0), rtol=near["rtol"], atol=1e-5 * rows)


@pytest.mark.parametrize("need_g", [True, False])
@pytest.mark.parametrize("need_dbias", [True, False])
def test_only_what_is_needed(need_g, need_dbias, noted):
    launched = noted(kernels, "launch", lambda kernel, *_, **__: kernel.fn.__name__)
    args = backward_arguments(21, 33)
    whole = kernels.gate_bwd(*args.values())
    launched.clear()
    found = kernels.gate_bwd(*(args | {"need_g": need_g, "need_dbias": need_dbias}).values())
    for t, full, needed in zip(found, whole, (need_g, need_dbias), strict=True):
        assert torch.equal(t, full) if needed else t.shape == (0,)
    names = ["_linear_gated_bwd_kernel"] * (need_g or need_dbias) + ["_sum_partials_kernel"] * need_dbias
    assert launched == names


def test_nan_stays_in_its_row_and_column(transport):
    args = arguments(40, 40, 72)
    clean = kernels.linear_fwd(*inputs_of(args))
    args["x"][33, 5] = float("nan")
    args["weight"][70, 39] = args["weight"][72 + 3, 39] = float("nan")
    for which, (a, b) in enumerate(zip(clean, kernels.linear_fwd(*inputs_of(args)), strict=True)):
        hit = (70, 75) if which else (70, 3)
        assert b[33].isnan().all()
        assert b[:, hit].isnan().all()
        rows, cols = (torch.arange(n, device=DEVICE) for n in b.shape)
        kept = (rows != 33)[:, None] & ((cols != hit[0]) & (cols != hit[1]))[None, :]
        assert torch.equal(a[kept], b[kept])


def test_layouts():
    """A start that is not aligned, and one row expanded to many."""
    args = arguments(20, 40, 72, BF16)
    shifted = torch.empty(20 * 48 + 1, dtype=BF16, device=DEVICE)[1:].view(20, 48)[:, :40]
    shifted.copy_(args["x"])
    assert_bit_equal(
        kernels.linear_fwd(*inputs_of(args | {"x": shifted})), kernels.linear_fwd(*inputs_of(args))
    )
    one = arguments(1, 40, 72)
    many = one | {"x": one["x"].expand(33, 40), "residual": one["residual"].expand(33, 72)}
    y = kernels.linear_fwd(*inputs_of(many))[0]
    torch.testing.assert_close(y, expected(one)[0].expand(33, 72), rtol=1e-5, atol=1e-5)
