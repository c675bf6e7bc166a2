"""The product with an activation's derivative of csrc/cuda/linear_hopper.cuh, in the PTX emulator."""

from __future__ import annotations

import pytest
import torch

from fastbert import testing
from fastbert.backends.cuda import device, feed_forward
from fastbert.backends.cuda import linear as launchers
from fastbert.ops.activation import CODES, slope_ref
from fastbert.testing.op_cases.feed_forward import ON_GPU, FeedForwardCase
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, randn, strided_rows
from tests.support.cuda_draws import whole_numbers
from tests.support.triton_attention_inputs import at_strides

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

BF16, FP16 = HALF
# rows, columns, depth, blocks: tiles are 128 x 192, steps 64 deep, and the ring has 4
SHAPES = (
    (5, 8, 8, 1),
    (128, 192, 320, 3),
    (130, 200, 64, 1),  # tiles of one step, which both groups take in turns
    (300, 392, 392, 2),  # 9 tiles of 7 steps: a block has an odd number, and the ring turns
    (70, 72, 136, 1),  # rows and columns of a tile's second halves
)


def call(emulated, *args):
    """(c, sums) by the kernel."""
    return emulated.launcher(launchers.slope_product)(*args)


def served(emulated) -> bool:
    """Whether one of the launches was the kernel's."""
    return any("SlopeEL" in launch.kernel for launch in emulated.launches)


@pytest.fixture
def slope_products(monkeypatch):
    """The kernel serves."""
    monkeypatch.setattr(feed_forward, "SLOPE_PRODUCTS", True)


@pytest.mark.parametrize(("schedule", "dtype"), (("late", BF16), ("early", FP16), ("late", FP16)), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact(emulated, shape, schedule, dtype):
    """Where the slope is 0 or 1, each by its own element; sums count every row once."""
    emulated.schedule, emulated.seed = schedule, HALF.index(dtype)
    rows, columns, depth, blocks = shape
    dy, weight = (
        whole_numbers(*size, dtype=dtype, most=1, seed=i)
        for i, size in enumerate(((rows, depth), (depth, columns)))
    )
    ones = randn(rows, columns, seed=2) > 0
    pre = torch.where(ones, 20.0, -20.0).to(dtype)
    truth = (dy.float() @ weight.float()) * ones
    for activation in ("gelu", "gelu_tanh"):
        c, sums = call(emulated, dy, weight, pre, activation, True, blocks)
        assert torch.equal(c, truth.to(dtype))
        assert torch.equal(sums, truth.sum(0).to(dtype))
        again, none = call(emulated, dy, weight, pre, activation, False, blocks)
        assert_same_bits(again, c)
        assert none.shape == (0,)
    tiles = -(-rows // 128) * -(-columns // 192)
    launches = [launch for launch in emulated.launches if "hopper_kernel" in launch.kernel]
    assert {launch.grid for launch in launches} == {(min(tiles, blocks), 1, 1)}
    assert served(emulated)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh"))
def test_slopes(emulated, activation, dtype):
    """At every size of pre, from 1e-3 to 1e4, of both signs."""
    dy, weight = randn(130, 72, dtype=dtype), randn(72, 200, dtype=dtype, seed=1) / 8
    pre = randn(130, 200, seed=2) * torch.logspace(-3, 4, 200)
    c, sums = call(emulated, dy, weight, pre.to(dtype), activation, True, 1)
    product = dy.double() @ weight.double()
    truth = product * slope_ref(pre.to(dtype).double(), activation)
    # the cheap slope is off by at most 7.1e-5 or 1.8e-5
    loose = (1e-4 if dtype == BF16 else 3e-5) * 2**20 * product.abs().max().item()
    assert_rounds_to(c, truth, loose if activation == "gelu" else 64, "c")
    assert_rounds_to(sums, truth.sum(0), 4 * loose if activation == "gelu" else 256, "sums")


def test_sums_are_of_what_is_not_rounded(emulated):
    """1 + 2^-9 per row would be 1 in bfloat16: 256 rows sum to 256.5, whose neighbours are 256 and 258."""
    dy = torch.tensor([[1.0, 2**-9] + [0.0] * 6] * 256, dtype=BF16)
    weight, pre = torch.ones(8, 8, dtype=BF16), torch.full((256, 8), 20.0, dtype=BF16)
    c, sums = call(emulated, 4 * dy, weight, pre, "gelu", True, 2)
    assert (c == 4).all()
    assert (sums == 1024).all()
    c, sums = call(emulated, 3 * dy, weight, pre, "gelu", True, 2)
    assert torch.equal(sums, torch.full((8,), 256 * 3 * (1 + 2**-9)).bfloat16())


def test_every_schedule_returns_the_same_bits(emulated):
    dy, weight, pre = (
        randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((270, 336), (336, 400), (270, 400)))
    )
    found = []
    for schedule, seed, blocks in (("late", 0, 1), ("early", 1, 1), ("late", 3, 2), ("early", 4, 3)):
        emulated.schedule, emulated.seed = schedule, seed
        found.append(call(emulated, dy, weight, pre, "gelu", True, blocks))
    for c, sums in found[1:]:
        assert_same_bits(c, found[0][0])
        assert_same_bits(sums, found[0][1])


@pytest.mark.parametrize("gap", (8, 24))
def test_rows_among_poison(emulated, gap):
    """NaN behind each row of dy and weight, which the copies of a last step must not read."""
    dy, _ = strided_rows(133, 72, BF16, gap, seed=1)
    weight, _ = strided_rows(72, 208, BF16, gap, seed=2)
    pre = randn(133, 208, dtype=BF16, seed=3)
    c, sums = call(emulated, dy, weight, pre, "gelu_tanh", True, 1)
    truth = (dy.double() @ weight.double()) * slope_ref(pre.double(), "gelu_tanh")
    assert_rounds_to(c, truth, 64)
    assert_rounds_to(sums, truth.sum(0), 256)


def test_offsets_beyond_2_to_31_elements(emulated):
    dy, weight, pre = (randn(*s, dtype=BF16, seed=i) for i, s in enumerate(((3, 8), (8, 16), (3, 16))))
    near = call(emulated, dy, weight, pre, "gelu", True, 1)
    far = call(
        emulated, at_strides(dy, 2**30 + 8, 1), at_strides(weight, 2**30 + 16, 1), pre, "gelu", True, 1
    )
    assert_same_bits(far[0], near[0])
    assert_same_bits(far[1], near[1])


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", (1, 65, 121))
def test_what_is_not_finite_stays_in_its_place(emulated, rows, dtype):
    """Rows behind the last one are no part of a sum, where 0 times infinity would be NaN."""
    nan, inf = float("nan"), float("inf")
    dy, weight = torch.zeros(rows, 16, dtype=dtype), torch.zeros(16, 24, dtype=dtype)
    dy[:, 0] = 1
    weight[0] = 1
    weight[0, :3] = torch.tensor((nan, inf, -inf))
    weight[1, 8] = 1
    pre = torch.full((rows, 24), 20.0, dtype=dtype)
    pre[0, 16:19] = torch.tensor((nan, inf, -inf))
    for activation in ("gelu", "gelu_tanh"):
        dy[-1, 1] = 0
        c, sums = call(emulated, dy, weight, pre, activation, True, 1)
        assert_same_bits(c[:, 1:3], weight[:1, 1:3].expand(rows, -1).contiguous())
        assert torch.isnan(c[:, 0]).all()
        assert (c[:, 3:16] == 1).all()
        assert torch.isnan(c[0, 16])
        assert torch.equal(c[0, 17:19], torch.tensor((1, 0), dtype=dtype))
        assert (sums[1:3] == weight[0, 1:3]).all()
        assert torch.isnan(sums[[0, 16]]).all()
        assert torch.equal(sums[17:19], torch.tensor((rows, rows - 1), dtype=dtype))
        assert (sums[3:16] == rows).all()
        dy[-1, 1] = inf
        c, sums = call(emulated, dy, weight, pre, activation, True, 1)
        assert c[-1, 8] == sums[8] == inf
        assert (c[:-1, 3:16] == 1).all()


# --- which calls it takes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(
    "case",
    (FeedForwardCase(513, 40, 200, 264), FeedForwardCase(520, 48, 264, 256, "gelu_tanh", bias=False)),
    ids=repr,
)
def test_error_rule(emulated, slope_products, case, dtype):
    """As a self-check on a GPU runs it."""
    rows = testing.run_case(case, "cuda", dtype)
    assert [(r.quantity, r.reason) for r in rows if not r.passed] == []
    assert served(emulated)


def test_self_checks_reach_it_with_several_tiles_per_block():
    """On 132 multiprocessors, both groups of warps have a tile and the ring turns."""
    taken = [c for c in ON_GPU if c.rows >= 512 and c.out >= 256]
    sizes = [(c.activation, -(-c.rows // 128) * -(-c.inner // 192), -(-c.out // 64)) for c in taken]
    reached = {activation for activation, tiles, steps in sizes if tiles > 132 and 2 * steps > 4}
    assert reached == {"gelu", "gelu_tanh"}


def test_which_calls_it_serves(emulated, slope_products, monkeypatch):
    dy, weight, pre = (torch.zeros(s, dtype=BF16) for s in ((512, 256), (256, 24), (512, 24)))

    def serves(rows=512, own_weight=weight, activation="gelu"):
        emulated.launches.clear()
        own = dy[:rows, : own_weight.shape[0]]
        emulated.launcher(feed_forward.inner_gradient)(own, own_weight, pre[:rows], activation, False)
        return served(emulated)

    assert serves()
    assert serves(activation="gelu_tanh")
    assert not serves(activation="silu")
    assert not serves(511)
    assert not serves(own_weight=weight[:248])
    assert not serves(own_weight=weight[:1].expand(256, -1))
    monkeypatch.setattr(launchers, "EXACT_GELU", True)
    assert not serves()
    assert serves(activation="gelu_tanh")
    monkeypatch.setattr(launchers, "EXACT_GELU", False)
    with emulated.without_maps():
        assert not serves()
    monkeypatch.setattr(feed_forward, "SLOPE_PRODUCTS", False)
    assert not serves()
    monkeypatch.setattr(feed_forward, "SLOPE_PRODUCTS", True)
    monkeypatch.setattr(device, "is_hopper", lambda _: False)
    assert not serves()


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"dtype": 0}, "dtype: bfloat16 or float16"),
        ({"depth": 12}, "multiples of 8"),
        ({"columns": 12}, "multiples of 8"),
        ({"b_stride": 20}, "on 16 bytes"),
        ({"slope_at": 8}, "on 16 bytes"),
        ({"slope_at": 0}, "slope_at"),
        ({"sums": 4}, "sums: on 8 bytes"),
        ({"activation": CODES["silu"]}, "expected a forward product with GELU"),
        ({"exact": True}, "expected a forward product with GELU"),
        ({"blocks": 0}, "blocks: at least 1"),
        ({"device": 1}, "no such kernel"),
    ),
    ids=str,
)
def test_refusals(emulated, changes, message):
    at = torch.zeros(16, 16, dtype=BF16).data_ptr()
    own = {
        **{"dtype": 1, "rows": 16, "columns": 16, "depth": 16, "a": at, "a_stride": 16, "b": at},
        **{"b_stride": 16, "activation": CODES["gelu"], "exact": False, "slope_at": at, "c": at, "sums": 0},
        **{"blocks": 1, "device": 0, "stream": 0},
    }
    assert own.keys() >= changes.keys()
    with pytest.raises((ValueError, RuntimeError), match=message):
        device.extension.cuda_linear_slope_product(*(own | changes).values())
    assert emulated.launches == []
