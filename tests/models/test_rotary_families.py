"""The families whose layers all rotate alike: lengths, scaled positions, spellings of files and configs."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.layers.form import INNER_SITE, SITES
from fastbert.models.config import EncoderConfig
from tests.support.accelerated_models import same_gradients
from tests.support.hf_models import hf_model
from tests.support.model_pairs import (
    build,
    close,
    drops_as_its_module,
    kept_rows,
    native,
    ragged,
    same_packed_and_alone,
)

NAMES = ("nomic_bert", "gte", "jina_embeddings_v3", "eurobert")
LENGTHS = (1, 2, 17, 72, 73, 101)
PLAIN = {"rope_type": "default", "rope_theta": 1000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}
LINEAR = {"rope_type": "linear", "factor": 1.7, "rope_theta": 900.0}


@functools.cache
def both(name, scaled=None):
    """(transformers' model, ours) in float64 and in eval, made for 72 tokens."""
    config = (
        {}
        if scaled is None
        else {"rope_parameters": {"plain": PLAIN, "dynamic": DYNAMIC, "linear": LINEAR}[scaled]}
    )
    hf = hf_model(name, **config)
    return copy.deepcopy(hf).double(), native(hf).double()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_ragged_lengths(name):
    """Longer than the positions of the config too: no table limits them."""
    hf, model = both(name)
    inputs = ragged(LENGTHS)
    found = kept_rows(model, inputs)
    close(found, kept_rows(hf, inputs), 1e-9)
    same_packed_and_alone(model, inputs, found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scaled", ["linear", "dynamic"])
@torch.no_grad()
def test_scaled_positions(name, scaled):
    """Dynamic scaling begins after the trained length, by the longest text alone (vLLM#41236, #52665).

    transformers keeps the base of the longest batch yet, so the lengths ascend.
    """
    (hf, model), (_, plain) = both(name, scaled), both(name, "plain")
    for longest in (71, 72, 73, 101):
        inputs = ragged((longest, 9))
        found = kept_rows(model, inputs)
        close(found, kept_rows(hf, inputs), 1e-9)
        if scaled == "dynamic":
            assert torch.equal(found, kept_rows(plain, inputs)) == (longest <= 72)


@torch.no_grad()
def test_dropout_between_the_products_of_a_gated_block():
    """It has a call site of its own."""
    ids, site = ragged((9, 9))["input_ids"], 1 + SITES + INNER_SITE
    drops_as_its_module(copy.deepcopy(both("gte")[1]), ids, "layers.1.mlp.dropout", site)


@pytest.mark.parametrize("pooling", ["bos", "mean", "late"])
def test_classifier_of_each_pooling(pooling):
    hf, model = build("eurobert", "ForSequenceClassification", classifier_pooling=pooling, mlp_bias=True)
    hf, model, inputs = hf.double(), model.double(), ragged(LENGTHS)
    labels = torch.arange(len(LENGTHS)) % 5
    theirs, ours = (m(**inputs, labels=labels) for m in (hf, model))
    close(ours.logits, theirs.logits, 1e-9)
    theirs.loss.backward()
    ours.loss.backward()
    same_gradients(model, hf, 1e-9)


def test_tied_decoder_and_as_many_heads_of_keys():
    keys = {"tie_word_embeddings": True, "num_key_value_heads": 3, "attention_bias": True}
    hf, model = build("eurobert", "ForMaskedLM", **keys)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert model.base_model.layers[0].form.kv_heads is None
    inputs = ragged(LENGTHS)
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(model.double()(**inputs).logits[kept], hf.double()(**inputs).logits[kept], 1e-9)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        mask = inputs["attention_mask"]
        close(model(inputs_embeds=embeds, attention_mask=mask).logits, model(**inputs).logits, 1e-12)


@torch.no_grad()
def test_no_token_types():
    hf = hf_model("gte", type_vocab_size=0).double()
    inputs = ragged(LENGTHS)
    close(kept_rows(native(hf).double(), inputs), kept_rows(hf, inputs), 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_both_spellings(name, tmp_path):
    """transformers saves keys as the hub's code spells them, and reads ours."""
    hf, model = both(name)
    hf.save_pretrained(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    wanted = hf.state_dict()
    for found in (
        fastbert.AutoModel.from_pretrained(tmp_path / "theirs"),
        fastbert.AutoModel.from_pretrained(tmp_path / "ours"),
        transformers.AutoModel.from_pretrained(tmp_path / "ours", dtype=torch.float64),
    ):
        state = found.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], value) for key, value in wanted.items())


def test_packed_weight_with_wrong_rows_is_refused(tmp_path):
    both("nomic_bert")[0].save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    key = next(key for key in stored if key.endswith("attn.Wqkv.weight"))
    stored[key] = stored[key][:-1].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(
        fastbert.CheckpointError, match=r"Wqkv\.weight: expected a multiple of 3 rows, got 143"
    ):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_a_gate_of_another_size_is_refused_by_the_config_key(tmp_path):
    both("eurobert")[1].save_pretrained(tmp_path)
    message = r"gate_proj\.weight: shape \(80, 48\).* \(config intermediate_size says 64, the file has 80\)"
    with pytest.raises(fastbert.CheckpointError, match=message):
        fastbert.AutoModel.from_pretrained(tmp_path, intermediate_size=64)


@pytest.mark.parametrize("name", NAMES)
def test_older_spelling_of_the_config(name):
    usual = EncoderConfig(name, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    assert EncoderConfig(name, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0}) == usual
    assert EncoderConfig.from_dict(usual.to_dict()) == usual
    old = {"model_type": name, "rope_theta": 9.0, "rope_scaling": {"type": "dynamic", "factor": 3.0}}
    assert EncoderConfig.from_dict(old, rope_parameters=usual.rope_parameters) == usual
    theirs = transformers.AutoConfig.for_model(**usual.to_dict())
    assert theirs.rope_parameters == usual.rope_parameters


@pytest.mark.parametrize("name", NAMES)
def test_explain_names_the_executor(name):
    assert "executor cpu" in str(fastbert.explain(native(hf_model(name))))
