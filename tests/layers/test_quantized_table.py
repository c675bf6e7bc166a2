"""Quantised tables of words, and the decoders that read them: functions, files, sizes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fastbert
from fastbert.compression.factorization import factorize
from fastbert.compression.size import size_of
from fastbert.layers import quantized_table, quantizing
from fastbert.layers.quantized import QuantizedLinear
from fastbert.layers.quantized_table import TiedDecoder
from fastbert.layers.quantizing import kinds_of
from fastbert.runtime import prepared
from tests.support.hf_models import FAMILY_NAMES, batch
from tests.support.quantized_models import alike, hidden, hook, ours

ROOT = Path(__file__).resolve().parents[2]
BITS = pytest.mark.parametrize("bits", ["int8", "int4"])


def floats_of(model, embeddings):
    """The float model whose table is what the quantised one holds."""
    full = copy.deepcopy(model)
    table = quantized_table.table_of(full)
    with torch.no_grad():
        table.weight.copy_(quantized_table.replacement(full, embeddings).dequantized())
    return full


# --- the table ----------------------------------------------------------------------------------------------


@BITS
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_computes_with_the_rounded_table(family, bits, tmp_path):
    full = ours(family)
    right = hidden(floats_of(full, bits))
    model = copy.deepcopy(full).quantize(None, embeddings=bits)
    assert kinds_of(model) == (None, bits)
    torch.testing.assert_close(hidden(model), right, rtol=1e-4, atol=1e-4)
    assert not torch.equal(hidden(model), hidden(full))
    assert model.num_parameters() == full.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == full.num_parameters(exclude_embeddings=True)
    assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert entry == {"format": "fastbert-int8", "embeddings": quantizing.EMBEDDINGS[bits]}
    loaded = fastbert.AutoModel.from_pretrained(tmp_path)
    assert kinds_of(loaded) == (None, bits)
    assert torch.equal(hidden(loaded), hidden(model))
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    assert sum(t.nbytes for t in stored.values()) == size_of(model).bytes == size_of(loaded).bytes
    width = full.config.embedding_width
    fewer = full.config.vocab_size * (4 * width - (width if bits == "int8" else (width + 1) // 2) - 4)
    assert size_of(model).bytes == size_of(full).bytes - fewer


@BITS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtypes(bert, bits, dtype, tmp_path):
    full, kept = hidden(bert), batch("bert")["attention_mask"].bool()
    before = copy.deepcopy(bert).to(dtype).quantize(embeddings=bits)
    after = copy.deepcopy(bert).quantize(embeddings=bits).to(dtype)
    for model in (before, after):
        assert model.dtype == model.embeddings.word_embeddings.dtype == dtype
        assert model.embeddings.word_embeddings.scale.dtype == torch.float32
        alike(hidden(model), full, kept, 0.98)
        model.save_pretrained(tmp_path / str(model is after))
        assert json.loads((tmp_path / str(model is after) / "config.json").read_text())["dtype"] in str(dtype)
        loaded = fastbert.AutoModel.from_pretrained(tmp_path / str(model is after))
        assert loaded.dtype == dtype
        assert torch.equal(hidden(loaded), hidden(model))
    rows = after.embeddings.word_embeddings(torch.tensor([[1, 2]]))
    assert (rows.shape, rows.dtype) == ((1, 2, 48), dtype)
    with torch.autocast("cpu", torch.bfloat16):
        alike(hidden(bert.quantize(embeddings=bits)), full, kept, 0.98)


def test_watched_tables_are_called(bert):
    expected, seen = hidden(bert.quantize(None, embeddings="int8")), []
    bert.embeddings.word_embeddings.register_forward_hook(lambda *a: seen.append(a))
    torch.testing.assert_close(hidden(bert), expected, rtol=1e-5, atol=1e-5)
    assert len(seen) == 1
    inputs = batch("bert")
    ids, rest = inputs["input_ids"], {k: v for k, v in inputs.items() if k != "input_ids"}
    with torch.no_grad():
        embeds = bert.embeddings.word_embeddings(ids)
        again = bert(inputs_embeds=embeds, **rest).last_hidden_state
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sweep
@BITS
def test_compile_full_graph(bert, bits):
    torch._dynamo.reset()
    bert.quantize(None, embeddings=bits)
    compiled = torch.compile(bert, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(**batch("bert")).last_hidden_state
    torch.testing.assert_close(found, hidden(bert), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_quantised_is_refused_by_name(bert):
    for change in (hook, lambda m: setattr(m, "max_norm", 1.0), lambda m: setattr(m, "sparse", True)):
        model = copy.deepcopy(bert)
        change(model.embeddings.word_embeddings)
        with pytest.raises(TypeError, match=r"^embeddings\.word_embeddings: expected a plain nn\.Embedding"):
            model.quantize("int8", embeddings="int8")
        assert kinds_of(model) == (None, None)
    with pytest.raises(TypeError, match=r"^embeddings\.word_embeddings: .*, got FactoredTable"):
        factorize(bert, 8).quantize("int8", embeddings="int8")
    bert.embeddings.word_embeddings.weight.data[3, 4] = float("inf")
    with pytest.raises(ValueError, match=r"^embeddings\.word_embeddings\.weight: holds NaN or infinity"):
        bert.quantize("int8", embeddings="int8")
    assert kinds_of(bert) == (None, None)


def test_the_vocabulary_is_changed_before_quantising(bert):
    bert.quantize(None, embeddings="int8")
    for method, value in (("resize_token_embeddings", 130), ("set_input_embeddings", nn.Embedding(9, 48))):
        with pytest.raises(ValueError, match=f"^{method}: the table of words is quantised"):
            getattr(bert, method)(value)
    with pytest.raises(ValueError, match=r"^model: expected a table of words in floating point"):
        fastbert.prune(bert, vocabulary=[*range(50)])


# --- decoders -----------------------------------------------------------------------------------------------


def logits_of(model):
    with torch.no_grad():
        return model(**batch(model.config.model_type)).logits


@BITS
@pytest.mark.parametrize(
    "family", ["bert", "roberta", "albert", "electra", "modernbert", "xlnet", "deberta-v2"]
)
def test_tied_decoders_multiply_by_the_table(family, bits, tmp_path):
    # DeBERTa-v3's head has no decoder
    family, *new = family.split("-new")
    options = {"legacy": False} if new else {}
    full = ours(family, "AutoModelForMaskedLM" if family != "xlnet" else "XLNetLMHeadModel", **options)
    model = copy.deepcopy(full).quantize(None, embeddings=bits)
    path = model.config.lm_head.decoder
    assert not path or isinstance(model.get_submodule(path), TiedDecoder)
    # The product of an 8-bit layer with the table's integers, and nothing but the table's bytes
    table, kept = model.get_input_embeddings(), batch(family)["attention_mask"].bool()
    x = torch.randn(5, table.embedding_dim, generator=torch.Generator().manual_seed(0))
    bias = full.get_output_embeddings().bias if path else full._word_bias()
    linear = nn.Linear(table.embedding_dim, table.num_embeddings, bias is not None)
    own = QuantizedLinear.from_linear(linear)
    own.weight, own.scale, own.bias = table.integers(), table.scale, bias
    with torch.no_grad():
        assert torch.equal(model.decode(x), own(x))
    found, right = logits_of(model), logits_of(floats_of(full, bits))
    scale = right[kept].abs().max()
    assert (found[kept] - right[kept]).abs().max() < 0.05 * scale
    assert size_of(model).bytes < size_of(full).bytes
    model.save_pretrained(tmp_path)
    assert f"{path}.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded), found)
    assert loaded.num_parameters() == full.num_parameters()
    labels = batch(family)["input_ids"].masked_fill(~kept, -100)
    with torch.no_grad():
        loss = model(**batch(family), labels=labels).loss
    assert loss.isfinite()


@BITS
@pytest.mark.parametrize("name", ["weight", "scale"])
@torch.no_grad()
def test_decoders_follow_the_integers(bits, name):
    model = ours("bert", "AutoModelForMaskedLM").quantize(None, embeddings=bits)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    before, held = model.decode(x), getattr(quantized_table.table_of(model), name)
    held.copy_(held.flip(0))
    after = model.decode(x)
    assert not torch.equal(after, before)
    prepared.clear(model)
    assert torch.equal(model.decode(x), after)


def test_untied_decoders_stay_in_floats():
    full = ours("bert", "AutoModelForMaskedLM", tie_word_embeddings=False)
    model = copy.deepcopy(full).quantize(None, embeddings="int8")
    assert type(model.get_output_embeddings()) is nn.Linear
    hooked = ours("bert", "AutoModelForMaskedLM")
    hook(hooked.get_output_embeddings())
    with pytest.raises(TypeError, match=r"^cls\.predictions\.decoder: expected a plain nn\.Linear"):
        hooked.quantize(None, embeddings="int8")


def test_a_decoder_of_two_matrices_is_refused():
    model = ours("mobilebert", "AutoModelForMaskedLM")
    with pytest.raises(ValueError, match=r"^embeddings: the decoder of MobileBertForMaskedLM reads"):
        model.quantize(embeddings="int8")
    assert kinds_of(model) == (None, None)
    assert kinds_of(ours("mobilebert").quantize(embeddings="int8")) == ("int8", "int8")


# --- MiniLM -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "embeddings", "megabytes", "least", "mean"),
    [
        ("int8", "int8", 25, 0.995, 0.998),
        ("int8", "int4", 18, 0.975, 0.99),
        ("int4", "int8", 19, 0.89, 0.955),
    ],
)
def test_minilm_is_small_and_keeps_its_direction(
    minilm, tmp_path, weights, embeddings, megabytes, least, mean
):
    sentences = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    encoder = fastbert.SentenceEncoder.from_pretrained(minilm, device="cpu")
    full = encoder.encode(sentences)
    encoder.quantize(weights, embeddings=embeddings)
    vectors = encoder.encode(sentences)
    cosines = (full * vectors).sum(1)
    assert cosines.min() >= least
    assert cosines.mean() >= mean
    encoder.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size <= megabytes * 1e6
    again = fastbert.SentenceEncoder.from_pretrained(tmp_path, device="cpu")
    assert np.array_equal(again.encode(sentences), vectors)
    assert f"{weights} layers, {embeddings} words" in repr(again)
