"""`linear_int8`: the integers to the bit, the error rule, compilation, layouts, autocast, bad inputs."""

from __future__ import annotations

import contextlib
import itertools
from unittest import mock

import numpy as np
import pytest
import torch

from fastbert import testing
from fastbert.backends.aten import linear_int8 as aten_int8
from fastbert.ops.activation import ACTIVATIONS, activate_eager
from fastbert.ops.linear_int8 import linear_int8, linear_int8_ref, panel_maker, quantize_rows
from fastbert.runtime import dispatch
from fastbert.runtime.table import TABLE
from fastbert.testing.op_cases.linear_int8 import LinearInt8Case
from tests.support.cpu_fixtures import available_isas, using_isa
from tests.support.inputs import name

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ALL = [None, *ACTIVATIONS]
BACKENDS = [
    b
    for b in TABLE["cpu"]["linear_int8"]
    if dispatch.unsupported_reason(b, "linear_int8", "cpu", None) is None
]


def ways():
    """Each backend as it is, and with panels where it has them; C++ with each set of its kernels."""
    for backend in BACKENDS:
        sets = [isa for isa in available_isas() if isa != "avx512_bf16"] if backend == "cpu" else [""]
        packs = hasattr(dispatch.backend_module(backend), "linear_int8_panels")
        yield from itertools.product([backend], sets, ["", "packed"] if packs else [""])


def serves(which, dtype):
    return dispatch.unsupported_reason(which, "linear_int8", "cpu", dtype) is None


@pytest.fixture(params=ways(), ids=lambda way: "-".join(filter(None, way)))
def run(request):
    """`linear_int8` pinned to a backend."""
    which, isa, with_packed = request.param

    def call(x, weight, scale, bias=None, activation=None, **rows):
        packed = panel_maker(x.device, x.dtype)(weight) if with_packed else None
        return linear_int8(x, weight, scale, bias, activation, packed, **rows)

    call.backend = which
    kernels = contextlib.contextmanager(using_isa)(isa) if isa else contextlib.nullcontext()
    with dispatch.use_backend(linear_int8=which), kernels:
        yield call


def test_an_integer_off_by_one_is_outside_the_rule(monkeypatch):
    launch = aten_int8._product

    def off(v, zero, weight):
        v = v.clone()
        v[0, 0] += 1
        return launch(v, zero, weight)

    monkeypatch.setattr(aten_int8, "_product", off)
    case = LinearInt8Case(5, 24, 40)
    assert [row.passed for row in testing.run_case(case, "aten", torch.float32)] == [False]


# --- the integers -------------------------------------------------------------------------------------------


def by_numpy(x, weight, scale, ends=None):
    """The contract in NumPy's float32, one rounding per operation, sums in int64: (y float32, u, zero)."""
    x = x.float().numpy()
    lo = np.minimum(np.float32(0), x.min(1, keepdims=True))
    hi = np.maximum(np.float32(0), x.max(1, keepdims=True))
    if ends is not None:
        lo, hi = (np.full_like(lo, end) for end in ends)
    step = (hi - lo) / np.float32(255)
    step[step < np.finfo(np.float32).tiny] = 1
    inv = np.float32(1) / step
    zero = np.rint(-lo * inv)
    u = np.clip(np.rint(x * inv) + zero, 0, 255)
    acc = (u - zero).astype(np.int64) @ weight.numpy().astype(np.int64).T
    assert abs(acc).max(initial=0) < 2**31
    y = acc.astype(np.float32) * (step * scale.numpy())
    assert y.dtype == np.float32
    return torch.from_numpy(y), u, zero


def random_weight(out, width, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (out, width), generator=g).to(torch.int8)
    return weight, 0.001 * (0.5 + torch.rand(out, generator=g))


def rows(kind, dtype, width=96, count=24):
    """Rows in which one rounding more or less changes the result."""
    g = torch.Generator().manual_seed(len(kind))
    x = torch.randn(count, width, generator=g)
    if kind == "ties":  # halves under a step of exactly 1: zero odd, zero even
        x = torch.randint(-200, 300, (count, width), generator=g) / 2
        x[:, 0], x[:, 1] = -101.0, 154.0
        x[count // 2 :, 0], x[count // 2 :, 1] = -100.0, 155.0
    elif kind == "near ties":  # (k + 1/2) step, and the floats beside it
        lo, hi = -torch.rand(count, 1, generator=g), torch.rand(count, 1, generator=g)
        step = (hi - lo) / 255
        k = torch.floor((lo + (hi - lo) * torch.rand(count, width, generator=g)) / step)
        x = (k + 0.5) * step
        x = torch.where(torch.rand(x.shape, generator=g) < 0.3, torch.nextafter(x, x + 1), x).clamp(lo, hi)
        x[:, :1], x[:, 1:2] = lo, hi
    elif kind == "all positive":
        x = x.abs() + 3
    elif kind == "all negative":
        x = -x.abs() - 3
    elif kind == "sizes":
        x = x * torch.logspace(-4, 4, count)[:, None] + torch.randn(count, 1, generator=g)
    elif kind == "ends":  # many elements at both ends of the range: clamping
        x = x.clamp(-0.5, 0.7) * (1 + torch.rand(count, 1, generator=g))
    elif kind == "zeros":
        x = torch.zeros(count, width)
        x[1] = -0.0
        x[2, 5], x[3, 5] = 7.0, -7.0
    elif kind == "extremes":  # down to where 1 / step would overflow, up to where hi - lo would
        largest, tiny = (torch.finfo(dtype).max, torch.finfo(torch.float32).tiny)
        x = x / x.abs().amax(1, keepdim=True)
        x[: count // 2] *= 0.49 * min(largest, 3e38)
        x[count // 2 :] *= tiny * torch.logspace(-6, 4, count - count // 2)[:, None]
    return x.to(dtype)


KINDS = ["plain", "ties", "near ties", "all positive", "all negative", "sizes", "ends", "zeros", "extremes"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name)
def test_integers_are_equal_to_the_bit(run, dtype, kind):
    """Without a bias the epilogue is two float32 products, so the result shows the integers exactly."""
    x = rows(kind, dtype)
    weight, scale = random_weight(40, x.shape[1])
    expected, u, _zero = by_numpy(x, weight, scale)
    if kind in ("ends", "ties"):
        assert u.min() == 0
        assert u.max() == 255
    assert torch.equal(run(x, weight, scale), expected.to(dtype))
    eye = torch.eye(x.shape[1], dtype=torch.int8)
    one_hot = run(x, eye, torch.ones(x.shape[1]))
    assert torch.equal(one_hot, by_numpy(x, eye, torch.ones(x.shape[1]))[0].to(dtype))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "extremes"])
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name)
def test_a_range_for_all_rows(run, dtype, kind):
    x, ends = rows(kind, dtype), (-0.75, 3.5)
    weight, scale = random_weight(40, x.shape[1])
    expected = by_numpy(x, weight, scale, ends)[0]
    y = run(x, weight, scale, input_range=torch.tensor(ends))
    assert torch.equal(y, expected.to(dtype))
    x[3, 5], x[4, 0], x[5, 1] = float("nan"), float("inf"), float("-inf")
    spoiled = run(x, weight, scale, input_range=torch.tensor(ends))
    assert spoiled[3:6].isnan().all()
    assert torch.equal(spoiled[6:], y[6:])


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_rows_in_floating_point_are_not_rounded(run, dtype):
    x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, scale = random_weight(40, 24)
    if not serves(run.backend, dtype):
        pytest.skip(f"{run.backend} does not take {dtype}")
    y, truth = (
        run(x, weight, scale, float_rows=True),
        x.double() @ (weight.double() * scale.double()[:, None]).T,
    )
    assert ((y - truth).abs() <= 4 * torch.finfo(dtype).eps * truth.abs().amax()).all()


@pytest.mark.parametrize("width", [65_535, 65_536])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums_do_not_overflow(run, width, sign):
    x = torch.full((3, width), 2.0) * sign
    x[1] = torch.linspace(-1, 1, width)
    x[2, ::2] = 0
    weight = torch.full((4, width), 127, dtype=torch.int8)
    weight[1], weight[2, ::3] = -127, -127
    scale = torch.tensor([1.0, 0.5, 0.3, 2.0])
    expected, u, zero = by_numpy(x, weight, scale)
    assert abs((u - zero)[0]).min() == 255
    assert torch.equal(run(x, weight, scale), expected)


# --- the epilogue -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ALL)
def test_the_reference_is_the_quantised_product_as_pytorch_spells_it(activation):
    x = torch.randn(6, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight, scale = random_weight(5, 24)
    bias = torch.linspace(-1, 1, 5, dtype=torch.float64)
    centred, _, step = quantize_rows(x)
    product = (centred.double() * step.double()) @ (weight.double() * scale.double()[:, None]).T
    expected = activate_eager(product + bias, activation)
    torch.testing.assert_close(linear_int8_ref(x, weight, scale, bias, activation), expected)
    # which is the product of the unrounded row, within half a step per element
    exact = x @ (weight.double() * scale.double()[:, None]).T
    most = (0.51 * step.double()) * (weight.double() * scale.double()[:, None]).abs().sum(1)
    assert ((product - exact).abs() <= most).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_a_float32_bias_is_not_rounded(run, dtype):
    x = torch.tensor([[1.0, 2.0]], dtype=dtype)
    weight = torch.tensor([[0, 0], [0, 127]], dtype=torch.int8)
    bias = torch.tensor([1 + 2**-12, -2.0 + 2**-9])  # the second nearly cancels the product
    y = run(x, weight, torch.tensor([1.0, 1 / 127]), bias)
    product = by_numpy(x, weight, torch.tensor([1.0, 1 / 127]))[0]
    assert torch.equal(y, (product + bias).to(dtype))
    assert y[0, 1] != 0


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=name)
@pytest.mark.parametrize("activation", ALL)
def test_a_row_that_is_not_finite_gives_nan_and_disturbs_no_other(run, dtype, activation):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 40, generator=g).to(dtype)
    weight, scale = random_weight(24, 40)
    bias = torch.randn(24, generator=g)
    clean = run(x, weight, scale, bias, activation)
    x[1, 7], x[2, 39], x[4, 0] = float("nan"), float("inf"), float("-inf")
    x[5, 3], x[5, 4] = float("inf"), float("-inf")
    x[7] = float("nan")
    bad = [1, 2, 4, 5, 7]
    if dtype != torch.float16:  # a range that overflows float32
        x[8, 0], x[8, 1] = 3e38, -3e38
        bad.append(8)
    y = run(x, weight, scale, bias, activation)
    assert y[bad].isnan().all()
    good = [i for i in range(9) if i not in bad]
    assert torch.equal(y[good], clean[good])


# --- shapes, layouts, autocast, compilation -----------------------------------------------------------------


def test_meaningless_strides_of_single_rows(run):
    """A dimension of size 1 is contiguous whatever its stride is."""
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    weight, scale = random_weight(3, 24)
    expected = run(x[:1], weight[:1], scale[:1])
    for stride in (0, 1, 1000):
        moved = [t[:1].as_strided((1, 24), (stride, 1)) for t in (x, weight)]
        assert torch.equal(run(moved[0], moved[1], scale[:1].as_strided((1,), (stride,))), expected)
        assert torch.equal(run(x, moved[1], scale[:1])[:1], expected)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=name)
def test_autocast_casts_as_linear_does(run, autocast):
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    weight, scale = random_weight(9, 24)
    bias = torch.linspace(-1, 1.1, 9)
    expected = run(x.to(autocast), weight, scale, bias, "gelu")
    with torch.autocast("cpu", autocast):
        y = linear_int8(x, weight, scale, bias, "gelu")
        other = torch.float16 if autocast == torch.bfloat16 else torch.bfloat16
        third = linear_int8(x.to(other), weight, scale, bias.to(other), "gelu")
    assert y.dtype == autocast
    assert torch.equal(y, expected)
    assert torch.equal(
        third, linear_int8(x.to(other).to(autocast), weight, scale, bias.to(other).float(), "gelu")
    )
    if serves(run.backend, torch.float64):
        with torch.autocast("cpu", autocast):
            assert linear_int8(x.double(), weight, scale).dtype == torch.float64


# --- packed weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["aten", "reference"])
def test_a_backend_without_an_order_of_its_own_works_from_the_weight(which):
    weight, scale = random_weight(9, 24)
    x = torch.randn(3, 24)
    with dispatch.use_backend(linear_int8=which):
        assert panel_maker(x.device, x.dtype) is None
        packed = torch.zeros(7, dtype=torch.uint8)  # of another backend: ignored
        assert torch.equal(linear_int8(x, weight, scale, panels=packed), linear_int8(x, weight, scale))


# --- aten's ways --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 24, 512, 513, 1030, 65_536])
def test_aten_without_an_integer_product(monkeypatch, width):
    """Float32 sums that are short enough to be exact: the same bits."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, width, generator=g)
    x[0] = 1 - 0.03 * torch.rand(width, generator=g)  # nearly the largest sums, and no round numbers
    weight, scale = random_weight(9, width)
    weight[0] = torch.randint(120, 128, (width,), generator=g)
    with dispatch.use_backend(linear_int8="aten"):
        monkeypatch.setattr(aten_int8, "_int_mm_is_exact", lambda device: False)
        monkeypatch.delattr(torch, "_int_mm")
        assert torch.equal(linear_int8(x, weight, scale), by_numpy(x, weight, scale)[0])


def test_aten_asks_once_whether_the_integer_product_is_exact(monkeypatch):
    probe, device = aten_int8._int_mm_is_exact.__wrapped__, torch.device("cpu")
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.int() @ b.int())
    assert probe(device)

    def saturating(a, b):  # before VNNI: a made unsigned, products added in pairs in 16 bits
        pairs = (a.int() + 128)[:, :, None] * b.int()[None]
        pairs = pairs.reshape(a.shape[0], -1, 2, b.shape[1]).sum(2).clamp(-(2**15), 2**15 - 1)
        return pairs.sum(1) - 128 * b.int().sum(0)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not probe(device)
    monkeypatch.setattr(torch, "_int_mm", mock.Mock(side_effect=RuntimeError("not implemented")))
    assert not probe(device)
    monkeypatch.delattr(torch, "_int_mm")
    assert not probe(device)


@pytest.mark.parametrize(
    ("rows_", "width", "out"), [(1, 24, 40), (30, 64, 8), (0, 8, 8), (5, 20, 40), (5, 24, 9)]
)
def test_aten_keeps_to_what_a_gpu_multiplies(monkeypatch, rows_, width, out):
    """More than 16 rows, and multiples of 8: too few rows are padded, other sizes take another path."""
    x = torch.randn(rows_, width, generator=torch.Generator().manual_seed(0))
    weight, scale = random_weight(out, width)
    cuda, given, seen = torch.device("cuda"), aten_int8._rows_given, []
    monkeypatch.setattr(aten_int8, "_rows_given", lambda r, k, n, _: given(r, k, n, cuda))
    monkeypatch.setattr(aten_int8, "_int_mm_is_exact", lambda device: True)

    def product(a, b):
        seen.append((a.shape[0], a.shape[1], b.shape[1]))
        return a.int() @ b.int()

    monkeypatch.setattr(torch, "_int_mm", product)
    with dispatch.use_backend(linear_int8="aten"):
        assert torch.equal(
            linear_int8(x, weight, scale), by_numpy(x, weight, scale)[0] if rows_ else x @ weight.T.float()
        )
    if width % 8 or out % 8:
        assert seen == []
    else:
        ((m, k, n),) = seen
        assert m > 16
        assert m % 8 == 0
        assert m >= rows_ + 1
        assert (k, n) == (width, out)


# --- refusals -----------------------------------------------------------------------------------------------

X, W, S, B = torch.ones(2, 3), torch.ones(4, 3, dtype=torch.int8), torch.ones(4), torch.ones(4)
WIDE = torch.ones(4, 65_537)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x: expected shape \(\.\.\., in\).*got \(\)"),
    ({"x": X[:, :0], "weight": W[:, :0]}, ValueError, r"x: expected .* in >= 1, got \(2, 0\)"),
    ({"gated": "first"}, ValueError, "activation: expected the name of one with gated='first', got None"),
    ({"x": WIDE, "weight": WIDE.char()}, ValueError, "x: expected at most 65536 elements per row, got 65537"),
    ({"weight": W.to(torch.uint8)}, TypeError, "weight: expected int8, got torch.uint8"),
    ({"weight": W[:, :2]}, ValueError, r"weight: expected shape \(out, 3\), got \(4, 2\)"),
    ({"scale": S.half()}, TypeError, "scale: expected float32, got torch.float16"),
    ({"scale": S[:3]}, ValueError, r"scale: expected shape \(4,\), got \(3,\)"),
    ({"bias": B[:3]}, ValueError, r"bias: expected shape \(4,\), got \(3,\)"),
    (
        {"x": X.half(), "bias": B.bfloat16()},
        TypeError,
        "bias: .*torch.float16 or float32, got torch.bfloat16",
    ),
    ({"activation": "swish"}, ValueError, "activation: expected None or one.*got 'swish'"),
    ({"panels": [1]}, TypeError, "panels: expected a torch.Tensor, got list"),
    ({"panels": W}, TypeError, "panels: expected uint8, got torch.int8"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[m[:40] for _, _, m in BAD])
def test_bad_inputs(change, error, message):
    with pytest.raises(error, match=message):
        linear_int8(**{"x": X, "weight": W, "scale": S, **change})
