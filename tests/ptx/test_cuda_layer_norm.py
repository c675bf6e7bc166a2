"""csrc/cuda/layer_norm*.cu as nvcc compiles them for sm_90a, with their host code, in the PTX emulator."""

from __future__ import annotations

import itertools

import pytest
import torch

from fastbert import testing
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved, layer_norm_ref
from fastbert.testing.op_cases.layer_norm import CASES, LayerNormCase
from tests.support.cpu_truth import assert_rounds_to, randn, strided_rows
from tests.support.launchers import layer_norm_bwd, layer_norm_fwd

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = torch.tensor([-0x123456789ABCDEF])

# A hidden size of each kernel: a warp per row (four sizes), a block per row (three), looped; 8200 is beyond
# the blocks of forward, 4104 beyond those of backward, and 4096 the widest row of those.
WIDTHS = (8, 256, 264, 520, 768, 1000, 1032, 2048, 2056, 4096, 4104, 8200)


# The backend hands NoNorm on
OWN = [case for case in CASES if case.norm != "no_norm"]


def broken_rules(case, dtype):
    rows = testing.run_case(case, "cuda", dtype)
    assert len(rows) >= 3
    return [(r.quantity, r.reason) for r in rows if not r.passed]


@pytest.mark.parametrize("how", ("late", "early", "contracted"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", OWN, ids=repr)
def test_error_rule(emulated, case, dtype, how):
    """Contracted: with multiply-adds, as ptxas may make them; with one column dx is 0, and rstd is large."""
    emulated.contract = how == "contracted"
    emulated.schedule = "late" if emulated.contract else how
    assert broken_rules(case, dtype) == []
    assert emulated.launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_every_width(emulated, hidden, dtype):
    wanted = {"residual": True, "x_bias": True, "dropout_p": 0.25}
    for half_x in (False, True)[: 1 + (dtype == torch.float32)]:
        assert broken_rules(LayerNormCase(5, hidden, **wanted, half_x=half_x), dtype) == []
    assert broken_rules(LayerNormCase(5, hidden, **wanted, norm="rms_norm", return_sum=True), dtype) == []


@pytest.mark.parametrize(("dtype", "p"), zip(DTYPES[1:], (0.25, 0.0), strict=True))
@pytest.mark.parametrize("hidden", (*WIDTHS, 9))
def test_half_precision_beside_float32_is_as_if_cast(emulated, hidden, dtype, p):
    """In each kernel; packs of x are 8 values and packs of the residual 4. y twice is y cast."""
    x, (residual, dy) = randn(5, hidden, dtype=dtype), (randn(5, hidden, seed=s) for s in (2, 3))
    once = both_ways(emulated.backend, x, residual, dy, p=p)
    inputs = LayerNormInputs(
        x, *(randn(hidden, seed=s) for s in (4, 5)), residual, randn(hidden, seed=6), 1e-5
    )
    inputs = inputs._replace(dropout_p=p, seed=SEED if p else None, offset=9)
    *same, rounded = emulated.backend.layer_norm_fwd(inputs, True, True)
    assert all(torch.equal(a, b) for a, b in zip(same, once[:4], strict=True))
    assert torch.equal(rounded, same[0].to(dtype))
    saved = LayerNormSaved(same[1], inputs.weight, *same[2:], p, inputs.seed, 9)
    need, drounded = LayerNormNeeds(True, True, True, True, dtype), randn(5, hidden, dtype=dtype, seed=7)
    ours = emulated.backend.layer_norm_bwd(dy, saved, need, drounded)
    summed = emulated.backend.layer_norm_bwd(dy + drounded, saved, need)
    assert all(torch.equal(a, b) for a, b in zip(ours, summed, strict=True))
    # Backward's columns per thread are those of float32: the same bits. Forward adds in another order.
    cast = emulated.backend.layer_norm_bwd(dy, saved, need._replace(x_dtype=None))
    cast = cast if p else (cast[0], cast[0], *cast[2:])
    for a, b in zip(once[4:], cast, strict=True):
        assert torch.equal(a, b.to(a.dtype))
    wide = both_ways(emulated.backend, x.float(), residual, dy, p=p)
    for a, b in zip(same, wide, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(same[1], wide[1])


def test_every_kernel_is_launched(emulated):
    """By `test_every_width` and by a width that is no multiple of a vector."""
    for dtype, hidden in itertools.product(DTYPES, (*WIDTHS, 7)):
        x, weight = randn(2, hidden, dtype=dtype), randn(hidden, dtype=dtype)
        _, _, mean, rstd = layer_norm_fwd(
            emulated.backend, x, weight, None, None, None, 1e-5, 0, None, 0, True
        )
        needs = (True, True, False, False)
        layer_norm_bwd(emulated.backend, x, x, weight, mean, rstd, 0, None, 0, *needs)
        if dtype != torch.float32:
            both_ways(emulated.backend, x, x.float(), x.float())
    ours = {name for name in emulated.library.names if "layer_norm" in name}
    assert ours
    assert {launch.kernel for launch in emulated.launches} == ours


def both_ways(backend, x, residual, dy, parameters=None, dsum=None, *, p=0.25):
    """Forward and backward with everything wanted: y, z, mean, rstd and the five gradients."""
    hidden, seed = x.shape[1], SEED if p else None
    weight, bias, x_bias = parameters or (randn(hidden, seed=s) for s in (4, 5, 6))
    y, z, mean, rstd = layer_norm_fwd(backend, x, weight, bias, residual, x_bias, 1e-5, p, seed, 9, True)
    need = LayerNormNeeds(True, True, True, True, x.dtype)
    saved = LayerNormSaved(z, weight, mean, rstd, p, seed, 9)
    grads = backend.layer_norm_bwd(dy, saved, need, None, dsum)
    return y, z, mean, rstd, *grads


# in registers of warps, of a block, looped; several rows per block of backward, and one
@pytest.mark.parametrize("hidden", (264, 2056, 1001))
def test_any_order_of_warps_gives_the_same_bits(emulated, hidden):
    x, residual, dy = (randn(7, hidden, dtype=torch.bfloat16, seed=s) for s in (1, 2, 3))
    first = None
    for seed in range(20):
        emulated.seed = seed
        results = both_ways(emulated.backend, x, residual, dy, dsum=x)
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True)), seed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gap", (8, 5))  # 16-byte accesses, looped
@pytest.mark.parametrize("hidden", (264, 1032, 33))
def test_gaps_between_rows_are_neither_read_nor_written(emulated, hidden, gap, dtype):
    """With NaN in the gaps; parameters are float32, whatever the rows are."""
    inputs = [strided_rows(5, hidden, dtype, gap, seed=s) for s in (1, 2, 3)]
    before = [memory.clone() for _, memory in inputs]
    x, residual, dy = (rows for rows, _ in inputs)
    results = both_ways(emulated.backend, x, residual, dy)
    dense = both_ways(emulated.backend, *(t.contiguous() for t in (x, residual, dy)))
    for a, b in zip(results, dense, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=2**-6 if dtype != torch.float32 else 1e-5, atol=1e-2)
    for (_, memory), copy in zip(inputs, before, strict=True):
        assert torch.equal(memory.view(torch.uint8), copy.view(torch.uint8))
    weight, bias, x_bias = (randn(hidden, seed=s).double() for s in (4, 5, 6))
    keep = keep_mask_2d(SEED, 9, *x.shape, 0.25)
    truth = layer_norm_ref(x.double(), weight, bias, residual.double(), x_bias, 1e-5, 0.25, keep)
    assert_rounds_to(results[0], truth, 4.0)


def moved(tensor):
    """A copy at an address that is a multiple of 8 and not of 16."""
    memory = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
    start = (-memory.data_ptr() % 16 + 8) // tensor.itemsize
    return memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", range(7))
def test_addresses_that_16_byte_accesses_cannot_have(emulated, place, dtype):
    """Of each input in turn: the looped kernels take it, and sum in another order."""
    inputs = [randn(5, 264, dtype=dtype, seed=s) for s in (1, 2, 3)]
    inputs += [randn(264, dtype=dtype, seed=s) for s in (4, 5, 6)]
    inputs.append(randn(5, 264, dtype=dtype, seed=7))
    before = both_ways(emulated.backend, *inputs[:3], inputs[3:6], inputs[6])
    inputs[place] = moved(inputs[place])
    emulated.launches.clear()
    after = both_ways(emulated.backend, *inputs[:3], inputs[3:6], inputs[6])
    assert any("looped" in launch.kernel for launch in emulated.launches)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 2**-6, atol=1e-2)


@pytest.mark.parametrize("p", (0.0, 0.25))
@pytest.mark.parametrize("hidden", (7, 264))
def test_only_what_is_wanted(emulated, hidden, p):
    """Each gradient is the same whatever else is wanted; an unwanted one is empty."""
    dy, z = (randn(6, hidden, seed=s) for s in (1, 2))
    given = (dy, z, randn(hidden), randn(6), randn(6, seed=1).abs(), p, SEED if p else None, 9)
    dx, dresidual, *sums = layer_norm_bwd(emulated.backend, *given, True, True, True, True)
    everything = dx, dresidual if p else dx, *sums
    for needs in itertools.product((True, False), repeat=4):
        need_dx, need_dweight, need_dx_bias, need_dresidual = needs
        # without dropout dx is the residual's gradient too
        need_dresidual = need_dresidual and (p > 0 or not need_dx)
        wanted = (need_dx, need_dresidual, need_dweight, need_dweight, need_dx_bias)
        grads = layer_norm_bwd(emulated.backend, *given, *needs)
        for grad, truth, want in zip(grads, everything, wanted, strict=True):
            assert torch.equal(grad, truth if want else torch.empty(0)), needs


# a warp per row of backward, and two
@pytest.mark.parametrize("hidden", (96, 264))
@pytest.mark.parametrize("rows", (0, 1, 9, 100))
def test_rows(emulated, rows, hidden):
    """More rows than two multiprocessors take at once: each of a block's rows walks over several."""
    x, residual, dy = (randn(rows, hidden, dtype=torch.float16, seed=s) for s in (1, 2, 3))
    if rows:
        for columns in (33, hidden):
            case = LayerNormCase(rows, columns, residual=True, x_bias=True, dropout_p=0.25)
            assert broken_rules(case, torch.bfloat16) == []
    results = both_ways(emulated.backend, x, residual, dy, p=0.0)
    assert all(torch.isfinite(t).all() for t in results)
    emulated.seed = 1
    again = both_ways(emulated.backend, x, residual, dy, p=0.0)
    assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
