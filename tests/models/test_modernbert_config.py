"""ModernBERT's config in both spellings, and files that do or do not match it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import fastbert
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import batch, hf_model
from tests.support.model_pairs import close, kept_rows, native

SIZES = dict(
    hidden_size=48,
    num_attention_heads=3,
    num_hidden_layers=4,
    intermediate_size=64,
    vocab_size=120,
    pad_token_id=0,
)


OLD = dict(global_attn_every_n_layers=2, global_rope_theta=50000.0, local_rope_theta=700.0)
NEW = dict(
    layer_types=["full_attention", "sliding_attention"] * 2,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
    },
)


@pytest.mark.parametrize("spelling", [OLD, NEW, OLD | NEW], ids=["old", "new", "both"])
@torch.no_grad()
def test_spellings_of_the_config(spelling, tmp_path):
    """As transformers reads them (vllm-project/vllm#44040, keras-team/keras-hub#2518)."""
    hf = hf_model("modernbert", num_hidden_layers=4, local_attention=16, **NEW).double()
    hf.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written = {k: v for k, v in written.items() if k not in {*OLD, *NEW}} | spelling
    (tmp_path / "config.json").write_text(json.dumps(written))
    model = fastbert.AutoModel.from_pretrained(tmp_path, reference_compile=False)
    inputs = batch("modernbert")
    close(kept_rows(model, inputs), kept_rows(hf, inputs), 1e-9)
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {k: saved[k] for k in OLD | NEW} == OLD | NEW
    again = transformers.AutoModel.from_pretrained(tmp_path / "again", attn_implementation="eager")
    assert all(torch.equal(t, again.state_dict()[k]) for k, t in hf.state_dict().items())
    close(kept_rows(again, inputs), kept_rows(hf, inputs), 1e-12)


def test_layers_of_a_config():
    config = EncoderConfig("modernbert", **SIZES)
    assert config.layer_types == ["full_attention", *["sliding_attention"] * 2, "full_attention"]
    assert [config.window(i) for i in range(4)] == [None, (64, 64), (64, 64), None]
    assert [config.rotary(i).theta for i in range(4)] == [160000.0, 10000.0, 10000.0, 160000.0]
    assert EncoderConfig.from_dict(config.to_dict(), num_hidden_layers=5).window(4) == (64, 64)
    other = EncoderConfig("modernbert", **SIZES, layer_types=["sliding_attention"] * 3 + ["full_attention"])
    assert [other.window(i) for i in range(4)] == [(64, 64)] * 3 + [None]
    assert EncoderConfig.from_dict(other.to_dict()) == other
    without = EncoderConfig("modernbert", **SIZES, local_rope_theta=None)
    assert without.rotary(1).theta == EncoderConfig.from_dict(without.to_dict()).rotary(1).theta == 160000.0
    # As in the files of ModernBERT, ruri-v3 and mmBERT
    real = {"layer_norm_eps": 2e-5, "norm_eps": 1e-5, "position_embedding_type": "sans_pos"}
    for given in (real, dict(reversed(real.items()))):
        other = EncoderConfig("modernbert", **SIZES, **given, reference_compile=True)
        assert other.norm_eps == 1e-5
    irregular = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    for own in (
        config,
        EncoderConfig("modernbert", **SIZES, **irregular),
        EncoderConfig("modernbert", **SIZES, **NEW),
    ):
        for change in (irregular, OLD, NEW, {"global_rope_theta": 7.0}, {"local_rope_theta": 7.0}):
            other = EncoderConfig.from_dict(own.to_dict(), **change)
            assert {key: getattr(other, key) for key in change} == change
    for key in ("layer_norm_eps", "norm_eps"):
        assert EncoderConfig.from_dict(other.to_dict(), **{key: 3e-5}).norm_eps == 3e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {**NEW, "global_attn_every_n_layers": 4},
            "layer_types: .* differs from global_attn_every_n_layers = 4",
        ),
        ({**NEW, "local_rope_theta": 5.0}, r"local_rope_theta: 5\.0 differs from rope_theta = 700\.0"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked"]}, "layer_types: expected a list of"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types: expected one type per layer, 4, got 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling: rope_type 'yarn' is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
            r"rope_parameters\.full_attention: rope_type 'linear' is not supported",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
            r"rope_parameters\.full_attention: partial_rotary_factor is not supported",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters: expected objects full_attention and"),
        ({"global_rope_theta": 0}, "global_rope_theta: expected a finite number > 0"),
        ({"local_attention": -2}, "local_attention: expected an integer >= 0"),
        ({"num_attention_heads": 16}, "num_attention_heads: heads of 3 columns cannot be rotated"),
        ({"classifier_pooling": "max"}, "classifier_pooling: expected one of cls, mean"),
        ({"hidden_activation": "swiglu"}, "hidden_activation: unknown activation"),
        ({"classifier_activation": "x"}, "classifier_activation: unknown activation"),
        ({"norm_bias": 1}, "norm_bias: expected a boolean"),
        ({"fixed_heads": ["learned"] * 3}, "fixed_heads: expected None"),
        ({"is_decoder": True}, "modernbert is never causal"),
    ],
)
def test_bad_configs(given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        EncoderConfig("modernbert", **{**SIZES, **given})


def test_keys_that_do_not_match_are_refused(tmp_path):
    """Not loaded as random weights (embeddings-benchmark/mteb#1862)."""
    model = native(hf_model("modernbert"))
    state = model.state_dict()
    state["layers.0.attn.Wqkv.bias"] = torch.zeros(144)
    del state["layers.1.mlp.Wo.weight"]
    words = r"missing keys: layers\.1\.mlp\.Wo\.weight; unexpected keys: layers\.0\.attn\.Wqkv\.bias"
    with pytest.raises(fastbert.CheckpointError, match=words):
        fastbert.ModernBertModel.from_pretrained(None, config=model.config, state_dict=state)


def test_a_classifier_starts_from_the_masked_lm_head(tmp_path):
    hf_model("modernbert", transformers.AutoModelForMaskedLM).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"no weights for classifier\.weight, classifier\.bias: freshly"):
        model = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert all(
        torch.equal(model.state_dict()[k], t) for k, t in theirs.state_dict().items() if "classifier" not in k
    )
