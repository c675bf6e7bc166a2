"""linear_cluster_hopper.cu as nvcc compiles it for sm_90a, with its host code, in the PTX emulator."""

from __future__ import annotations

import pytest
import torch

from fastbert.backends.cuda import device
from fastbert.backends.extension import DTYPE_CODES
from fastbert.ops.activation import CODES, activate_ref
from tests.support.cpu_truth import HALF, assert_rounds_to, assert_same_bits, randn, strided_rows
from tests.support.cuda_draws import whole_numbers

pytestmark = pytest.mark.filterwarnings("error::tests.ptx.emulator.ProxyWarning")

BF16 = torch.bfloat16


def call(emulated, x, weight, bias, activation=None, multiprocessors=1, changes=None):
    """The product; the kernel may touch these tensors alone."""
    (rows, depth), columns = x.shape, weight.shape[0]
    y = torch.full((rows, columns), float("nan"), dtype=x.dtype)
    emulated.memory = [t for t in (x, weight, bias, y) if t is not None]
    own = {
        **{"dtype": DTYPE_CODES[x.dtype], "rows": rows, "columns": columns, "depth": depth},
        **{"a": x.data_ptr(), "a_stride": x.stride(0), "b": weight.data_ptr(), "b_stride": weight.stride(0)},
        **{"bias": 0 if bias is None else bias.data_ptr(), "activation": CODES[activation], "exact": False},
        **{"c": y.data_ptr(), "pre": 0, "blocks": multiprocessors, "gate": 0, "device": 0, "stream": 0},
    }
    ran = device.extension.cuda_linear_cluster_product(*(own | (changes or {})).values())
    return y if ran else None


# rows, columns, depth, multiprocessors -> parts: tiles are 64 x 64, steps 64 deep, and the ring has 6 slots
SHAPES = {
    (5, 8, 8, 132): 1,
    (64, 64, 320, 132): 2,  # 5 steps: parts of two steps or more
    (130, 200, 1032, 36): 3,  # 12 tiles; 17 steps
    (3, 72, 1024, 132): 8,
    (3, 8, 1152, 132): 6,  # nine parts of two steps would be a cluster too large
    (1, 8, 1216, 5): 5,  # parts of 3 and 4 steps; most blocks have no chunk of the row
    (70, 64, 1024, 1): 1,  # the ring turns twice
}


@pytest.mark.parametrize(
    ("schedule", "dtype"), (("late", BF16), ("early", HALF[1]), ("late", HALF[1])), ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_exact(emulated, shape, schedule, dtype):
    """Ragged rows, columns and depths; parts of several lengths; more steps than slots."""
    emulated.schedule, emulated.seed = schedule, HALF.index(dtype)
    rows, columns, depth, multiprocessors = shape
    x, weight = (whole_numbers(n, depth, dtype=dtype, most=1, seed=n) for n in (rows, columns))
    bias = whole_numbers(columns, dtype=dtype, most=1, seed=3)
    z = x.float() @ weight.float().T
    assert torch.equal(call(emulated, x, weight, None, None, multiprocessors), z.to(dtype))
    found = call(emulated, x, weight, bias, "relu", multiprocessors)
    assert torch.equal(found, (z + bias.float()).relu().to(dtype))
    tiles, parts = -(-rows // 64) * -(-columns // 64), SHAPES[shape]
    for launch in emulated.launches:
        assert "cluster_hopper_kernel" in launch.kernel
        assert (launch.grid, launch.cluster, launch.chained) == ((tiles * parts, 1, 1), parts, False)


@pytest.mark.parametrize(
    ("sizes", "blocks", "parts"),
    (((128, 768, 3072), 120, 5), ((128, 768, 768), 96, 4), ((16, 768, 3072), 96, 8)),
    ids=str,
)
def test_blocks_of_base(emulated, sizes, blocks, parts):
    """One text of BERT-base fills most of 132 multiprocessors, and waits for none of them."""
    rows, columns, depth = sizes
    x, weight = (whole_numbers(n, depth, dtype=BF16, most=1, seed=n) for n in (rows, columns))
    y = call(emulated, x, weight, None, None, 132)
    assert torch.equal(y, (x.float() @ weight.float().T).bfloat16())
    (launch,) = emulated.launches
    assert (launch.grid, launch.cluster) == ((blocks, 1, 1), parts)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", [name for name in CODES if name], ids=str)
def test_activations(emulated, activation, dtype):
    x, weight, bias = randn(20, 256, dtype=dtype), randn(72, 256, dtype=dtype, seed=1) / 16, randn(72, seed=2)
    bias = bias.to(dtype)
    z = x.double() @ weight.double().T + bias.double()
    for exact in (False, True):
        y = call(emulated, x, weight, bias, activation, 4, {"exact": exact})
        # the cheap GELU is off by at most 7.1e-5
        scale = 64 if exact or activation not in ("gelu", "gelu_tanh") else 1e-4 * 2**20
        assert_rounds_to(y, activate_ref(z, activation), scale * z.abs().max().item())


def test_every_schedule_returns_the_same_bits(emulated):
    x, weight = (randn(n, 1096, dtype=BF16, seed=n) for n in (70, 72))
    found = []
    for emulated.schedule, emulated.seed in (("late", 0), ("early", 1), ("late", 3), ("early", 4)):
        found.append(call(emulated, x, weight, None, "gelu", 16))
    for y in found[1:]:
        assert_same_bits(y, found[0])


@pytest.mark.parametrize("gap", (8, 24))
def test_rows_among_poison(emulated, gap):
    """NaN behind each row of x and weight, which the copies of a last step must not read."""
    x, _ = strided_rows(67, 264, BF16, gap, seed=1)
    weight, _ = strided_rows(72, 264, BF16, gap, seed=2)
    assert_rounds_to(call(emulated, x, weight, None, None, 8), x.double() @ weight.double().T, 64)


def test_what_is_not_finite_stays_in_its_row(emulated):
    bad = torch.tensor((float("nan"), float("inf"), -float("inf")), dtype=BF16)
    x = randn(67, 256, dtype=BF16)
    x[64:, 0] = bad
    weight = torch.zeros(24, 256, dtype=BF16)
    weight[:, 0] = 1
    y = call(emulated, x, weight, None, None, 8)
    assert torch.equal(y[:64], x[:64, :1].expand(-1, 24))
    assert_same_bits(y[65:], x[65:, :1].expand(-1, 24))
    assert torch.isnan(y[64]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"dtype": 0}, "dtype: bfloat16 or float16"),
        ({"depth": 12}, "multiples of 8"),
        ({"columns": 12}, "multiples of 8"),
        ({"a_stride": 20}, "on 16 bytes"),
        ({"b_stride": 20}, "on 16 bytes"),
        ({"bias": 8}, "on 16 bytes"),
        ({"c": 8}, "on 16 bytes"),
        ({"pre": 16}, "without a gate and pre"),
        ({"gate": 1}, "without a gate and pre"),
        ({"blocks": 0}, "multiprocessors: at least 1"),
        ({"device": 1}, "no such kernel"),
        ({"rows": 1 << 40, "depth": 8}, "less than 2\\*\\*31"),
    ),
    ids=str,
)
def test_refusals(emulated, changes, message):
    a = torch.zeros(16, 16, dtype=BF16)
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(emulated, a, a, None, "gelu", 1, changes)
    assert emulated.launches == []


def test_a_refused_map_and_no_rows(emulated):
    a = torch.zeros(16, 16, dtype=BF16)
    with emulated.without_maps():
        assert call(emulated, a, a, None) is None
    assert call(emulated, a[:0], a, None).shape == (0, 16)
    assert emulated.launches == []
