"""`quantization_report`: its numbers by plain sums, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import fastbert
from fastbert.layers.float8 import Float8Linear
from fastbert.layers.quantized import QuantizedLinear
from tests.support.hf_models import batch
from tests.support.quantized_models import ours


def decibels(x, rounded):
    x, rounded = x.double(), rounded.double()
    return 10 * math.log10(x.square().sum() / (x - rounded).square().sum())


@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@torch.no_grad()
def test_numbers_by_plain_sums(weights):
    model, seen = ours("bert"), []
    linear = model.layer_list()[1].intermediate.dense
    hook = linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for seed in (0, 1):
        model(**batch("bert", seed=seed))
    hook.remove()
    calls = iter([0, 1])

    def run():
        for seed in calls:
            model(**batch("bert", seed=seed))

    tables = None if weights == "fp8" else "int8"
    rows = fastbert.quantization_report(model, weights, embeddings=tables, run=run)
    assert next(calls, None) is None, "run is called once"
    assert len(rows) == (tables is not None) + 18
    row = next(row for row in rows if row.name == "encoder.layer.1.intermediate.dense")
    x, made = torch.cat([t.flatten(0, -2) for t in seen]), QuantizedLinear.from_linear(linear)
    if weights == "int4":
        made = QuantizedLinear.from_linear(linear, bits=4)
    if weights == "fp8":
        made = Float8Linear.from_linear(linear)
    assert row.weight_sqnr == pytest.approx(decibels(linear.weight, made.dequantized()), abs=1e-6)
    assert row.output_sqnr == pytest.approx(decibels(linear(x), made(x)), abs=1e-3)
    most = x.abs().amax(0)
    assert row.outliers == pytest.approx((most.max() / most.median()).item(), rel=1e-6)
    assert not linear._forward_pre_hooks
    assert all(p.requires_grad for p in model.parameters())


def test_more_bits_lose_less():
    model = ours("bert")
    reports = [fastbert.quantization_report(model, kind, embeddings=kind) for kind in ("int8", "int4")]
    for fine, coarse in zip(*reports, strict=True):
        # 8 bits have 18 times the steps of 4, which is 25 dB, less what groups gain
        assert 15 < fine.weight_sqnr - coarse.weight_sqnr < 27
        assert fine.output_sqnr is fine.outliers is None


def test_what_is_refused():
    model = ours("bert")
    with pytest.raises(ValueError, match=r"run: did not call encoder\.layer\.0\."):
        fastbert.quantization_report(model, run=lambda: None)
    with pytest.raises(ValueError, match=r"^weights: expected 'int8', 'int4' or None"):
        fastbert.quantization_report(model, "int2")
    with pytest.raises(ValueError, match=r"^embeddings: expected None with fp8, got 'int8'"):
        fastbert.quantization_report(model, "fp8", embeddings="int8")
    with pytest.raises(ZeroDivisionError):
        fastbert.quantization_report(model, run=lambda: 1 // 0)
    assert not any(m._forward_pre_hooks for m in model.modules())
    model.quantize()
    for weights in ("int8", "fp8"):
        with pytest.raises(ValueError, match=r"^model: is quantised already"):
            fastbert.quantization_report(model, weights)
