"""`model.quantize("fp8")`: without a GPU the CPU is taken for one, and PyTorch multiplies there."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.layers import float8
from fastbert.layers import linear as layers
from fastbert.layers.float8 import Float8Linear
from fastbert.layers.quantized import is_quantized
from fastbert.layers.quantizing import each_linear
from fastbert.ops.linear_fp8 import FP8, linear_fp8
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.quantized_models import cosine, hidden, hook, ours

BERT = "AutoModelForSequenceClassification"


@pytest.fixture
def on_any_device(monkeypatch):
    monkeypatch.setattr(float8, "gap", lambda device: None)


def half(family="bert", cls="AutoModel"):
    return ours(family, cls).bfloat16()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_layers_are_replaced_and_outputs_stay_near(on_any_device, family):
    full, model = half(family), half(family)
    linears = [name for *_, name in each_linear(model)]
    assert model.quantize("fp8") is model
    replaced = {n for n, m in model.named_modules() if type(m) is Float8Linear}
    assert replaced == set(linears)
    assert not any(type(m) is nn.Linear for *_, m, _ in each_linear(model))
    for name in replaced:
        made, source = model.get_submodule(name), full.get_submodule(name).weight.float()
        assert (made.weight.dtype, made.scale.dtype) == (FP8, torch.float32)
        torch.testing.assert_close(made.scale, source.abs().amax(1) / 448)
        step = made.scale[:, None]
        error = (made.dequantized() - source).abs()
        assert (error <= source.abs() / 16 + 2**-10 * step).all()
        assert error.max() > 0
    kept = batch(family)["attention_mask"].bool()
    y = hidden(model)
    assert y.dtype == torch.bfloat16
    # Three bits of mantissa, and random weights whose outliers no training has tamed
    assert cosine(y[kept], hidden(full)[kept]).mean() > 0.9
    assert model.num_parameters() == full.num_parameters()
    assert is_quantized(model)
    assert model.quantize("fp8") is model


def test_one_product_of_three_is_each_of_them(on_any_device):
    torch.manual_seed(0)
    three = [Float8Linear.from_linear(nn.Linear(48, 32).bfloat16()) for _ in range(3)]
    x = torch.randn(5, 48).bfloat16()
    kind = layers.LINEAR_KINDS[Float8Linear]
    assert kind.joins(x, three)
    with torch.no_grad():
        for with_bias in (True, False, True):
            y = kind.product(x, nn.Identity(), three, None, with_bias)
            each = [linear_fp8(x, m.weight, m.scale, m.bias if with_bias else None) for m in three]
            assert torch.equal(y, torch.cat(each, 1))
        three[1].scale.mul_(2)
        owner = nn.Identity()
        before = kind.product(x, owner, three)
        three[1].scale.mul_(2)
        assert not torch.equal(kind.product(x, owner, three), before)
    three[2].bias = None
    assert not kind.joins(x, three)


def test_other_devices_and_dtypes_are_refused(monkeypatch):
    model = half()
    with pytest.raises(ValueError, match=r"^model: on cpu; fp8 needs a GPU of compute capability 9\.0"):
        model.quantize("fp8")
    for own, reason in (((8, 9), "on cuda:0 with compute capability 8.9"), ((9, 0), None), ((10, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=own: own)
        assert float8.gap(torch.device("cuda", 0)) == reason
    monkeypatch.setattr(float8, "gap", lambda device: None)
    with pytest.raises(ValueError, match=r"^model: expected bfloat16 for fp8, got float32: call model"):
        ours("bert").quantize("fp8")
    with pytest.raises(ValueError, match=r"^smooth: expected None with fp8, got 0\.5"):
        model.quantize("fp8", smooth=0.5, calibrate=[batch("bert")])
    hook(model.layer_list()[1].output.dense)
    with pytest.raises(TypeError, match=r"^encoder\.layer\.1\.output\.dense: expected a plain nn\.Linear"):
        model.quantize("fp8")
    model = half()
    with torch.no_grad():
        model.layer_list()[1].output.dense.weight[3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"^encoder\.layer\.1\.output\.dense\.weight: holds NaN"):
        model.quantize("fp8")
    assert not is_quantized(model)
    with pytest.raises(RuntimeError, match="cannot be trained"):
        half("bert", BERT).base_model.quantize("fp8").train()


def test_files(on_any_device, tmp_path, monkeypatch):
    model = half("bert", BERT).quantize("fp8")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "fastbert-fp8"
    assert config["dtype"] == "bfloat16"
    auto = getattr(fastbert, BERT)
    loaded = auto.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(hidden(loaded.base_model), hidden(model.base_model))
    assert {type(m) for *_, m, _ in each_linear(loaded)} == {Float8Linear}
    assert copy.deepcopy(loaded).bfloat16().base_model.layer_list()[0].output.dense.weight.dtype == FP8
    file, key = tmp_path / "model.safetensors", "bert.encoder.layer.1.output.dense.weight"
    state = load_file(file)
    assert state[key].dtype == FP8
    for bad, words in (
        (state[key].float(), "expected torch.float8_e4m3fn"),
        (torch.full_like(state[key].float(), torch.nan).to(FP8), "holds NaN"),
    ):
        save_file({**state, key: bad}, file)
        with pytest.raises(CheckpointError, match=rf"layer\.1\.output\.dense\.weight.*{words}"):
            auto.from_pretrained(tmp_path)
    save_file(state, file)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"^device: on cpu; fp8 needs a GPU"):
        auto.from_pretrained(tmp_path)


def test_rows_of_the_second_product_are_activated_as_they_are_rounded(on_any_device, monkeypatch):
    """Unless something looks at the first product's layer: then as after any linear layer."""
    model, seen = half().quantize("fp8"), []

    def noted(x, weight, scale, bias, activation, gated, input_activation):
        seen.append((activation, input_activation))
        return linear_fp8(x, weight, scale, bias, activation, gated, input_activation)

    expected = hidden(model)
    monkeypatch.setattr(float8, "linear_fp8", noted)
    assert torch.equal(hidden(model), expected)
    layers = len(model.layer_list())
    assert [pair for pair in seen if any(pair)] == [(None, "gelu")] * layers
    seen.clear()
    hook(model.layer_list()[1].intermediate.dense)
    hidden(model)
    assert seen.count((None, "gelu")) == layers - 1
