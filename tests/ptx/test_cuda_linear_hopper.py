"""csrc/cuda/linear_hopper.cuh as nvcc compiles it for sm_90a, with its host code, in the PTX emulator."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import device, feed_forward
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import CODES, GATES, activate_ref, halves
from fastbert.ops.feed_forward import FeedForwardInputs
from fastbert.ops.linear import LinearInputs
from fastbert.testing.op_cases import feed_forward as feed_forward_cases
from fastbert.testing.op_cases import linear as linear_cases
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, randn, strided_rows
from tests.support.cuda_draws import whole_numbers

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

BF16 = torch.bfloat16
# rows, columns, depth, blocks: tiles are 128 x 192, steps 64 deep, and the ring has 5
SHAPES = (
    (5, 8, 8, 1),
    (128, 192, 320, 3),
    (130, 200, 64, 1),  # tiles of one step, which both groups take in turns
    (300, 392, 456, 2),  # 9 tiles of 8 steps: a block has an odd number, and the ring turns
    (2100, 200, 72, 2),  # a second group of row tiles
)


def call(emulated, *args):
    """(y, pre) by the kernel."""
    return emulated.launcher(launchers.hopper_product)(*args)


def close_to_activated(y, z, activation="gelu"):
    """The cheap GELU is off by at most 7.1e-5, and y is rounded once."""
    truth = activate_ref(z.double(), activation)
    step = torch.finfo(y.dtype).eps * truth.abs().clamp_min(torch.finfo(y.dtype).tiny)
    return ((y.double() - truth).abs() <= 1e-4 + step / 2).all()


@pytest.mark.parametrize(
    ("schedule", "dtype"), (("late", BF16), ("early", HALF[1]), ("late", HALF[1])), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact(emulated, shape, schedule, dtype):
    """Ragged rows, columns and depths; more tiles than blocks; more steps than slots."""
    emulated.schedule, emulated.seed = schedule, HALF.index(dtype)
    rows, columns, depth, blocks = shape
    x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, columns))
    bias = whole_numbers(columns, dtype=dtype, most=1, seed=3)
    z = x.float() @ weight.float().T + bias.float()
    y, pre = call(emulated, x, weight, bias, "gelu", True, blocks)
    assert torch.equal(pre, z.to(dtype))
    assert close_to_activated(y, z)
    again, none = call(emulated, x, weight, bias, "gelu", False, blocks)
    assert_same_bits(again, y)
    assert none.shape == (0,)
    z = x.float() @ weight.float().T
    y, pre = call(emulated, x, weight, None, "gelu_tanh", True, blocks)
    assert torch.equal(pre, z.to(dtype))
    assert close_to_activated(y, z, "gelu_tanh")
    tiles = -(-rows // 128) * -(-columns // 192)
    assert {launch.grid for launch in emulated.launches} == {(min(tiles, blocks), 1, 1)}
    assert all("hopper_kernel" in launch.kernel for launch in emulated.launches)


@pytest.mark.parametrize("gated", GATES)
@pytest.mark.parametrize(
    "shape", ((5, 8, 8, 1), (128, 96, 320, 3), (130, 200, 64, 1), (300, 264, 456, 2), (1, 72, 16, 1)), ids=str
)
def test_gated_integers_are_exact(emulated, shape, gated):
    """A tile has 96 columns of the result, whose last part may be empty or ragged.

    The bias of activated columns is 128 higher, where activations return their argument.
    """
    rows, columns, depth, blocks = shape
    for dtype, activation, schedule in (
        (BF16, "gelu", "late"),
        (BF16, "silu", "early"),
        (HALF[1], "gelu_tanh", "late"),
    ):
        emulated.schedule, emulated.seed = schedule, columns
        x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, 2 * columns))
        bias = whole_numbers(2 * columns, dtype=dtype, most=1, seed=3)
        halves(bias, gated)[0].add_(128)
        z = x.float() @ weight.float().T + bias.float()
        active, other = halves(z, gated)
        y, pre = call(emulated, x, weight, bias, activation, True, blocks, gated)
        assert torch.equal(pre, z.to(dtype))
        assert torch.equal(y, (active * other).to(dtype))
        again, none = call(emulated, x, weight, bias, activation, False, blocks, gated)
        assert_same_bits(again, y)
        assert none.shape == (0,)
    tiles = -(-rows // 128) * -(-columns // 96)
    assert {launch.grid for launch in emulated.launches} == {(min(tiles, blocks), 1, 1)}
    assert all("hopper_kernel" in launch.kernel for launch in emulated.launches)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu"))
def test_gated_activations(emulated, activation, dtype):
    x, weight = randn(20, 64, dtype=dtype), randn(208, 64, dtype=dtype, seed=1) / 8
    y, pre = call(emulated, x, weight, None, activation, True, 1, "second")
    z = x.double() @ weight.double().T
    assert_rounds_to(pre, z, 64)
    # the cheap GELU is off by at most 7.1e-5, times the other half
    assert_rounds_to(y, activate_ref(z, activation, "second"), 1e-4 * 2**20 * z.abs().max().item())


def test_every_schedule_returns_the_same_bits(emulated):
    x, weight = (randn(n, 336, dtype=BF16, seed=n) for n in (270, 400))
    found = []
    for schedule, seed, blocks in (("late", 0, 1), ("early", 1, 1), ("late", 3, 2), ("early", 4, 3)):
        emulated.schedule, emulated.seed = schedule, seed
        found.append(call(emulated, x, weight, None, "gelu", True, blocks))
    for y, pre in found[1:]:
        assert_same_bits(y, found[0][0])
        assert_same_bits(pre, found[0][1])


@pytest.mark.parametrize("gap", (8, 24))
def test_rows_among_poison(emulated, gap):
    """NaN behind each row of x and weight, which the copies of a last step must not read."""
    dtype = torch.bfloat16
    x, _ = strided_rows(133, 72, dtype, gap, seed=1)
    weight, _ = strided_rows(208, 72, dtype, gap, seed=2)
    bias = randn(210, dtype=dtype)[2:]  # on 4 bytes
    y, pre = call(emulated, x, weight, bias, "gelu", True, 1)
    z = x.double() @ weight.double().T + bias.double()
    assert_rounds_to(pre, z, 64)
    # the cheap GELU is off by at most 7.1e-5
    assert_rounds_to(y, activate_ref(z, "gelu"), 4e-4 * 2**20)


def test_what_is_not_finite_stays_in_its_row(emulated):
    bad = torch.tensor((float("nan"), float("inf"), -float("inf")), dtype=BF16)
    x = randn(129, 64, dtype=BF16)
    x[126:, 0] = bad
    weight = torch.zeros(24, 64, dtype=BF16)
    weight[:, 0] = 1
    y, pre = call(emulated, x, weight, None, "gelu", True, 1)
    assert torch.isfinite(y[:126]).all()
    assert_same_bits(pre[127:], x[127:, :1].expand(-1, 24))
    assert torch.isnan(pre[126]).all()
    assert torch.isnan(y[126]).all()
    assert (y[127] == float("inf")).all()
    assert (y[128].abs() < 1e-6).all()


# --- which calls it takes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "case",
    (
        linear_cases.LinearCase(520, 264, 200, "gelu"),
        linear_cases.LinearCase(513, 256, 200, "gelu_tanh"),
        *(
            linear_cases.LinearCase(513, 256, 208, name, gated=gated)
            for name, gated in (("gelu", "first"), ("silu", "second"))
        ),
        feed_forward_cases.FeedForwardCase(513, 256, 264, 40),
    ),
    ids=repr,
)
def test_error_rule(emulated, case, dtype):
    """Forward and backward, as a self-check on a GPU runs it."""
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []
    assert any("hopper_kernel" in launch.kernel for launch in emulated.launches)


@pytest.mark.parametrize("op", (linear_cases, feed_forward_cases), ids=("linear", "feed_forward"))
def test_self_checks_reach_it_with_several_tiles_per_block(op):
    """On 132 multiprocessors, both groups of warps have a tile and the ring turns; gated, too."""
    sizes = {}
    for case in op.ON_GPU:
        inner = getattr(case, "out_features", None) or case.inner
        depth = getattr(case, "in_features", None) or case.hidden
        if case.activation == "gelu" and case.rows >= 512 and depth >= 256:
            tiles = -(-case.rows // 128) * -(-inner // 192)
            sizes.setdefault(case.gated, []).append((tiles, -(-depth // 64)))
    for gated in {None, "first"} if op is linear_cases else {None}:
        assert any(tiles > 132 and 2 * steps > 5 for tiles, steps in sizes[gated])


def test_which_calls_it_serves(emulated, monkeypatch):
    x, weight, bias = (torch.zeros(s, dtype=BF16) for s in ((512, 256), (192, 256), (192,)))
    serves = launchers.hopper_serves
    assert serves(x, weight, bias, "gelu")
    assert serves(x, weight, None, "gelu")
    assert not serves(x[:511], weight, bias, "gelu")
    assert not serves(x[:, :248], weight[:, :248], bias, "gelu")
    assert not serves(x, weight[:188], bias[:188], "gelu")
    assert not serves(x, weight, torch.zeros(193, dtype=BF16)[1:], "gelu")
    assert not serves(x[:1].expand(512, -1), weight, bias, "gelu")
    assert not serves(x, weight[:1].expand(192, -1), bias, "gelu")
    for activation in (None, "relu", "silu", "tanh"):
        assert not serves(x, weight, bias, activation)
    assert serves(x, weight, bias, "gelu_tanh")
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    assert not serves(x, weight, bias, "gelu")
    assert serves(x, weight, bias, "gelu_tanh")
    assert serves(x, weight, bias, "silu", "first")
    assert not serves(x, weight, bias, "gelu", "first")
    monkeypatch.setattr(launchers, "EXACT_GELU", False)
    assert serves(x, weight, bias, "gelu", "second")
    assert not serves(x, weight[:184], bias[:184], "gelu", "second")
    monkeypatch.setattr(device, "is_hopper", lambda _: False)
    assert not serves(x, weight, bias, "gelu")


def test_a_residual_is_for_the_other_kernel(emulated):
    x, weight = (whole_numbers(n, 256, dtype=BF16, most=1, seed=n) for n in (512, 16))
    residual = whole_numbers(512, 16, dtype=BF16)
    emulated.launcher(launchers.linear_fwd)(LinearInputs(x, weight, None, "gelu", residual), False)
    assert not any("hopper_kernel" in launch.kernel for launch in emulated.launches)
    emulated.launcher(launchers.linear_fwd)(LinearInputs(x, weight, None, "gelu"), False)
    assert "hopper_kernel" in emulated.launches[-1].kernel


def arguments(a, **changes):
    """Those of `cuda_linear_hopper_product` for a a-transposed; `changes` by name."""
    n, at = a.shape[0], a.data_ptr()
    own = {
        **{"dtype": 1, "rows": n, "columns": n, "depth": 16, "a": at, "a_stride": 16, "b": at},
        **{"b_stride": 16, "bias": 0, "activation": CODES["gelu"], "exact": False, "c": at, "pre": 0},
        **{"blocks": 1, "gate": 0, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    return (own | changes).values()


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"dtype": 0}, "dtype: bfloat16 or float16"),
        ({"depth": 12}, "multiples of 8"),
        ({"columns": 12}, "multiples of 8"),
        ({"a_stride": 20}, "on 16 bytes"),
        ({"b_stride": 20}, "on 16 bytes"),
        ({"pre": 8}, "on 16 bytes"),
        ({"bias": 2}, "bias: on 4 bytes"),
        ({"activation": 0}, "expected a forward product with GELU"),
        ({"activation": CODES["relu"]}, "expected a forward product with GELU"),
        ({"exact": True}, "expected a forward product with GELU"),
        ({"activation": CODES["silu"]}, "gated SiLU"),
        ({"gate": 3}, "gate: expected code"),
        ({"columns": 1 << 30, "gate": 1, "depth": 8}, "less than 2\\*\\*31"),
        ({"blocks": 0}, "blocks: at least 1"),
        ({"device": 1}, "no such kernel"),
        ({"rows": -1}, "expected rows >= 0"),
        ({"rows": 1 << 40, "depth": 8}, "less than 2\\*\\*31"),
    ),
    ids=str,
)
def test_refusals(emulated, changes, message):
    a = torch.zeros(16, 16, dtype=BF16)
    with pytest.raises((ValueError, RuntimeError), match=message):
        device.extension.cuda_linear_hopper_product(*arguments(a, **changes))


def test_a_refused_map_of_a_gated_product_is_for_the_other_kernel(emulated):
    x, weight = (whole_numbers(n, 264, dtype=BF16, most=1, seed=n) for n in (130, 208))
    with emulated.without_maps():
        y, pre = call(emulated, x, weight, None, "gelu", True, None, "first")
    assert not any("hopper" in launch.kernel for launch in emulated.launches)
    assert torch.equal(pre, (x.float() @ weight.float().T).bfloat16())
    assert y.shape == (130, 104)


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
def test_a_refused_map_is_for_the_other_kernel(emulated, activation):
    x, weight = (whole_numbers(n, 264, dtype=BF16, most=1, seed=n) for n in (130, 200))
    z = x.float() @ weight.float().T
    with emulated.without_maps():
        y, pre = call(emulated, x, weight, None, activation, True)
    assert not any("hopper" in launch.kernel for launch in emulated.launches)
    assert torch.equal(pre, z.bfloat16())
    assert close_to_activated(y, z, activation)


def test_no_rows(emulated):
    x, weight = torch.empty(0, 256, dtype=BF16), torch.ones(16, 256, dtype=BF16)
    y, pre = call(emulated, x, weight, None, "gelu", True)
    assert y.shape == pre.shape == (0, 16)
    assert emulated.launches == []


def test_feed_forward_reaches_it(emulated):
    """Its first product; the second one is PyTorch's."""
    x, up = (whole_numbers(n, 256, dtype=BF16, most=1, seed=n) for n in (512, 24))
    down = whole_numbers(8, 24, dtype=BF16, most=1)
    emulated.launcher(feed_forward.feed_forward_fwd)(FeedForwardInputs(x, up, None, down, "gelu"), True)
    (launch,) = emulated.launches
    assert "hopper_kernel" in launch.kernel
