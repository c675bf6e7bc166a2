"""Checkpoints of quantised models, both ways, and files that are refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.checkpoint.load import load_weights
from fastbert.layers import quantizing
from fastbert.layers.quantized import QuantizedLinear, is_quantized
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.inputs import name
from tests.support.quantized_models import FLOATS, hidden, ours


def saved(tmp_path, model):
    model.save_pretrained(tmp_path)
    return json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_round_trip_is_bit_equal(family, tmp_path):
    model = ours(family).quantize()
    expected = hidden(model)
    config = saved(tmp_path, model)
    assert config["quantization_config"]["format"] == "fastbert-int8"
    assert "quant_method" not in config["quantization_config"]
    assert config["dtype"] == "float32"
    stored = load_file(tmp_path / "model.safetensors")
    assert {k for k, v in stored.items() if v.dtype == torch.int8} == {
        f"{n}.weight" for n, m in model.named_modules() if isinstance(m, QuantizedLinear)
    }
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert {k: (v.dtype, v.shape) for k, v in loaded.state_dict().items()} == {
        k: (v.dtype, v.shape) for k, v in model.state_dict().items()
    }
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())
    assert torch.equal(hidden(loaded), expected)
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(m.training for m in loaded.modules())
    with pytest.raises(RuntimeError, match="cannot be trained"):
        loaded.train()
    assert loaded.quantize() is loaded
    again = tmp_path / "again"
    again.mkdir()
    assert saved(again, loaded) == config
    assert torch.equal(hidden(fastbert.AutoModel.from_pretrained(again)), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_round_trip_of_heads_dtypes_and_shards(dtype, tmp_path):
    model = ours("roberta", "AutoModelForTokenClassification").to(dtype).quantize()
    inputs = batch("roberta")
    with torch.no_grad():
        expected = model(**inputs).logits
    files = model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert files is None
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = fastbert.AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert loaded.dtype == dtype
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, expected)
    assert loaded.roberta.layer_list()[0].output.dense.scale.dtype == torch.float32
    other = torch.float16 if dtype != torch.float16 else torch.bfloat16
    cast = fastbert.AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=other)
    assert cast.dtype == other
    assert cast.roberta.layer_list()[0].output.dense.bias.dtype == other
    assert torch.equal(
        cast.roberta.layer_list()[0].output.dense.scale, model.roberta.layer_list()[0].output.dense.scale
    )
    with torch.no_grad():
        assert (cast(**inputs).logits.float() - expected.float()).abs().max() < 0.2 * expected.abs().max()


def test_a_head_on_a_quantised_encoder_and_the_reverse(bert, tmp_path):
    bert.quantize()
    saved(tmp_path, bert)
    with pytest.warns(UserWarning, match="freshly initialised"):
        model = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path)
    inputs = batch("bert")
    with torch.no_grad():
        assert torch.equal(model.bert(**inputs).last_hidden_state, hidden(bert))
    whole = tmp_path / "whole"
    saved(whole, model)
    encoder = fastbert.BertModel.from_pretrained(whole, add_pooling_layer=False)
    assert torch.equal(hidden(encoder), hidden(bert))


def test_into_a_live_model(bert, tmp_path):
    other = ours("bert")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.quantize()
    saved(tmp_path, bert.quantize())
    hidden(other)
    load_weights(other, tmp_path)
    assert torch.equal(hidden(other), hidden(bert))


def change(tmp_path, tensors=None, drop=(), config=None, remove=()):
    """Rewrite the saved files: add, replace or remove tensors and config keys."""
    file = tmp_path / "model.safetensors"
    state = {k: v for k, v in {**load_file(file), **(tensors or {})}.items() if k not in drop}
    save_file(state, file, {"format": "pt"})
    values = {**json.loads((tmp_path / "config.json").read_text()), **(config or {})}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in remove}))


DENSE = "encoder.layer.1.output.dense"
BAD_FILES = {  # what values a state may have: test_quantized_linear.py
    "scale gone": ({"drop": [f"{DENSE}.scale"]}, rf"missing keys: {DENSE}\.scale$"),
    "negative scale": (
        {"tensors": {f"{DENSE}.scale": -torch.ones(48)}},
        rf"{DENSE}\.scale: expected positive finite scales",
    ),
    "nan bias": (
        {"tensors": {f"{DENSE}.bias": torch.full((48,), float("nan"))}},
        rf"{DENSE}\.bias: holds NaN",
    ),
    "scale of another intermediate size": (
        {"config": {"intermediate_size": 96}},
        r"intermediate\.dense\.scale: shape \(80,\), but the config makes it \(96,\) "
        r"\(config intermediate_size says 96, the file has 80\)",
    ),
    "integers elsewhere": (
        {"tensors": {"pooler.dense.weight": torch.ones(48, 48, dtype=torch.int8)}},
        r"pooler\.dense\.weight: dtype torch\.int8; expected float32",
    ),
    "config says nothing": (
        {"remove": ["quantization_config"]},
        r"unexpected keys: .*\.scale.*file holds 8-bit weights, but the config has no quantization_config",
    ),
    "config says another format": (
        {"config": {"quantization_config": {"format": "fastbert-int4"}}},
        r"config\.json: quantization_config: expected none, or .*got 'fastbert-int4'",
    ),
    "bitsandbytes": (
        {"config": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}},
        r"config\.json: quantization_config: expected none, or .*got 'bitsandbytes'",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_do_not_fit_are_refused(bert, tmp_path, case):
    saved(tmp_path, bert.quantize())
    changes, message = BAD_FILES[case]
    change(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_float_and_quantised_do_not_mix(bert, tmp_path):
    """Neither silently rounds the other's numbers, and a live model does not change."""
    full, int8 = bert, copy.deepcopy(bert).quantize()
    saved(tmp_path / "full", full)
    saved(tmp_path / "int8", int8)
    before = hidden(full), hidden(int8)
    with pytest.raises(CheckpointError, match=r"missing keys: .*scale.*says that the weights are 8-bit, but"):
        load_weights(int8, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"unexpected keys: .*scale.*the file holds 8-bit weights"):
        load_weights(full, tmp_path / "int8")
    with pytest.raises(RuntimeError, match=r"query\.weight: dtype torch\.float32; expected torch\.int8"):
        int8.load_state_dict(full.state_dict(), strict=False)
    assert torch.equal(hidden(full), before[0])
    assert torch.equal(hidden(int8), before[1])
    change(tmp_path / "full", config={"quantization_config": quantizing.CONFIG})
    words = r"missing keys: .*scale.*says that the weights are 8-bit, but those"
    with pytest.raises(CheckpointError, match=words):
        fastbert.AutoModel.from_pretrained(tmp_path / "full")


def test_a_float_model_of_a_quantised_config_is_saved_as_what_it_is(bert, tmp_path):
    saved(tmp_path, bert.quantize())
    config = EncoderConfig.from_pretrained(tmp_path)
    assert quantizing.in_config(config)
    fresh = fastbert.AutoModel.from_config(config)
    assert not is_quantized(fresh)
    assert "quantization_config" not in saved(tmp_path / "fresh", fresh)
    assert torch.equal(hidden(fastbert.AutoModel.from_pretrained(tmp_path / "fresh")), hidden(fresh.eval()))


def test_transformers_refuses_the_directory(bert, tmp_path):
    """transformers must not read the integers as weights."""
    import transformers

    saved(tmp_path, bert.quantize())
    with pytest.raises(ValueError, match="quant_method"):
        transformers.AutoModel.from_pretrained(tmp_path)
