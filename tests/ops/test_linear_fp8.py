"""`linear_fp8`: rounding to E4M3, what torch._scaled_mm is given, compilation, bad inputs."""

from __future__ import annotations

import math

import pytest
import torch

from fastbert.backends.aten import linear_fp8 as aten
from fastbert.ops.activation import activate_ref
from fastbert.ops.linear_fp8 import FP8, linear_fp8, linear_fp8_ref, rounded_rows
from fastbert.runtime import dispatch


def operands(rows=7, depth=32, out=48, dtype=torch.bfloat16, bias=True):
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, depth, generator=g) * torch.logspace(-3, 3, rows)[:, None]
    weight, scale = rounded_rows(torch.randn(out, depth, generator=g))
    given = torch.randn(out, generator=g).to(dtype) if bias else None
    return x.to(dtype), weight, scale.flatten(), given


def e4m3():
    """All finite numbers of E4M3 in ascending order, and whether the last bit of each is 0."""
    bits = torch.arange(128)
    exponent, mantissa = bits // 8, bits % 8
    values = torch.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * torch.exp2(exponent.double() - 7)
    )
    return values[:-1].double(), mantissa[:-1] % 2 == 0  # the last one is NaN


def test_rounding_is_to_the_nearest_and_halves_to_the_even():
    values, even = e4m3()
    assert values[-1] == 448
    middles = (values[1:] + values[:-1]) / 2
    rows = torch.cat([values, middles, middles * (1 + 1e-6), middles * (1 - 1e-6)]).float()
    x = torch.stack([rows, -rows])
    q, step = rounded_rows(x)
    assert torch.equal(step, torch.ones(2, 1))
    distance = (rows[:, None].double() - values).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    nearest &= even | (nearest.sum(1, keepdim=True) == 1)
    expected = values[nearest.int().argmax(1)]
    assert torch.equal(q.double(), torch.stack([expected, -expected]))


def test_the_input_is_activated_and_rounded_to_its_dtype_first():
    x, weight, scale, bias = operands()
    for name in ("gelu", "relu"):
        active = activate_ref(x.float(), name).bfloat16()
        for backend in ("reference", "aten"):
            with dispatch.use_backend(backend):
                y = linear_fp8(x, weight, scale, bias, input_activation=name)
                assert torch.equal(y, linear_fp8(active, weight, scale, bias)) or backend == "aten"
                torch.testing.assert_close(y, linear_fp8(active, weight, scale, bias), rtol=0.05, atol=0.05)
                assert not torch.equal(y, linear_fp8(x, weight, scale, bias))


def test_a_row_has_its_own_step():
    x = torch.tensor([[3.0, -8.96], [0.0, 0.0], [1e-44, 0.0], [3e38, -1e38]])
    q, step = rounded_rows(x)
    assert torch.equal(
        step.flatten(), torch.stack([x[0].abs().max() / 448, *torch.ones(2), x[3].max() / 448])
    )
    assert q.float().abs().amax(1).tolist() == [448, 0, 0, 448]


@pytest.mark.parametrize("activation", [None, "gelu", "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 16, 16), (7, 32, 48), (33, 768, 64)], ids=str)
def test_pytorchs_product_is_the_reference_rounded(shape, bias, activation):
    """On this CPU it is torch._scaled_mm itself."""
    if not aten._scales_rows(torch.device("cpu")):
        pytest.skip("this PyTorch has no product of float8 rows on a CPU")
    x, weight, scale, given = operands(*shape, bias=bias)
    with dispatch.use_backend("aten"):
        y = linear_fp8(x, weight, scale, given, activation)
    truth = linear_fp8_ref(x.double(), weight, scale, None if given is None else given.double(), activation)
    size = 2**-7 * (truth.abs() + truth.abs().amax(1, keepdim=True) * 2**-6)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - truth).abs() <= size).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_what_the_product_is_given(monkeypatch, rows):
    """A GPU takes rows of x, the transposed weight, one scale per row and per column, and stores bfloat16."""
    x, weight, scale, bias = operands(rows)
    seen = []

    def scaled_mm(a, b, **how):
        seen.append((a, b, how))
        product = a.double() @ b.double() * how["scale_a"].double() * how["scale_b"].double()
        return (product + (0 if how["bias"] is None else how["bias"].double())).to(how["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(aten, "_scales_rows", lambda device: True)
    with dispatch.use_backend("aten"):
        y = linear_fp8(x, weight, scale, bias.float(), "gelu")
        linear_fp8(x, weight, scale)
        assert len(seen) == 2
        # Sizes and dtypes that it does not take
        for other in (operands(rows, 17), operands(rows, 32, 9), operands(rows, dtype=torch.float32)):
            assert torch.equal(linear_fp8(*other), linear_fp8_ref(*other))
        assert linear_fp8(x[:0], weight, scale).shape == (0, 48)
    assert len(seen) == 2
    a, b, how = seen[0]
    assert (a.dtype, b.dtype, how["bias"].dtype) == (FP8, FP8, torch.bfloat16)
    assert a.stride() == (32, 1)
    assert b.stride() == (1, 32)
    assert (how["scale_a"].shape, how["scale_b"].shape) == ((rows, 1), (1, 48))
    assert how["scale_a"].dtype == how["scale_b"].dtype == torch.float32
    assert (how["out_dtype"], how["use_fast_accum"]) == (torch.bfloat16, False)
    assert seen[1][2]["bias"] is None
    torch.testing.assert_close(y, linear_fp8_ref(x, weight, scale, bias, "gelu"), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("what", ["wrong", "raises", "missing"])
def test_a_product_that_is_wrong_is_not_used(monkeypatch, what):
    def scaled_mm(a, b, **how):
        if what == "raises":
            raise RuntimeError("not implemented")
        return torch.full((a.shape[0], b.shape[1]), 3.0, dtype=torch.bfloat16)

    if what == "missing":
        monkeypatch.delattr(torch, "_scaled_mm", raising=False)
    else:
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm, raising=False)
    assert not aten._scales_rows.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("backend", ["reference", "aten"])
def test_a_row_that_is_not_finite_gives_nan_alone(backend):
    x, weight, scale, bias = operands(9)
    with dispatch.use_backend(backend):
        clean = linear_fp8(x, weight, scale, bias)
        x[2, 3], x[4, 0], x[8, 31] = math.nan, math.inf, -math.inf
        y = linear_fp8(x, weight, scale, bias)
    assert y[[2, 4, 8]].isnan().all()
    assert torch.equal(y[[0, 1, 3, 5, 6, 7]], clean[[0, 1, 3, 5, 6, 7]])


def test_compiled_and_under_autocast():
    x, weight, scale, bias = operands(dtype=torch.float32)
    # Its other checks multiply float8, which a CPU does not
    which = "test_faketensor"
    op = torch.ops.fastbert.linear_fp8_fwd
    torch.library.opcheck(op, (x, weight, scale, bias, "gelu", None, "relu"), test_utils=which)

    def run(x):
        return linear_fp8(x, weight, scale, bias, "gelu", input_activation="relu")

    compiled = torch.compile(run, backend="aot_eager")
    assert torch.equal(compiled(x), run(x))
    with torch.autocast("cpu", torch.bfloat16):
        y = linear_fp8(x, weight, scale, bias)
    assert torch.equal(y, linear_fp8(x.bfloat16(), weight, scale, bias))


X, W, S, B = torch.ones(2, 3), torch.ones(4, 3).to(FP8), torch.ones(4), torch.ones(4)
BAD = [
    ({"x": W}, TypeError, "x: expected"),
    ({"x": torch.ones(2, 4)}, ValueError, r"weight: expected shape \(out, 4\), got \(4, 3\)"),
    ({"weight": W.float()}, TypeError, "weight: expected float8_e4m3fn, got torch.float32"),
    ({"weight": [1]}, TypeError, "weight: expected a torch.Tensor, got list"),
    ({"scale": S.double()}, TypeError, "scale: expected float32, got torch.float64"),
    ({"scale": S[:3]}, ValueError, "scale: expected"),
    ({"bias": B[:3]}, ValueError, "bias: expected"),
    ({"bias": B.double()}, TypeError, "bias: expected x's dtype"),
    ({"activation": "mish"}, ValueError, "activation: expected"),
    ({"input_activation": "mish"}, ValueError, "input_activation: expected"),
    ({"activation": "gelu", "gated": "third"}, ValueError, "gated: expected"),
    ({"x": X.clone().requires_grad_()}, RuntimeError, "x: requires a gradient.*no_grad"),
]


@pytest.mark.parametrize(("change", "kind", "words"), BAD, ids=lambda value: "")
def test_bad_inputs(change, kind, words):
    with pytest.raises(kind, match=f"^{words}"):
        linear_fp8(**{"x": X, "weight": W, "scale": S, "bias": B, **change})
