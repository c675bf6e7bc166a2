"""Quantised layers whose inputs have one range per layer, or stay in floating point."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.execution import eager, modules, plan
from fastbert.layers import quantized
from fastbert.layers.quantizing import each_linear
from fastbert.runtime import dispatch
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.quantized_models import cosine, hidden, ours

KINDS = ("static", "float")


def made(kind, family="bert", **how):
    model = ours(family)
    if kind == "static" or "smooth" in how:
        how["calibrate"] = [batch(family)]
    return model.quantize(activations=kind, **how)


def layers_of(model):
    return {name: module for _, _, module, name in each_linear(model)}


@pytest.mark.parametrize("kind", [*KINDS, "smoothed"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_outputs_stay(family, kind):
    """And the whole layer in one call computes what its ops compute, to the bit."""
    model = made("dynamic", family, smooth=0.5) if kind == "smoothed" else made(kind, family)
    full, kept = ours(family), batch(family)["attention_mask"].bool()
    assert all((m.smooth is not None) == (kind == "smoothed") for m in layers_of(model).values())
    y, truth = hidden(model), hidden(full)[kept]
    assert cosine(y[kept], truth).min() > 0.9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "EXECUTORS", (modules, eager))
        if family != "deberta-v2":
            assert torch.equal(hidden(copy.deepcopy(model)), y)
        with dispatch.use_backend(linear_int8="reference"):
            assert cosine(hidden(copy.deepcopy(model))[kept], y[kept]).min() > 0.99


def test_what_is_not_rounded_loses_less():
    truth, loss = hidden(ours("bert")), {}
    for kind in ("dynamic", *KINDS):
        loss[kind] = (hidden(made(kind)) - truth).norm().item()
    assert 0 < loss["float"] < loss["dynamic"] < loss["static"]
    assert all(layer.input_range is None for layer in layers_of(made("float")).values())


@pytest.mark.parametrize("smooth", [None, 0.5])
def test_ranges_are_those_of_the_calibration(smooth):
    """Of the inputs as they are rounded, that is, times the factors."""
    model, seen = ours("bert"), {}
    model.quantize(activations="static", smooth=smooth, calibrate=[batch("bert")])
    full, kept = ours("bert"), batch("bert")["attention_mask"].bool()
    for name, module in layers_of(full).items():
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.setdefault(name, []).append(args[0])
        )
    hidden(full)
    for name, module in layers_of(model).items():
        x = seen[name][0][kept]
        rows = x if smooth is None else x * module.smooth
        ends = torch.stack(torch.aminmax(torch.nn.functional.pad(rows, (0, 1)))).detach()
        torch.testing.assert_close(module.input_range, ends, rtol=1e-3, atol=1e-4)


def test_query_key_and_value_stay_one_product():
    attention = made("static").layer_list()[0].attention.self
    three, x = [attention.query, attention.key, attention.value], torch.randn(4, 48)
    assert quantized.int8_joins(x, three)
    y = quantized.int8_product(x, attention, three)
    assert torch.equal(y, torch.cat([m(x) for m in three], 1))
    attention.value.input_range = attention.value.input_range * 2
    assert not quantized.int8_joins(x, three)
    attention.value.input_range = None
    assert not quantized.int8_joins(x, three)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_files(tmp_path, kind, weights):
    model = made(kind, weights=weights)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    words = {"static": "8 bits, asymmetric, one range per layer, static", "float": "floating point"}
    assert entry["activations"] == words[kind]
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert torch.equal(hidden(loaded), hidden(model))
    assert f"activations='{kind}'" in repr(loaded)
    if kind == "float":
        assert loaded.quantize(weights, activations=kind) is loaded
    with pytest.raises(ValueError, match=rf"^activations: encoder\.\S+ has '{kind}' already, got 'dynamic'"):
        loaded.quantize(weights)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        loaded.train()
    half = fastbert.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert hidden(half).isfinite().all()
    if kind == "static":
        assert all(m.input_range.dtype == torch.float32 for m in layers_of(half).values())
        state, key = load_file(tmp_path / "model.safetensors"), "encoder.layer.1.output.dense.input_range"
        for bad in (state[key].flip(0), state[key].double(), state[key] * float("inf"), state[key] + 1e3):
            save_file({**state, key: bad}, tmp_path / "model.safetensors")
            with pytest.raises(
                CheckpointError, match=r"encoder\.layer\.1\.output\.dense\.input_range.*expected"
            ):
                fastbert.AutoModel.from_pretrained(tmp_path)


def test_an_unknown_kind_in_a_file_is_refused(tmp_path):
    made("float").save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text().replace('"floating point"', '"posits"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises((CheckpointError, ValueError), match="quantization_config"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_the_report_is_of_what_is_asked_for():
    model, found = ours("bert"), {}
    for kind in ("dynamic", *KINDS):
        more = {"calibrate": [batch("bert")]} if kind == "static" else {}
        rows = fastbert.quantization_report(model, activations=kind, run=lambda: hidden(model), **more)
        found[kind] = sum(row.output_sqnr for row in rows)
    assert found["float"] > found["dynamic"] > found["static"]
