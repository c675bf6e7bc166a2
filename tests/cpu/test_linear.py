"""The C++ linear: every dtype, instruction set, odd size and stride, against float64 in plain torch."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fastbert import testing
from fastbert.backends import cpu
from fastbert.backends.cpu import linear as launcher
from fastbert.backends.extension import DTYPE_CODES
from fastbert.ops.activation import ACTIVATIONS, CODES, GATE_CODES, activate_ref, slope_ref
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved, linear, panel_maker
from fastbert.runtime import loader
from tests.support import cpu_build
from tests.support.cpu_checks import assert_same_on_any_threads, on_each_isa
from tests.support.cpu_truth import (
    HALF,
    activation64,
    assert_same_bits,
    gelu_tanh_argument,
    randn,
    strided_rows,
)

DTYPES = (torch.float32, *HALF)
ALL = (None, *ACTIVATIONS)
_C = loader.extension


@pytest.fixture(autouse=True)
def every_product_on_our_kernels(request, monkeypatch):
    """Compute products of few rows here too, which are otherwise left to `aten` without panels."""
    if "few_rows" not in request.node.name:
        monkeypatch.setattr(launcher, "_FEWEST_ROWS", 0)


def address(t):
    return 0 if t is None else t.data_ptr()


def gradient(dy, pre, activation, with_dbias=True, gated=None):
    """(g, dbias) of the kernel itself: dbias in float32, before it is rounded to the storage dtype."""
    (rows, columns), g = dy.shape, torch.full_like(dy if gated is None else pre, float("nan"))
    dbias = torch.full(g.shape[1:], float("nan")) if with_dbias else None
    given = DTYPE_CODES[dy.dtype], rows, columns, dy.data_ptr(), address(pre), CODES[activation]
    given += g.data_ptr(), address(dbias), torch.get_num_threads(), GATE_CODES[gated]
    _C.cpu_linear_activation_bwd(*given)
    return g, dbias


def gradients(dy, x, weight, pre, activation, gated=None):
    """(dx, dweight, dbias) by our kernels. The backend leaves some of these products to PyTorch."""
    g, dbias = gradient(dy, pre, activation, gated=gated)
    dx = launcher._product(g, weight, weight.shape[1])
    return dx, launcher._product(g.t(), x, x.shape[1]), dbias.to(dy.dtype)


def assert_sums_to(actual, truth, magnitude, name):
    """`actual` is `truth` within a rounding step of its dtype and some roundings of float32.

    `magnitude`: the sum of the absolute values of all terms.
    """
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(truth.shape)}"
    assert torch.isfinite(actual).all(), f"{name}: not finite"
    step = testing.rounding_step(truth, actual.dtype) if actual.dtype in HALF else 0.0
    excess = (actual.double() - truth).abs() - step - 2**-20 * magnitude
    assert (excess <= 0).all(), f"{name}: off by {excess.max().item():.3g} more than allowed"


OPTIONS = (  # activation, bias, residual
    (None, True, False),
    ("gelu", True, True),
    ("gelu_tanh", False, False),
    ("relu", True, False),
    ("silu", False, True),
    ("tanh", True, False),
    (None, False, True),
)


def both_ways(rows, depth, columns, dtype, options, backward=True):
    """Forward and backward of the backend, each output against float64. x, weight, residual among NaNs."""
    activation, has_bias, has_residual = options
    x, x_memory = strided_rows(rows, depth, dtype, 5, seed=1)
    weight, weight_memory = strided_rows(columns, depth, dtype, 3, seed=2)
    weight *= depth**-0.5
    residual, residual_memory = strided_rows(rows, columns, dtype, 7, seed=3)
    memories = (x_memory, weight_memory, residual_memory)
    before = [m.clone() for m in memories]
    residual = residual if has_residual else None
    bias = randn(columns, dtype=dtype, seed=4) if has_bias else None
    wide_x, wide_weight = x.double(), weight.double()

    y, pre = cpu.linear_fwd(LinearInputs(x, weight, bias, activation, residual), True)
    truth = wide_x @ wide_weight.T + (0 if bias is None else bias.double())
    magnitude = wide_x.abs() @ wide_weight.abs().T + (0 if bias is None else bias.double().abs())
    assert y.dtype == pre.dtype == dtype
    if activation is None:
        assert pre.shape == (0,)
    else:
        assert_sums_to(pre, truth, magnitude, "pre")
    added = 0 if residual is None else residual.double()
    assert_sums_to(
        y, activate_ref(truth, activation) + added, 1.2 * magnitude + 1 + abs(added), f"y, {options}"
    )
    for save, packed in ((False, None), (True, cpu.linear_panels(weight))):
        again, pre_again = cpu.linear_fwd(
            LinearInputs(x, weight, bias, activation, residual, panels=packed), save
        )
        assert_same_bits(again, y, f"y, save {save}")
        if save:
            assert_same_bits(pre_again, pre, "pre of the packed weight")
        else:
            assert pre_again.shape == (0,)

    if backward:
        dy, pre = randn(rows, columns, dtype=dtype, seed=5), None if activation is None else pre
        g, dbias = gradient(dy, pre, activation)
        g64 = dy.double() if activation is None else dy.double() * slope_ref(pre.double(), activation)
        assert_sums_to(g, g64, 2 * dy.double().abs(), "g")
        # dx and dweight are products of g as it is stored; dbias is summed before the rounding
        wide_g = g.double()
        for grads in (
            gradients(dy, x, weight, pre, activation),
            cpu.linear_bwd(dy, LinearSaved(x, weight, pre, activation), LinearNeeds()),
        ):
            assert_sums_to(grads[0], wide_g @ wide_weight, wide_g.abs() @ wide_weight.abs(), "dx")
            assert_sums_to(grads[1], wide_g.T @ wide_x, wide_g.abs().T @ wide_x.abs(), "dweight")
            assert_same_bits(grads[2], dbias.to(dtype), "dbias rounded")
        assert_sums_to(dbias, g64.sum(0), 2 * dy.double().abs().sum(0), "dbias")
        # other layouts of the same product
        dx, by_panels = (launcher._product(g, b, depth) for b in (weight, launcher._panels(weight)))
        assert_same_bits(by_panels, dx, "dx")
        among_nan = strided_rows(rows, columns, dtype, 7, seed=6)[0].copy_(g)
        for a, b in itertools.product((among_nan.t(), g.t().contiguous()), (x, launcher._panels(x))):
            assert_same_bits(launcher._product(a, b, depth), launcher._product(g.t(), x, depth), "dweight")
    for memory, copy in zip(memories, before, strict=True):
        assert_same_bits(memory, copy, "an input was written")


# --- results ----------------------------------------------------------------------------------------------


# what the kernels cut a product by -> (rows, depth, columns) up to its edges and past them
SIZES = {
    # tiles of every height; blocks of 160 rows, or 320 of pairs
    "rows": [(n, 36 + n % 2, 70) for n in (*range(1, 15), 31, 32, 33, 65, 159, 160, 161, 319, 320, 321, 641)],
    "columns": [(5, 9 + n % 2, n) for n in (*range(1, 131), 193)],
    # sums of 256 products, passes over the depth; the last element of an odd one has no partner
    "short depths": [(7, n, 67) for n in range(1, 71)],
    "depths": [
        (7, n, 67)
        for n in (255, 256, 257, 258, 511, 512, 513, 767, 768, 769, 1023, 1024, 1025, 1537, 1600, 2049, 3071)
    ],
    # dweight sums over the rows, dx over the columns
    "sums of the gradients": [
        shape
        for n in (31, 255, 256, 257, 258, 513, 767, 768, 769, 1023, 1024, 1025, 1600, 2049)
        for shape in ((n, 21, 11), (11, 21, n))
    ],
    # more columns than partial sums are kept for, where one task has all rows
    "one thread": [(9, 1030, 1030), (13, 1600, 1025), (7, 1025, 2100), (170, 1030, 1090)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", SIZES)
def test_every_size(isa, dtype, cut, guarded, threads):
    check_sizes(dtype, cut)


def check_sizes(dtype, cut):
    if cut == "one thread":
        torch.set_num_threads(1)
    for i, shape in enumerate(SIZES[cut]):
        both_ways(*shape, dtype, OPTIONS[i % 7])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ALL)
def test_every_option(isa, dtype, activation, guarded):
    for bias, residual in itertools.product((False, True), repeat=2):
        both_ways(8, 40, 75, dtype, (activation, bias, residual))
        both_ways(3, 790, 65, dtype, (activation, bias, residual))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((7, 24, 9), (37, 130, 70), (165, 1600, 66)), ids=str)
def test_small_integers_are_exact(isa, dtype, shape):
    rows, depth, columns = shape
    g = torch.Generator().manual_seed(0)

    def integers(low, high, *shape, share=1.0):
        kept = torch.rand(shape, generator=g) < share
        return torch.randint(low, high + 1, shape, generator=g) * kept

    # few enough non-zero products that every sum is below 256, and so exact even in bfloat16
    x, w = integers(-2, 2, rows, depth, share=min(1.0, 20 / depth)), integers(-2, 2, columns, depth)
    b, r = integers(-3, 3, columns), integers(-4, 4, rows, columns)
    pre = x @ w.T + b
    assert pre.abs().max() < 250
    args = [t.to(dtype) for t in (x, w, b)]
    y, saved = cpu.linear_fwd(LinearInputs(*args, "relu", r.to(dtype)), True)
    assert torch.equal(saved, pre.to(dtype))
    assert torch.equal(y, (pre.clamp(0) + r).to(dtype))
    dy = integers(-2, 2, rows, columns, share=min(1.0, 20 / rows, 20 / columns))
    g = dy * (pre > 0)
    dx, dw, db = cpu.linear_bwd(dy.to(dtype), LinearSaved(*args[:2], saved, "relu"), LinearNeeds())
    for actual, expected in ((dx, g @ w), (dw, g.T @ x), (db, g.sum(0))):
        assert expected.abs().max() < 250
        assert torch.equal(actual, expected.to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_results_are_rounded_once(isa, dtype):
    """The activation is taken of the sum, not of the rounded `pre`; the residual is added before rounding."""
    x, w, b, r = (
        randn(*s, dtype=dtype, seed=i) for i, s in enumerate(((64, 96), (300, 96), (300,), (64, 300)))
    )
    w = w / 8
    pre = x.double() @ w.double().T + b.double()
    for activation, residual in itertools.product(ALL, (None, r)):
        y = cpu.linear_fwd(LinearInputs(x, w, b, activation, residual), False)[0]
        truth = activate_ref(pre, activation) + (0 if residual is None else residual.double())
        assert (y == truth.to(dtype)).double().mean() >= 0.997, (activation, residual is None)
    dy, pre = randn(400, 300, dtype=dtype, seed=7), randn(400, 300, dtype=dtype, seed=8)
    dbias = cpu.linear_bwd(dy, LinearSaved(None, None, pre, "gelu"), LinearNeeds(False, False))[2]
    assert (dbias == (dy.double() * slope_ref(pre.double(), "gelu")).sum(0).to(dtype)).double().mean() >= 0.99


@pytest.mark.parametrize("depth", (768, 3072, 20_000))
def test_long_float32_sums_are_no_worse_than_torchs(isa, depth):
    x, w = randn(48, depth), randn(96, depth, seed=1)
    truth = x.double() @ w.double().T
    ours = (cpu.linear_fwd(LinearInputs(x, w), False)[0] - truth).abs()
    theirs = (F.linear(x, w) - truth).abs()
    assert ours.mean() <= theirs.mean()
    assert ours.max() <= 1.2 * theirs.max()  # one of 4,608 elements each: a draw
    rows = w.T.contiguous()
    for a in (x, x.T.contiguous().T):
        assert (launcher._product(a, rows, 96) - truth).abs().mean() <= theirs.mean()


@pytest.mark.parametrize(("family", "ours"), [(None, 0), (23, 0), (25, 1), (26, 2), (30, 2)])
def test_float32_gradients_are_mkls_where_it_leads(isa, family, ours, monkeypatch, noted):
    """On AMD's processors with AVX-512 dx is ours, from Zen 5 on dweight too; either way they are right."""
    monkeypatch.setattr(launcher, "amd_family", lambda: family)
    seen = noted(launcher, "_product")
    dy, x, weight = randn(70, 130), randn(70, 96, seed=1), randn(130, 96, seed=2)
    dx, dweight, _ = cpu.linear_bwd(dy, LinearSaved(x, weight), LinearNeeds(True, True, False))
    assert len(seen) == (ours if isa.startswith("avx512") else 0)
    for found, eager, truth in (
        (dx, dy @ weight, dy.double() @ weight.double()),
        (dweight, dy.T @ x, dy.double().T @ x.double()),
    ):
        assert (found - truth).abs().mean() <= 1.02 * (eager - truth).abs().mean()


@pytest.mark.parametrize("rows", (40, 1000, 9000))
def test_float32_bias_gradients_are_no_worse_than_torchs(isa, rows):
    dy = randn(rows, 96) + 1
    truth = dy.double().sum(0)
    ours = cpu.linear_bwd(dy, LinearSaved(None, None), LinearNeeds(False, False))[2]
    assert (ours - truth).abs().mean() <= (dy.sum(0) - truth).abs().mean()


# --- activations ------------------------------------------------------------------------------------------


def activated(z, activation):
    """The kernels' activation of a vector, by a product with 1."""
    y = cpu.linear_fwd(
        LinearInputs(z[:, None], torch.ones(1, 1, dtype=z.dtype), activation=activation), False
    )[0]
    return y[:, 0]


def derivative(z, activation):
    return gradient(torch.ones_like(z)[None], z[None], activation, with_dbias=False)[0][0]


@pytest.mark.parametrize("activation", ("gelu", "gelu_tanh", "silu", "tanh"))
def test_float32_activations_keep_their_relative_accuracy(isa, activation):
    """Also in the negative tail, as far as the rounding of exp's argument allows."""
    z = torch.linspace(-13, 13, 2_000_001)
    truth, slope = activation64(z, activation)
    argument = {
        "gelu": 0.5 * z.double() ** 2,
        "gelu_tanh": 3 * gelu_tanh_argument(z.double()).abs(),
        "silu": 0.0,
        "tanh": 0.0,
    }[activation]
    allowed = 4e-7 + 2**-24 * argument
    normal = truth.abs() >= 2**-126
    relative = (activated(z, activation) - truth).abs() / truth.abs().clamp_min(2**-126)
    assert normal.double().mean() > 0.8
    assert (relative <= allowed)[normal].all(), (relative / allowed)[normal].max()
    found = derivative(z, activation)
    assert (found - slope).abs().max() <= 3e-7
    tail = (z < -3) & (slope.abs() >= 2**-110)  # before, the two terms cancel; behind, σ is subnormal
    assert ((found - slope).abs() / slope.abs() <= allowed)[tail].all()
    assert (found - slope).abs().mean() <= 4e-8


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision_activations_are_correctly_rounded(isa, dtype, activation):
    for z in (torch.linspace(-8, 8, 200_001), randn(200_000, seed=3)):
        z = z.to(dtype)
        truth, slope = activation64(z, activation)
        assert (activated(z, activation) == truth.to(dtype)).double().mean() >= 0.999
        assert (derivative(z, activation) == slope.to(dtype)).double().mean() >= 0.9985
        step = testing.rounding_step(truth, dtype).clamp_min(torch.finfo(dtype).smallest_normal * 2**-10)
        assert ((activated(z, activation).double() - truth).abs() <= step).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_special_values(isa, dtype, activation):
    """0, the largest numbers, infinity and NaN as in the float64 reference."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    z = torch.tensor(
        [0.0, tiny, -tiny, 100.0, -100.0, 1e4, -1e4, largest, -largest, math.inf, -math.inf, math.nan]
    )
    z = z.to(dtype)
    y, expected = activated(z, activation), activate_ref(z.double(), activation).to(dtype)
    torch.testing.assert_close(y, expected, rtol=0, atol=tiny / 2**9, equal_nan=True)
    assert not y[z == 0].signbit().any()
    finite = z[z.isfinite()]
    expected = activation64(finite, activation)[1].to(dtype)
    torch.testing.assert_close(derivative(finite, activation), expected, rtol=0, atol=tiny / 2**9)
    if activation == "relu":
        assert derivative(z[-1:], activation) == 1, "as PyTorch has it"
    else:
        assert derivative(z[-1:], activation).isnan()
    # nothing of the upstream gradient's NaN or infinity is lost where the slope is not 0
    bad = torch.tensor([[math.nan, math.inf, -math.inf]], dtype=dtype)
    g = gradient(bad, torch.ones_like(bad), activation)[0]
    assert g[0, 0].isnan()
    assert torch.equal(g[0, 1:], bad[0, 1:])


def test_far_out_slopes_do_not_overflow(isa):
    z = torch.cat([torch.logspace(0, 38.5, 2000), -torch.logspace(0, 38.5, 2000)])
    for activation in ACTIVATIONS:
        slope = derivative(z, activation)
        assert (slope - activation64(z.clamp(-1e30, 1e30), activation)[1]).abs().max() <= 1e-6, activation


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bias_is_widened_exactly(isa, dtype):
    """All 65,536 values of each 16-bit dtype, including subnormals and infinities."""
    bits = torch.arange(-(2**15), 2**15)
    bias = bits.to(torch.int16).view(dtype) if dtype in HALF else (bits * 0x8001).to(torch.int32).view(dtype)
    x, weight = torch.zeros(1, 1, dtype=dtype), torch.zeros(2**16, 1, dtype=dtype)
    y = cpu.linear_fwd(LinearInputs(x, weight, bias), False)[0][0]
    torch.testing.assert_close(y, bias, rtol=0, atol=0, equal_nan=True)


# --- packing ----------------------------------------------------------------------------------------------


def panels(b):
    """The layout of csrc/cpu/linear.h in plain PyTorch."""
    depth, columns = b.shape
    padded = F.pad(b, (0, -columns % 64, 0, depth % 2))
    lines = 2 if b.dtype == torch.bfloat16 else 1
    return padded.view(-1, lines, padded.shape[1] // 64, 64).permute(2, 0, 3, 1).reshape(-1)


def random_bits(rows, columns, dtype, gap, seed):
    """Any bit pattern except NaN, with `gap` elements behind each row."""
    wide = torch.int16 if dtype in HALF else torch.int32
    info = torch.iinfo(wide)
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(info.min, info.max + 1, (rows, columns + gap), generator=g).to(wide).view(dtype)
    return torch.where(bits.isnan(), 1.0, bits).to(dtype)[:, :columns]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", (1, 2, 7, 8, 9, 15, 16, 17, 33, 70, 257))
def test_packing(isa, dtype, depth, guarded):
    for columns in (1, 2, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 130):
        for gap in (0, 3):
            by_columns = random_bits(depth, columns, dtype, gap, seed=1)
            by_depth = random_bits(columns, depth, dtype, gap, seed=2).t()
            for b in (by_columns, by_depth):
                packed = launcher._panels(b)
                assert packed.shape == (_C.cpu_linear_panels_size(depth, columns),)
                assert_same_bits(packed, panels(b), f"{depth}x{columns} + {gap}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_on_several_threads(isa, dtype, threads, guarded):
    torch.set_num_threads(3)
    for b in (randn(300, 1000, dtype=dtype), randn(1000, 300, dtype=dtype).t()):
        assert_same_bits(launcher._panels(b), panels(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_packed_as_nan(isa, dtype):
    b = torch.full((9, 70), math.nan, dtype=dtype)
    for matrix in (b, b.t().contiguous().t()):
        packed = launcher._panels(matrix)
        assert torch.equal(packed.isnan(), panels(torch.ones_like(b)).bool())


def test_a_weight_of_any_strides_is_packed():
    """The packer gets the caller's own weight; the op copies it later."""
    big = randn(40, 60)
    for weight in (big[:, ::2], big.t(), big.t()[::3], big[::2, ::5], big[:1, ::2], big[:, 3:4], big.flip(0)):
        assert_same_bits(cpu.linear_panels(weight), panels(weight.t()), str(weight.stride()))


def test_packed_for_another_weight_is_refused():
    x, weight, other = randn(3, 20), randn(70, 20), randn(30, 20)
    for wrong in (cpu.linear_panels(other), cpu.linear_panels(weight).view(-1, 64), randn(5)):
        words = r"panels: expected what panel_maker.* of weight \(70, 20\), got shape"
        with pytest.raises(ValueError, match=words):
            linear(x, weight, panels=wrong)
    linear(x, weight, panels=panel_maker(x.device, x.dtype)(weight))


def test_panels_serve_every_instruction_set():
    for dtype in DTYPES:
        weight = randn(70, 100, dtype=dtype)
        assert_same_bits(*on_each_isa(lambda weight=weight: cpu.linear_panels(weight), "avx2", "avx512"))


# --- layouts, poison --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", (0, 3))
def test_row_strides(isa, stride):
    """Expanded rows (stride 0) and overlapping ones, in every matrix that may have them."""
    x, weight, residual = (
        randn(200, seed=i).as_strided(s, (stride, 1)) for i, s in enumerate(((6, 10), (9, 10), (6, 9)))
    )
    bias, dy = randn(9, seed=3), randn(6, 9, seed=4)
    results = []
    for tensors in ((x, weight, residual), [t.clone() for t in (x, weight, residual)]):
        y, pre = cpu.linear_fwd(LinearInputs(*tensors[:2], bias, "gelu", tensors[2]), True)
        results.append((y, pre, *gradients(dy, *tensors[:2], pre, "gelu")))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("strides", ((35, 5), (1, 40), (7, 1), (0, 3), (3, 0)), ids=str)
def test_matrices_of_one_column(isa, strides):
    """The op passes on the stride of a dimension of one element, which may be anything."""
    memory = randn(2000)
    x = memory.as_strided((40, 1), strides)
    weight, residual = memory[100:].as_strided((9, 1), strides), memory[50:].as_strided((40, 1), strides)
    dy = randn(40, 9, seed=1)
    for one in (x, memory.as_strided((40, 1), (35, 5))):  # the second has no stride of 1 in any tier
        assert_same_bits(cpu.linear_fwd(LinearInputs(one, weight), False)[0], one @ weight.T + 0.0)
    for dx, dweight, _ in (
        gradients(dy, x, weight, None, None),
        cpu.linear_bwd(dy, LinearSaved(x, weight), LinearNeeds(True, True, False)),
    ):
        for actual, truth in ((dx, dy.double() @ weight.double()), (dweight, dy.double().T @ x.double())):
            assert (actual - truth).abs().max() < 1e-5
    row = memory[7:].as_strided((1, 40), (strides[0], 1))
    y = cpu.linear_fwd(LinearInputs(x.t().contiguous(), row, residual=residual[:1]), False)[0]
    assert (y - (x.double().T @ row.double().T + residual[:1])).abs().max() < 1e-5
    y = cpu.linear_fwd(LinearInputs(memory.view(40, 50)[:, :40], row, residual=residual), False)[0]
    assert (y - (memory.view(40, 50)[:, :40].double() @ row.double().T + residual)).abs().max() < 1e-4


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", (None, "gelu", "relu"))
def test_a_bad_element_stays_in_its_row_and_column(isa, dtype, bad, activation):
    check_a_bad_element(dtype, bad, activation, 800, 300)


def check_a_bad_element(dtype, bad, activation, depth, column):
    def run(x, weight, dy):
        y, pre = cpu.linear_fwd(LinearInputs(x, weight, activation=activation), True)
        # gradients of a fixed `pre`, so that bad values in x and weight do not enter through it
        given = None if activation is None else randn(13, 70, dtype=dtype, seed=3).abs() + 0.5
        return y, pre, *gradients(dy, x, weight, given, activation)

    shapes = ((13, depth), (70, depth), (13, 70))
    clean = [randn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    names = ("y", "pre", "dx", "dweight", "dbias")
    expected = run(*clean)
    # (row, column) of each result that the element reaches
    reached = (
        ((4, None), (4, None), None, (None, column), None),  # of x[4, column]
        ((None, 66), (None, 66), (None, column), None, None),  # of weight[66, column]
        (None, None, (4, None), (66, None), (66,)),  # of dy[4, 66]
    )
    for which, places in enumerate(reached):
        inputs = [t.clone() for t in clean]
        inputs[which][((4, column), (66, column), (4, 66))[which]] = bad
        for name, a, b, place in zip(names, run(*inputs), expected, places, strict=True):
            hit = torch.zeros(b.shape, dtype=torch.bool)
            if place is not None and b.numel():
                hit[tuple(slice(None) if i is None else i for i in place)] = True
            assert_same_bits(a[~hit], b[~hit], f"{name}, element of {which}")
            if math.isnan(bad):
                assert a[hit].isnan().all(), name
            elif name != "y" or activation is None:  # gelu and relu turn -inf into NaN or 0
                assert not a[hit].isfinite().any(), name


def test_only_what_is_asked_for(isa, guarded):
    x, weight, dy, pre = (randn(*s, seed=i) for i, s in enumerate(((13, 40), (70, 40), (13, 70), (13, 70))))
    for activation in (None, "gelu"):
        pre_given = None if activation is None else pre
        full = cpu.linear_bwd(dy, LinearSaved(x, weight, pre_given, activation), LinearNeeds())
        for need in itertools.product((False, True), repeat=3):
            saved = LinearSaved(x if need[1] else None, weight if need[0] else None, pre_given, activation)
            found = cpu.linear_bwd(dy, saved, LinearNeeds(*need))
            assert len({id(t) for t in found}) == 3, "one tensor returned twice, which a custom op may not"
            for wanted, a, b in zip(need, found, full, strict=True):
                if wanted:
                    assert_same_bits(a, b)
                else:
                    assert a.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(isa, dtype, guarded):
    x, weight, bias = torch.empty(0, 40, dtype=dtype), randn(70, 40, dtype=dtype), randn(70, dtype=dtype)
    for packed in (None, cpu.linear_panels(weight)):
        y, pre = cpu.linear_fwd(
            LinearInputs(x, weight, bias, "gelu", x.new_zeros(0, 70), panels=packed), True
        )
        assert y.shape == pre.shape == (0, 70)
    dx, dweight, dbias = cpu.linear_bwd(y, LinearSaved(x, weight, pre, "gelu"), LinearNeeds(True, False))
    assert dx.shape == (0, 40)
    assert torch.equal(dbias, torch.zeros(70, dtype=dtype))
    assert dweight.shape == (0,)


# float64 first: memory of that dtype holds all that is written to it, so a wrong dtype fails without a crash
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16), ids=str)
def test_pytorchs_default_dtype_changes_nothing(default):
    x, weight, dy = randn(40, 30), randn(20, 30, seed=1), randn(40, 20, seed=2)
    calls = (
        lambda: cpu.linear_fwd(LinearInputs(x, weight, weight[:, 0].contiguous(), "gelu", dy), True),
        lambda: cpu.linear_bwd(dy, LinearSaved(x, weight, dy, "gelu"), LinearNeeds()),
    )
    expected = [call() for call in calls]
    torch.set_default_dtype(default)
    try:
        found = [call() for call in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert_same_bits(a, b)


# --- determinism, threads ---------------------------------------------------------------------------------


THREADED_SHAPES = ((333, 300, 700), (40, 901, 1500), (1000, 64, 130), (5, 400, 2000))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "gated"), [*((shape, None) for shape in THREADED_SHAPES), ((330, 200, 700), "first")], ids=str
)
def test_any_number_of_threads_gives_the_same_bits(isa, dtype, shape, gated):
    check_threads(dtype, shape, gated)


def check_threads(dtype, shape, gated=None):
    """Nor do results depend on the other rows."""
    rows, depth, columns = shape
    out = columns if gated is None else 2 * columns
    shapes = ((rows, depth), (out, depth), (rows, columns), (out,))
    x, weight, dy, bias = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))

    def call():
        y, pre = cpu.linear_fwd(LinearInputs(x, weight, bias, "gelu", dy, gated), True)
        return y, pre, *gradients(dy, x, weight, pre, "gelu", gated)

    assert_same_on_any_threads(call, repeats=25 if rows == 1000 else 0)
    y = call()[0]
    for begin, end in ((0, 1), (1, rows), (rows // 2, rows // 2 + 2)):
        given = LinearInputs(x[begin:end], weight, bias, "gelu", dy[begin:end], gated)
        part = cpu.linear_fwd(given, False)[0]
        assert_same_bits(part, y[begin:end], f"rows {begin} to {end}")


# --- wide weights: float32 beside half precision ---------------------------------------------------------


WIDE_SHAPES = ((1, 5, 3), (7, 257, 66), (37, 64, 130), (161, 300, 65), (330, 31, 200), (5, 2100, 7))
WIDE_SHAPES += ((600, 20, 33),)
EPILOGUES = pytest.mark.parametrize(
    ("activation", "gated"), [(None, None), ("gelu", None), ("silu", "first")], ids=str
)


def check_a_wide_weight(dtype, shape, activation, gated):
    """The bits of the rounded weight; its gradients before they are rounded."""
    rows, depth, columns = shape
    out = columns if gated is None else 2 * columns
    x, wide = randn(rows, depth, dtype=dtype), strided_rows(out, depth, torch.float32, 3, seed=1)[0]
    wide[0, 0] = 1e-41  # rounded, it is subnormal
    weight, bias, dy = wide.to(dtype), randn(out, seed=2), randn(rows, columns, dtype=dtype, seed=3)
    assert not torch.equal(weight.float(), wide)
    (y, pre), (expected, pre_expected) = (
        cpu.linear_fwd(LinearInputs(x, w, bias, activation, gated=gated), True) for w in (wide, weight)
    )
    assert_same_bits(y, expected, "y")
    assert_same_bits(pre, pre_expected, "pre")
    pre = None if activation is None else pre
    found, rounded = (
        cpu.linear_bwd(dy, LinearSaved(x, w, pre, activation, gated), LinearNeeds()) for w in (wide, weight)
    )
    assert_same_bits(found[0], rounded[0], "dx")
    for name, a, b in zip(("dweight", "dbias"), found[1:], rounded[1:], strict=True):
        assert a.dtype == torch.float32
        assert_same_bits(a.to(dtype), b, name)
    g = gradient(dy, pre, activation, gated=gated)[0].double()
    assert_sums_to(found[1], g.T @ x.double(), g.abs().T @ x.double().abs(), "dweight")


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", WIDE_SHAPES, ids=str)
@EPILOGUES
def test_a_wide_weight_is_rounded_as_it_is_read(isa, dtype, shape, activation, gated, guarded):
    check_a_wide_weight(dtype, shape, activation, gated)


def test_no_rows_of_a_wide_weight(isa, guarded):
    x, wide, dy = randn(0, 20, dtype=torch.bfloat16), randn(7, 20), randn(0, 7, dtype=torch.bfloat16)
    assert cpu.linear_fwd(LinearInputs(x, wide), False)[0].shape == (0, 7)
    dx, dweight, dbias = cpu.linear_bwd(dy, LinearSaved(x, wide), LinearNeeds())
    assert dx.shape == (0, 20)
    assert_same_bits(dweight, torch.zeros(7, 20))
    assert_same_bits(dbias, torch.zeros(7))


def test_few_rows_of_a_wide_weight_are_ours_too(monkeypatch):
    """`aten` takes no weight of another dtype."""
    for function in ("linear_fwd", "linear_bwd"):
        monkeypatch.setattr(launcher.aten, function, None)
    x, wide, dy = randn(3, 20, dtype=torch.bfloat16), randn(7, 20, seed=1), randn(3, 7, dtype=torch.bfloat16)
    y = cpu.linear_fwd(LinearInputs(x, wide), False)[0]
    dx, dweight, _ = cpu.linear_bwd(dy, LinearSaved(x, wide), LinearNeeds(True, True, False))
    weight = wide.bfloat16().double()
    torch.testing.assert_close(y.double(), x.double() @ weight.T, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(dx.double(), dy.double() @ weight, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(dweight.double(), dy.double().T @ x.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", (40, 511, 512))
def test_many_rows_make_panels_of_the_whole_weight(isa, dtype, rows, monkeypatch):
    check_many_rows(dtype, rows, rows >= 512, monkeypatch)


def check_many_rows(dtype, rows, whole, monkeypatch):
    """Whether forward makes panels, and backward rounds a wide weight; the bits are the same."""
    panels, product, made, wide = launcher._panels, launcher._product, [], []
    monkeypatch.setattr(
        launcher, "_panels", lambda *args, **options: made.append(1) or panels(*args, **options)
    )
    x, weight, dy = randn(rows, 30, dtype=dtype), randn(20, 30, seed=1), randn(rows, 20, dtype=dtype, seed=2)
    narrow = weight.to(dtype)
    y = cpu.linear_fwd(LinearInputs(x, weight), False)[0]
    assert len(made) == whole
    assert_same_bits(y, cpu.linear_fwd(LinearInputs(x, narrow, panels=panels(narrow.t())), False)[0])
    monkeypatch.setattr(
        launcher, "_product", lambda *args, **options: wide.append(args[1].dtype) or product(*args, **options)
    )
    dx = cpu.linear_bwd(dy, LinearSaved(x, weight), LinearNeeds(True, False, False))[0]
    assert wide in ([dtype if whole else torch.float32], [])  # in float32 MKL's products may serve
    assert wide or dtype == torch.float32
    if dtype != torch.float32:
        assert_same_bits(dx, product(dy, narrow, 30))


# --- which way is taken, refusals -------------------------------------------------------------------------


def test_few_rows_are_packed_only_where_the_caller_has(monkeypatch):
    few, seen = launcher._FEWEST_ROWS, []
    assert few > 1
    for function in ("linear_fwd", "linear_bwd"):
        launch = getattr(launcher.aten, function)
        monkeypatch.setattr(
            launcher.aten, function, lambda *a, f=function, launch=launch: seen.append(f) or launch(*a)
        )
    weight = randn(20, 30)
    packed = cpu.linear_panels(weight)
    for rows in (1, few - 1, few, few + 1):
        x, dy = randn(rows, 30), randn(rows, 20, seed=1)
        y = cpu.linear_fwd(LinearInputs(x, weight, activation="gelu"), False)[0]
        grads = cpu.linear_bwd(dy, LinearSaved(x, weight, dy, "gelu"), LinearNeeds())
        assert seen == (["linear_fwd", "linear_bwd"] if rows < few else [])
        seen.clear()
        ours = cpu.linear_fwd(LinearInputs(x, weight, activation="gelu", panels=packed), False)[0]
        assert seen == []
        torch.testing.assert_close(y, ours, rtol=1e-5, atol=1e-5)
        truth = dy.double() * slope_ref(dy.double(), "gelu")
        torch.testing.assert_close(grads[0].double(), truth @ weight.double(), rtol=1e-5, atol=1e-4)


# dtype, rows, columns, depth, a, row stride, depth stride, packed, b, its strides, bias, its dtype,
# activation, residual, its stride, c, pre, threads, dtype of b, dtype of c, gate
GOOD = (1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    (
        (0, 3, "dtype: expected code 0, 1 or 2, got 3"),
        (4, 0, "a: expected an address, got none"),
        (6, 2, "product: expected one stride of 1"),
        (10, 2, "product: expected one stride of 1"),
        (13, 6, "activation: expected code 0 … 5, got 6"),
        (19, 2, "product: expected b and c of a's dtype or of float32"),
        (20, 2, "product: expected b and c of a's dtype or of float32"),
        (20, 3, "dtype: expected code 0, 1 or 2, got 3"),
        (20, 0, "product: expected neither residual nor pre beside a wide c"),
        (21, 3, "gate: expected code 0, 1 or 2, got 3"),
    ),
)
def test_the_extension_refuses_what_would_crash(at, value, message):
    """What it refuses of every function: tests/support/hostile/exports.py."""
    args = list(GOOD)
    args[at] = value
    if at in (6, 10):  # both strides
        args[at - 1] = 2
    if (at, value) == (20, 0):
        args[17] = torch.zeros(1).data_ptr()
    with pytest.raises(ValueError, match=message):
        _C.cpu_linear_product(*args)


# --- what is prefetched -------------------------------------------------------------------------------------


@functools.cache
def pace_lines(lines, tiles, rows):
    """How often each line of the next panel is prefetched, and of as many lines after it."""
    asked = (ctypes.c_int * (2 * lines * rows))()
    longs = [ctypes.c_int64(n) for n in (lines, tiles, rows)]
    ctypes.CDLL(str(cpu_build.pace())).pace_lines(*longs, asked, ctypes.c_int64(len(asked)))
    return list(asked)


@pytest.mark.parametrize("lines", [2, 4, 8])
@pytest.mark.parametrize("tiles", [2, 3, 4, 5, 8, 9, 27])
def test_few_tiles_and_many_prefetch_all_of_the_next_panel(tiles, lines):
    """Whole lines once each; parts of lines where there are more tiles than a row has lines."""
    rows = 128
    asked = pace_lines(lines, tiles, rows)
    assert min(asked[: lines * rows]) >= 1
    if tiles <= lines and lines % tiles == 0:
        assert asked == [1] * lines * rows + [0] * lines * rows
    # parts are rounded up, a byte per row and tile at most, and the last request may be of four lines
    last = max(line for line, count in enumerate(asked) if count)
    assert (last - lines * rows) * 64 <= rows * tiles + 4 * 64


def test_a_lone_tile_leaves_most_lines_to_the_processor():
    assert pace_lines(4, 1, 32) == [1, 0, 0, 0] * 32 + [0] * 128
