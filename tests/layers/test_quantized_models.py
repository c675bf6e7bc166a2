"""Quantised models: the fused paths, all other inputs and outputs, and how good MiniLM stays."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastbert.layers.attention import queries_keys_values
from fastbert.layers.dense_norm import dense_norm
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import part
from fastbert.layers.quantized import QuantizedLinear, is_quantized
from fastbert.runtime import dispatch, prepared
from fastbert.sentences.encoder import SentenceEncoder
from tests.support.hf_models import batch
from tests.support.quantized_models import alike, hidden, hook, ours

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()


# --- the fused paths ----------------------------------------------------------------------------------------


def qkv(layer, x):
    return queries_keys_values(layer.form, layer.parts(), x)


def test_watched_parts_are_called(bert):
    bert.quantize()
    expected, seen, layer = hidden(bert), [], bert.layer_list()[1]
    names = ["query", "key", "value", "attention_output", "intermediate", "output"]
    for which in names:
        dense = part(layer, getattr(layer.form.names, which))
        dense.register_forward_hook(lambda *a, which=which: seen.append(which))
    torch.testing.assert_close(hidden(bert), expected, rtol=2e-2, atol=2e-2)
    assert seen == names


def test_fused_and_called_parts_give_the_same(bert):
    """Bit-equal if the arithmetic is the same; if a bias moves into the norm, up to rounding."""
    bert.quantize()
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    fused, called = bert.layer_list()[0], copy.deepcopy(bert.layer_list()[0])
    for module in called.modules():
        if isinstance(module, QuantizedLinear):
            hook(module)
    with torch.no_grad():
        for a, b in zip(qkv(fused, x), qkv(called, x), strict=True):
            assert a.shape == (7, 3, 16)
            assert torch.equal(a, b)
        for activation in (None, "gelu", "gelu_tanh", "relu", "silu", "tanh"):
            a, b = (apply_linear(layer.intermediate.dense, x, activation) for layer in (fused, called))
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        outs, seed = [layer.attention.output for layer in (fused, called)], torch.tensor(5)
        a, b = (dense_norm(out.dense, out.LayerNorm, x, residual, 0.0, None, 0) for out in outs)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        # dropout in the norm's pass, and apart from it
        dense, norm = outs[0].dense, outs[0].LayerNorm
        a, b = (dense_norm(dense, norm, x, residual, 0.4, seed, 8, fuse) for fuse in (True, False))
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    plain = dense_norm(fused.attention.output.dense, nn.Identity(), x, residual, 0.0, None, 0)
    torch.testing.assert_close(plain, fused.attention.output.dense(x) + residual)


@pytest.mark.parametrize("missing", [("query",), ("key", "value"), ("query", "key", "value")], ids=str)
def test_query_key_and_value_without_a_bias(bert, missing):
    own = bert.layer_list()[0].attention.self
    with torch.no_grad():
        for path in ("query", "key", "value"):
            if path in missing:
                getattr(own, path).bias = None
    bert.quantize()
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    parts = [module(x).reshape(5, 3, 16) for module in (own.query, own.key, own.value)]
    for a, b in zip(qkv(bert.layer_list()[0], x), parts, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", ["load_state_dict", "copy", "half", "swap"])
def test_derived_weights_follow_the_integers(bert, change):
    bert.quantize()
    hidden(bert)
    assert ("int8", True) in prepared.remembered(bert)
    other = ours("bert", hidden_act="gelu")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.quantize()
    query = bert.layer_list()[0].attention.self.query
    if change == "load_state_dict":
        bert.load_state_dict(other.state_dict())
    elif change == "copy":
        query.weight.copy_(query.weight.neg())
    elif change == "half":
        bert.half()
    else:
        bert.layer_list()[0].attention.self.query = other.layer_list()[0].attention.self.key
    after = hidden(bert)
    prepared.clear(bert)
    assert torch.equal(hidden(bert), after)
    if change == "load_state_dict":
        assert torch.equal(after, hidden(other))


@pytest.mark.parametrize("backend", ["aten", "reference"])
def test_every_backend_gives_the_same_model(bert, backend):
    bert.quantize()
    expected = hidden(bert)
    with dispatch.use_backend(linear_int8=backend):
        torch.testing.assert_close(hidden(bert), expected, rtol=2e-2, atol=2e-2)


def test_inference_mode_and_no_grad_share_the_derived_weights(bert):
    bert.quantize()
    with torch.inference_mode():
        first = bert(**batch("bert")).last_hidden_state
    assert torch.equal(bert(**batch("bert")).last_hidden_state, first)


@pytest.mark.sweep
def test_compile_full_graph(bert):
    torch._dynamo.reset()
    bert.quantize()
    inputs = batch("bert")
    compiled = torch.compile(bert, fullgraph=True, dynamic=True, backend="aot_eager")
    for seqlen in (40, 23):
        cut = {k: v[:, :seqlen].contiguous() for k, v in inputs.items()}
        with torch.no_grad():
            torch.testing.assert_close(
                compiled(**cut).last_hidden_state, bert(**cut).last_hidden_state, rtol=2e-2, atol=2e-2
            )


# --- what else models do ------------------------------------------------------------------------------------


def test_outputs_masks_and_packed_input(bert):
    model, inputs = copy.deepcopy(bert).quantize(), batch("bert")
    kept = inputs["attention_mask"].bool()
    gates = torch.tensor([0.0, 1.0, 0.5])
    with torch.no_grad():
        asked = {"output_attentions": True, "output_hidden_states": True, "head_mask": gates}
        full, int8 = bert(**inputs, **asked), model(**inputs, **asked)
        assert len(int8.attentions) == 3
        assert len(int8.hidden_states) == 4
        for a, b in zip(int8.attentions, full.attentions, strict=True):
            assert (a - b).abs().max() < 0.15
            assert (a.sum(-1)[kept[:, None].expand(-1, 3, -1)] - 1).abs().max() < 1e-4
        for a, b in zip(int8.hidden_states[1:], full.hidden_states[1:], strict=True):
            alike(a, b, kept)
        assert torch.equal(int8.hidden_states[0], full.hidden_states[0])
        alike(int8.pooler_output, full.pooler_output, slice(None))
        assert not torch.equal(model(**inputs).last_hidden_state, int8.last_hidden_state), "the gates act"
        ones = model(**inputs, head_mask=torch.ones(3)).last_hidden_state
        torch.testing.assert_close(ones, hidden(model), rtol=1e-4, atol=1e-4)

        first = model(**inputs, first_token_only=True).last_hidden_state
        torch.testing.assert_close(first[:, 0], hidden(model)[:, 0], rtol=2e-2, atol=2e-2)

        ids, types = inputs["input_ids"][3], inputs["token_type_ids"][3]
        lengths = torch.tensor([0, 40], dtype=torch.int32)
        packed = model.forward_packed(ids, lengths, 40, types)
        alone = model(ids[None], token_type_ids=types[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone)


def test_resize_token_embeddings():
    model = ours("bert", "AutoModelForMaskedLM").quantize()
    inputs = batch("bert")
    with torch.no_grad():
        before = model(**inputs).logits
        model.resize_token_embeddings(130)
        after = model(**inputs).logits
    assert after.shape[-1] == 130
    assert torch.equal(after[..., :120], before)
    assert not any(p.requires_grad for p in model.parameters())
    assert model(inputs["input_ids"] + 9).logits.shape[-1] == 130  # the new rows, with gradients enabled


@pytest.mark.parametrize(
    "cls",
    [
        "AutoModelForMaskedLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForNextSentencePrediction",
        "AutoModelForPreTraining",
    ],
)
def test_heads_quantise_their_encoder(cls):
    full = ours("bert", cls)
    model = copy.deepcopy(full).quantize()
    assert type(model) is type(full)
    int8 = {n for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(int8) == 18
    assert all(n.startswith("bert.encoder.layer.") for n in int8)
    inputs = batch("bert")
    inputs["attention_mask"][1] = 1
    with torch.no_grad():
        a, b = model(**inputs, return_dict=False)[0], full(**inputs, return_dict=False)[0]
    assert a.shape == b.shape
    scale = b[b.abs() < 1e4].abs().max()
    assert ((a - b).abs()[b.abs() < 1e4] < 0.2 * scale).all()
    assert not torch.equal(a, b)


def test_quantising_the_encoder_of_a_head():
    model = ours("bert", "AutoModelForSequenceClassification")
    assert model.base_model.quantize() is model.base_model
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()


# --- how good it is -----------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_of_minilm_keep_their_direction(minilm, pooling, capsys):
    """All 285 real sentences have a cosine of at least 0.995 with float32."""
    assert len(SENTENCES) >= 100
    encoder = SentenceEncoder.from_pretrained(minilm, device="cpu", pooling=pooling)
    full = encoder.encode(SENTENCES)
    assert encoder.quantize("int8") is encoder
    assert is_quantized(encoder.model)
    int8 = encoder.encode(SENTENCES)
    cosines = (full * int8).sum(1) / np.linalg.norm(full, axis=1) / np.linalg.norm(int8, axis=1)
    with capsys.disabled():
        print(f"\nMiniLM int8, {pooling}: cosine min {cosines.min():.4f}, mean {cosines.mean():.5f}")
    assert cosines.min() >= 0.995
    assert cosines.mean() >= 0.998
    assert not np.array_equal(full, int8)


@pytest.mark.sweep
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_smoothing_halves_the_loss_of_minilm(minilm, pooling, capsys):
    """Calibrated on half of the real sentences, measured on the other half."""
    calibrate, others = SENTENCES[::2], SENTENCES[1::2]
    full, plain, smooth = (
        SentenceEncoder.from_pretrained(minilm, device="cpu", pooling=pooling) for _ in range(3)
    )
    plain.quantize("int8")
    smooth.quantize("int8", smooth=0.5, calibrate=calibrate)
    x, *rest = (each.encode(others) for each in (full, plain, smooth))
    lost = [1 - ((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).mean() for y in rest]
    with capsys.disabled():
        print(f"\nMiniLM int8, {pooling}: 1 - cosine {lost[0]:.2e}, smoothed {lost[1]:.2e}")
    assert lost[1] < 0.6 * lost[0]
