"""The C++ linear_int8: every instruction set, dtype and odd size against exact integers in plain torch.

How rows become integers, and which give NaN: tests/ops/test_linear_int8.py, on each instruction set too.
"""

from __future__ import annotations

import ctypes
import math
import types

import pytest
import torch

from fastbert import testing
from fastbert.backends import cpu
from fastbert.backends.cpu import linear_int8 as launcher
from fastbert.ops.activation import ACTIVATIONS, activate_ref, halves
from fastbert.ops.linear import linear, panel_maker
from fastbert.ops.linear_int8 import LinearInt8Inputs, quantize_rows
from fastbert.runtime import dispatch, loader
from tests.support import cpu_build
from tests.support.cpu_checks import assert_same_on_any_threads, on_each_isa
from tests.support.cpu_fixtures import using_isa
from tests.support.cpu_truth import HALF, assert_same_bits, randn, strided_rows

DTYPES = (torch.float32, *HALF)
ALL = (None, *ACTIVATIONS)
_C = loader.extension


@pytest.fixture(scope="module")
def without_vnni():
    """The extension's functions that the launcher calls, built for a processor without VNNI."""
    if _C.best_cpu_isa() not in ("avx512", "avx512_bf16"):
        pytest.skip("this processor has no avx512")
    library, i64, pointer = ctypes.CDLL(str(cpu_build.int8_pairs())), ctypes.c_int64, ctypes.c_void_p
    library.pairs_panels_size.restype = i64
    library.pairs_panels_size.argtypes = (i64, i64, ctypes.c_bool)
    library.pairs_panels.argtypes = (i64, i64, pointer, pointer, ctypes.c_int, ctypes.c_bool)
    code, p = ctypes.c_int, pointer
    library.pairs_product.argtypes = (
        code,
        i64,
        i64,
        i64,
        p,
        i64,
        p,
        p,
        p,
        code,
        code,
        p,
        code,
        code,
        p,
        p,
        ctypes.c_bool,
    )
    library.pairs_start.argtypes = (ctypes.c_size_t,)
    assert library.pairs_start(loader._runtime()["gomp_parallel"])

    def run(function):
        function.restype = ctypes.c_char_p

        def call(*args):
            reason = function(*args)
            assert reason is None, reason

        return call

    return types.SimpleNamespace(
        cpu_linear_int8_panels_size=library.pairs_panels_size,
        cpu_linear_int8_panels=run(library.pairs_panels),
        cpu_linear_int8=run(library.pairs_product),
    )


@pytest.fixture(params=("avx2", "avx2_vnni", "avx512", "avx512_without_vnni"))
def isa(request, monkeypatch):
    """Every set of kernels; the last is AVX-512's for processors without VNNI."""
    if request.param == "avx512_without_vnni":
        monkeypatch.setattr(launcher, "_C", request.getfixturevalue("without_vnni"))
        yield request.param
    else:
        yield from using_isa(request.param)


def product(*args, **options):
    return cpu.linear_int8_fwd(LinearInt8Inputs(*args, **options))


def integers(*shape, seed=0):
    """int8 from -127 to 127."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=g).to(torch.int8)


def scales(out, seed=0):
    return 0.001 * (0.5 + torch.rand(out, generator=torch.Generator().manual_seed(seed)))


def exact(x, weight, scale, bias=None, smooth=None, input_range=None):
    """The argument of the activation in float32: exact sums, then the contract's three roundings."""
    centred, _, step = quantize_rows(x, smooth, input_range)
    acc = centred.long() @ weight.long().T
    assert acc.abs().max() < 2**31 if acc.numel() else True
    pre = acc.float() * (step * scale)
    return pre if bias is None else pre + bias.float()


def assert_exact(x, weight, scale, bias=None, activation=None, packed=None):
    """Bit-equal without an activation that rounds; else as close as float32 allows."""
    y = product(x, weight, scale, bias, activation, packed)
    assert y.dtype == x.dtype
    pre = exact(x, weight, scale, bias)
    if activation in (None, "relu"):
        expected = pre if activation is None else pre.clamp(min=0)
        torch.testing.assert_close(y, expected.to(x.dtype), rtol=0, atol=0, equal_nan=True)
    else:
        truth = activate_ref(pre.double(), activation)
        step = testing.rounding_step(truth, x.dtype) if x.dtype in HALF else 0.0
        excess = (y.double() - truth).abs() - step - 2**-21 * (0.1 + truth.abs())
        assert (excess <= 0).all(), f"{activation}: off by {excess.max().item():.3g} more than allowed"
    return y


OPTIONS = (  # activation; the bias: none, of x's dtype, or float32
    (None, None),
    ("relu", "float32"),
    ("gelu", "own"),
    (None, "own"),
    ("silu", None),
    ("tanh", "own"),
    ("gelu_tanh", "float32"),
)


def check(rows, depth, columns, dtype, options):
    """x has NaNs around its rows; the weight is packed in the call and before it."""
    activation, kind = options
    x, memory = strided_rows(rows, depth, dtype, 5, seed=1)
    x += 0.5 * randn(rows, 1, dtype=dtype, seed=2)
    before = memory.clone()
    weight, scale = integers(columns, depth), scales(columns)
    bias = None
    if kind is not None:
        bias = 0.1 * randn(columns, dtype=dtype if kind == "own" else torch.float32, seed=3)
    y = assert_exact(x, weight, scale, bias, activation)
    packed = cpu.linear_int8_panels(weight)
    again = product(x, weight, scale, bias, activation, packed)
    assert_same_bits(again, y, "of the packed weight")
    assert_same_bits(memory, before, "an input was written")


# --- the integers -----------------------------------------------------------------------------------------


# what the kernels cut a product by -> (rows, depth, columns) up to its edges and past them
SIZES = {
    "depths": [(7, n, 67) for n in (*range(1, 71), 127, 128, 129, 255, 256, 257, 767, 768, 1030)],
    "columns": [(5, 9, n) for n in (*range(1, 131), 191, 192, 193, 1030)],
    # tiles of every height, blocks of 240 rows
    "rows": [(n, 37, 70) for n in (*range(1, 15), 65, 239, 240, 241, 479, 480, 481)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", SIZES)
def test_every_size(isa, dtype, cut, guarded):
    for i, shape in enumerate(SIZES[cut]):
        check(*shape, dtype, OPTIONS[i % 7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ALL)
@pytest.mark.parametrize("bias", (None, "own", "float32"))
def test_every_option(isa, dtype, activation, bias, guarded):
    check(8, 40, 75, dtype, (activation, bias))


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("depth", (1, 2, 3, 4, 5, 63, 64, 65, 65_535, 65_536))
def test_extremes_neither_saturate_nor_overflow(isa, depth, sign):
    """u = 255 or 0 throughout, on weights of 127 and -127: two such products overflow 16 bits."""
    x = torch.full((4, depth), 2.0) * sign
    x[1, ::2] = 0.0
    x[2], x[3] = torch.linspace(-1, 1, depth), -x[0]
    weight = torch.full((5, depth), 127, dtype=torch.int8)
    weight[1], weight[2, ::2], weight[3], weight[4, 1::4] = -127, -127, 0, -127
    scale = torch.tensor([1.0, 0.5, 0.3, 2.0, 1e-3])
    _, zero, _ = quantize_rows(x)
    assert set(zero[[0, 3], 0].tolist()) == {0.0, 255.0}
    assert_exact(x, weight, scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_input_meets_its_own_weight(isa, dtype):
    """Each row of x has one non-zero element; no two elements in a row of the weight are equal."""
    depth = 127
    weight = torch.stack([torch.arange(-63, 64).roll(7 * i) for i in range(66)]).to(torch.int8)
    for value in (1.0, -3.0):
        x = value * torch.eye(depth, dtype=dtype)
        y = assert_exact(x, weight, torch.ones(66))
        assert (y.double() / value - weight.T.double()).abs().max() < 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_epilogue_rounds_as_the_contract_says(isa, dtype):
    """float(acc) * (step * scale) + bias, one rounding each, for scales and biases of every size."""
    x, weight = randn(30, 50, dtype=dtype), integers(200, 50)
    scale = torch.logspace(-12, 1, 200)
    bias = randn(200, seed=4) * torch.logspace(-6, 2, 200)
    if dtype == torch.float16:
        scale, bias = scale.clamp(max=0.1), bias.clamp(-100, 100)
    assert_exact(x, weight, scale)
    assert_exact(x, weight, scale, bias)
    assert_exact(x, weight, scale, bias.to(dtype), "relu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stride", (0, 5))
def test_smooth_factors(isa, dtype, stride, guarded):
    """Each column has its own factor, which decides the range too; the rest is as without factors."""
    for depth in (*range(1, 19), 31, 32, 33, 48, 63, 64, 65, 100, 257):
        x, _memory = strided_rows(7, depth, dtype, stride, seed=depth)
        smooth = torch.rand(depth, generator=torch.Generator().manual_seed(depth)).mul_(8).sub_(4).exp2_()
        weight, scale, bias = integers(70, depth), scales(70), randn(70, seed=3)
        y = product(x, weight, scale, bias, smooth=smooth)
        assert_same_bits(y, exact(x, weight, scale, bias, smooth).to(dtype))
        assert depth == 1 or not torch.equal(y, product(x, weight, scale, bias, None))
    alone = x.float() * smooth
    if dtype == torch.float32:
        assert_same_bits(product(alone, weight, scale, bias, None), y)
    wide = product(x, torch.cat([weight, weight]), scales(140), None, "relu", None, "first", smooth)
    assert wide.shape == (7, 70)
    smooth[3] = math.inf
    assert product(x, weight, scale, bias, smooth=smooth).isnan().all()
    smooth[3] = math.nan
    assert product(x, weight, scale, bias, smooth=smooth).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "ends", ((-1.0, 0.5), (-100.0, 90.0), (-3.0, -0.25), (0.25, 1e-3), (-3e38, 3e38)), ids=str
)
def test_one_range_for_all_rows(isa, dtype, ends, guarded):
    """It clips, or is wider than the rows; an end on the other side of 0 is 0. NaN is seen all the same."""
    given = torch.tensor(ends)
    for depth in (1, 2, 5, 16, 33, 100, 257):
        x, _memory = strided_rows(9, depth, dtype, 3, seed=depth)
        smooth = torch.rand(depth, generator=torch.Generator().manual_seed(depth)).mul_(8).sub_(4).exp2_()
        weight, scale, bias = integers(70, depth), scales(70), randn(70, seed=3)
        x[4, depth - 1], x[5, 0], x[6] = math.nan, math.inf, -math.inf
        for factors in (None, smooth):
            y = product(x, weight, scale, bias, smooth=factors, input_range=given)
            truth = exact(x, weight, scale, bias, factors, given).to(dtype)
            torch.testing.assert_close(y, truth, rtol=0, atol=0, equal_nan=True)
            bad = [4, 5, 6] if ends[1] < 1e38 else [*range(9)]
            assert y.isnan().all(1).nonzero().flatten().tolist() == bad
    one = randn(1, 40, dtype=dtype)
    own = torch.stack(torch.aminmax(one.float()))
    weight, scale = integers(70, 40), scales(70)
    assert_same_bits(product(one, weight, scale, input_range=own), product(one, weight, scale))


# rows, depth, columns: tiles and blocks of rows, depths of less than a group and of several passes
FLOAT_SIZES = [
    *((7, n, 67) for n in (*range(1, 12), 31, 32, 33, 127, 128, 129, 1023, 1025, 2100)),
    *((n, 37, 130) for n in (1, 6, 13, 159, 161, 330)),
    *((5, 9, n) for n in (1, 31, 63, 64, 65, 1030)),
]


@pytest.fixture(params=("avx2", "avx2_vnni", "avx512", "avx512_bf16"))
def float_isa(request):
    yield from using_isa(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", (None, "first", "second"))
def test_rows_in_floating_point(float_isa, dtype, gated, guarded):
    """Bit-equal to `linear` on the weight in float32, whose result is rounded once."""
    for i, (rows, depth, columns) in enumerate(FLOAT_SIZES):
        columns *= 1 if gated is None else 2
        x, memory = strided_rows(rows, depth, dtype, 5, seed=1)
        before, weight, scale = memory.clone(), integers(columns, depth), scales(columns)
        bias = None if i % 3 == 0 else randn(columns, dtype=(torch.float32, dtype)[i % 2], seed=3)
        activation = "relu" if gated or i % 2 else None
        y = product(x, weight, scale, bias, activation, None, gated, float_rows=True)
        panels = cpu.linear_int8_panels(weight, gated is not None)
        assert_same_bits(product(x, weight, scale, bias, activation, panels, gated, float_rows=True), y)
        wide = [x.float(), weight.float() * scale[:, None], None if bias is None else bias.float()]
        make = panel_maker(x.device, torch.float32, rows, gated is not None)
        with dispatch.use_backend(linear="cpu"), torch.no_grad():
            expected = linear(*wide, activation, panels=make(wide[1]), gated=gated)
        assert_same_bits(y, expected.to(dtype))
        assert_same_bits(memory, before, "an input was written")
    assert_same_on_any_threads(
        lambda: [product(x, weight, scale, bias, activation, panels, gated, float_rows=True)], repeats=5
    )


# --- packing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", (1, 2, 3, 4, 5, 6, 7, 8, 40))
def test_packed_for_another_instruction_set(depth):
    """The layouts differ: panels for one are packed again if another is in use."""
    from tests.support.cpu_fixtures import available_isas

    names = available_isas()
    if len(names) == 1:
        pytest.skip("needs two instruction sets")
    x, weight, scale = randn(6, depth), integers(70, depth), scales(70)
    expected, before, packed = exact(x, weight, scale), _C.cpu_isa(), {}
    try:
        for name in names:
            _C.set_cpu_isa(name)
            packed[name] = cpu.linear_int8_panels(weight)
        if "avx2_vnni" in packed:
            assert packed["avx2"].numel() != packed["avx2_vnni"].numel() or depth < 3
        for name in packed:
            _C.set_cpu_isa(name)
            for other in packed.values():
                assert torch.equal(product(x, weight, scale, None, None, other), expected)
    finally:
        _C.set_cpu_isa(before)


@pytest.mark.parametrize("half", [1, 15, 31, 32, 33, 64, 65, 200])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(isa, half, dtype):
    """The halves of a panel are of one and the same columns; the gate is in float32, and rounded once."""
    for rows, depth, gated, activation in ((7, 33, "first", "relu"), (250, 40, "second", "silu")):
        x, weight, scale = randn(rows, depth, dtype=dtype), integers(2 * half, depth), scales(2 * half)
        bias = 0.1 * randn(2 * half, dtype=dtype, seed=3)
        y = product(x, weight, scale, bias, activation, None, gated)
        panels = cpu.linear_int8_panels(weight, True)
        assert_same_bits(product(x, weight, scale, bias, activation, panels, gated), y)
        assert panels.numel() != cpu.linear_int8_panels(weight).numel()
        active, other = halves(exact(x, weight, scale, bias).double(), gated)
        truth = activate_ref(active, activation) * other
        step = testing.rounding_step(truth, dtype) if dtype in HALF else 0.0
        excess = (y.double() - truth).abs() - step - 2**-21 * (0.1 * other.abs() + truth.abs())
        assert (excess <= 0).all()
        assert y.shape == (rows, half)


def test_layouts_differ_in_size_or_not_at_all(without_vnni):
    """The launcher knows from the size for which instruction set a weight was packed."""
    weights = [integers(out, depth) for depth in range(1, 20) for out in (1, 64, 130)]
    for weight in weights:
        packed = on_each_isa(lambda weight=weight: cpu.linear_int8_panels(weight), "avx2", "avx512")
        ours = torch.empty(
            without_vnni.cpu_linear_int8_panels_size(*weight.t().shape, False), dtype=torch.uint8
        ).fill_(77)
        without_vnni.cpu_linear_int8_panels(*weight.t().shape, weight.data_ptr(), ours.data_ptr(), 1, False)
        for a in (*packed, ours):
            for b in (*packed, ours):
                assert a.numel() != b.numel() or torch.equal(a, b)
        assert torch.equal(packed[0], ours)


def test_packing_writes_every_byte_and_is_the_same_on_several_threads(isa, threads, guarded):
    weight = integers(1030, 700)
    before = []
    for count in (1, 3):
        torch.set_num_threads(count)
        before.append(cpu.linear_int8_panels(weight))
    assert torch.equal(*before)
    zeros = cpu.linear_int8_panels(torch.zeros(70, 33, dtype=torch.int8))  # allocated as 0xFF
    assert not zeros.any()


def test_a_weight_of_any_strides_is_packed(isa):
    """The packer gets the caller's own weight; the op copies it later."""
    big = integers(300, 600)
    for weight in (big[:, ::2], big.t(), big[::2, 5:50], big[:1, ::3], big[:, 7:8]):
        assert_same_bits(cpu.linear_int8_panels(weight), cpu.linear_int8_panels(weight.contiguous()))


# --- layouts, poison --------------------------------------------------------------------------------------


def test_a_bad_scale_or_bias_stays_in_its_column(isa):
    x, weight, scale, bias = randn(9, 40), integers(70, 40), scales(70), randn(70, seed=2)
    clean = product(x, weight, scale, bias, None)
    for vector in (scale, bias):
        kept = vector[66].item()
        vector[66] = math.nan
        y = product(x, weight, scale, bias, None)
        vector[66] = kept
        assert y[:, 66].isnan().all()
        y[:, 66] = clean[:, 66]
        assert_same_bits(y, clean)


@pytest.mark.parametrize("stride", (0, 3))
def test_row_strides(isa, stride):
    x = randn(200).as_strided((6, 40), (stride, 1))
    weight, scale = integers(9, 40), scales(9)
    a, b = (product(t, weight, scale, None, "gelu") for t in (x, x.clone()))
    assert_same_bits(a, b)
    column = randn(300).as_strided((6, 1), (35, 7))
    assert_exact(column, integers(9, 1), scale)


# --- determinism, threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((500, 300, 200), (3, 900, 1500), (2000, 40, 70)), ids=str)
def test_any_number_of_threads_gives_the_same_bits(isa, dtype, shape):
    """Nor do results depend on the other rows."""
    rows, depth, columns = shape
    x, weight, scale = randn(rows, depth, dtype=dtype), integers(columns, depth), scales(columns)
    bias = randn(columns, dtype=dtype, seed=1)
    assert_same_on_any_threads(lambda: [assert_exact(x, weight, scale, bias, "relu")])
    assert_same_on_any_threads(lambda: [product(x, weight, scale, bias, "gelu")], repeats=25)
    y = product(x, weight, scale, bias, "gelu")
    for begin, end in ((0, 1), (rows // 2, rows // 2 + 2), (1, rows)):
        part = product(x[begin:end], weight, scale, bias, "gelu")
        assert_same_bits(part, y[begin:end], f"rows {begin} to {end}")
