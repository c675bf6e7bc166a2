"""Weights of 4 bits: their integers, their files, and training for them."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file

import fastbert
from fastbert.checkpoint.files import CheckpointError
from fastbert.compression import qat
from fastbert.compression.size import size_of
from fastbert.layers import int4, quantizing
from fastbert.layers.quantized import QuantizedLinear
from fastbert.layers.quantizing import kinds_of
from tests.support.hf_models import batch
from tests.support.quantized_models import cosine, hidden, ours


@pytest.mark.parametrize("width", [1, 31, 32, 33, 100])
def test_weights_of_4_bits_are_weights_of_8(width):
    weight = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    weight[2] = 0
    weight[3] *= 1e3
    integers, scale = int4.rounded(weight)
    assert integers.dtype == torch.int8
    assert integers.abs().amax() <= 126
    q, factors = int4.packed(integers)
    assert (q.dtype, q.shape) == (torch.uint8, (9, (width + 1) // 2))
    assert factors.shape == (9, (width + 31) // 32)
    assert q.nbytes + factors.nbytes == int4.bytes_of(9, width)
    assert torch.equal(int4.unpacked(q, factors, width), integers)
    # No element is further than half a step of the smallest factor that reaches the group's largest
    error = (integers * scale[:, None] - weight).square()
    for group in range(0, width, 32):
        columns = slice(group, group + 32)
        step = weight[:, columns].abs().amax(1) / 7 + scale
        bound = min(32, width - group) * (step / 2).square()
        assert (error[:, columns].sum(1) <= bound * 1.0001).all()
    with pytest.raises(ValueError, match="4 bits times a factor"):
        int4.packed(torch.full((1, 32), 127, dtype=torch.int8))


def test_4_bits_are_no_worse_than_with_scales_in_floats():
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    integers, scale = int4.rounded(weight)
    groups = weight.unflatten(1, (-1, 32))
    step = groups.abs().amax(2, keepdim=True) / 7
    naive = (groups / step).round() * step - groups
    assert (integers * scale[:, None] - weight).square().sum() < naive.square().sum()


@pytest.mark.parametrize("family", ["bert", "modernbert", "albert"])
def test_int4_files_run_as_int8(family, tmp_path):
    full = ours(family)
    model = copy.deepcopy(full).quantize("int4", embeddings="int4")
    kept = batch(family)["attention_mask"].bool()
    assert cosine(hidden(model)[kept], hidden(full)[kept]).mean() > 0.8
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(t.nbytes for t in stored.values()) == size_of(model).bytes
    linear = next(n for n, m in model.named_modules() if isinstance(m, QuantizedLinear))
    assert stored[f"{linear}.weight"].dtype == stored[f"{linear}.group"].dtype == torch.uint8
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert kinds_of(loaded) == ("int4", "int4")
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in model.state_dict().items())
    assert torch.equal(hidden(loaded), hidden(model))
    loaded.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert stored.keys() == again.keys()
    assert all(torch.equal(again[k], v) for k, v in stored.items())


def test_training_for_4_bits_computes_what_inference_does(bert):
    model = qat.prepare(bert, weights=4, embeddings=4)
    with torch.no_grad():
        expected = model.eval()(**batch("bert")).last_hidden_state
    found = hidden(qat.convert(copy.deepcopy(model)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_bad_files_of_4_bits(bert, tmp_path):
    bert.quantize("int4")
    bert.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    state, key = load_file(tmp_path / "model.safetensors"), "encoder.layer.0.output.dense"
    loading = fastbert.EncoderConfig.from_dict(config)
    for change, message in (
        ({f"{key}.group": None}, rf"{key}\.weight: 4 bits .* {key}\.group is missing"),
        ({f"{key}.group": torch.zeros(48, 3, dtype=torch.uint8)}, rf"{key}\.group: expected factors from 1"),
        ({f"{key}.group": torch.ones(48, 2, dtype=torch.uint8)}, rf"{key}\.group: expected uint8"),
        ({"embeddings.LayerNorm.group": torch.ones(1)}, r"unexpected keys: embeddings\.LayerNorm\.group"),
    ):
        changed = {k: v for k, v in {**state, **change}.items() if v is not None}
        with pytest.raises(CheckpointError, match=message):
            fastbert.AutoModel.from_pretrained(None, config=loading, state_dict=changed)
    loading = fastbert.EncoderConfig.from_dict({**config, "quantization_config": quantizing.CONFIG})
    with pytest.raises(CheckpointError, match=r"\.group: expected no `group`"):
        fastbert.AutoModel.from_pretrained(None, config=loading, state_dict=state)
    bert.layer_list()[0].output.dense.weight.fill_(127)
    with pytest.raises(CheckpointError, match=r"output\.dense\.weight: expected integers of 4 bits"):
        bert.save_pretrained(tmp_path)
