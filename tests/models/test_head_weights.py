"""Tied decoders, resized vocabularies, copies, and initial weights of fresh heads."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import fastbert
from fastbert.models.auto import AutoModel
from fastbert.models.config import EncoderConfig
from tests.support.hf_models import FAMILY_NAMES
from tests.support.model_pairs import CASES, build, close, inputs_for, pair


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "eurobert"])
def test_decoder_is_tied(name):
    hf, model = pair(name, "ForMaskedLM")
    assert model.tied_weights() == dict(hf._tied_weights_keys)
    decoder = model.get_output_embeddings()
    assert decoder.weight is model.get_input_embeddings().weight
    for target, source in model.tied_weights().items():
        assert model.get_parameter(target) is model.get_parameter(source)
    # the table's gradient is the sum of the looked-up rows' and of the decoder's
    inputs = inputs_for(name, "ForMaskedLM")
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, 0] = 100
    model.zero_grad()
    model(**inputs, labels=labels).loss.backward()
    assert decoder.weight.grad.abs().sum(1).gt(0).sum() > inputs["input_ids"].unique().numel()


@pytest.mark.parametrize("name", ["bert", "electra", "roberta", "eurobert"])
def test_untied_decoder(name):
    hf, model = build(name, "ForMaskedLM", tie_word_embeddings=False)
    assert model.tied_weights() == {}
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    inputs = inputs_for(name, "ForMaskedLM")
    kept = inputs["attention_mask"].bool()
    with torch.no_grad():
        close(model(**inputs).logits[kept], hf(**inputs).logits[kept])


def test_set_output_embeddings():
    _, model = build("bert", "ForMaskedLM")
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        model.set_output_embeddings(torch.nn.Linear(48, 120))
    _, model = build("bert", "ForMaskedLM", tie_word_embeddings=False)
    decoder = torch.nn.Linear(48, 120)
    model.set_output_embeddings(decoder)
    assert model.get_output_embeddings() is decoder
    assert model.cls.predictions.bias is decoder.bias
    assert pair("bert", "ForTokenClassification")[1].get_output_embeddings() is None


def test_tables_that_do_not_fit_are_named():
    model = fastbert.BertModel(fastbert.EncoderConfig(num_hidden_layers=1, vocab_size=120))
    words = r"new_num_tokens: expected an integer from 1 to 16777216, got 10{12}$"
    with pytest.raises(ValueError, match=words):
        model.resize_token_embeddings(10**12)
    with pytest.raises(TypeError, match=r"value: expected a torch\.nn\.Embedding, got int"):
        model.set_input_embeddings(5)
    with pytest.raises(ValueError, match="value: expected rows of 768 numbers, got 5"):
        model.set_input_embeddings(torch.nn.Embedding(120, 5))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["bert", "electra", "albert", "distilbert", "mpnet"])
def test_resize_token_embeddings(name, tied, tmp_path):
    _, model = build(name, "ForMaskedLM", tie_word_embeddings=tied)
    inputs = inputs_for(name, "ForMaskedLM")
    before = model(**inputs).logits
    table = model.resize_token_embeddings(130)
    assert table is model.get_input_embeddings()
    assert (table.num_embeddings, model.get_output_embeddings().out_features, model.config.vocab_size) == (
        130,
    ) * 3
    assert 0 < table.weight[120:].std() < 0.04
    after = model(**inputs).logits
    assert after.shape[-1] == 130
    close(after[..., :120], before, 1e-6)
    inputs["input_ids"][3, 3] = 129
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[3, 3] = 128
    model(**inputs, labels=labels).loss.backward()
    assert table.weight.grad[129].abs().max() > 0
    model.save_pretrained(tmp_path)
    again = fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    model.resize_token_embeddings(100, pad_to_multiple_of=64)
    assert table.num_embeddings == 128
    model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match="input_ids: token id"):
        model(**inputs)
    for name_, args in (("new_num_tokens", (0,)), ("pad_to_multiple_of", (8, 0)), ("pad_token_id", (1,))):
        if name_ != "pad_token_id" or model.config.pad_token_id == 1:
            with pytest.raises(ValueError, match=name_):
                model.resize_token_embeddings(*args)
    assert table.num_embeddings == 100


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mean", [True, False])
def test_new_rows_are_drawn_as_transformers_draws_them(mean, tied):
    models = build("bert", "ForMaskedLM", tie_word_embeddings=tied)
    for model in models:
        for owner in (model.cls.predictions, model.cls.predictions.decoder):
            owner.bias.data.copy_(torch.linspace(-1.0, 3.0, 120))
        model.resize_token_embeddings(125, pad_to_multiple_of=500, mean_resizing=mean)
    for key, theirs in models[0].state_dict().items():
        ours = models[1].get_parameter(key)
        close(ours[:120], theirs[:120], 1e-6)
        if mean or theirs.dim() == 1:
            close(ours, theirs, 1e-3)
        elif len(theirs) == 500:
            assert 0.9 < ours[120:].std() / theirs[120:].std() < 1.1, key
    with pytest.raises(TypeError, match="mean_resizing: expected True or False, got 1"):
        models[1].resize_token_embeddings(9, mean_resizing=1)


def test_new_rows_are_the_mean_where_the_old_ones_lie_in_a_plane():
    """Their covariance has no Cholesky factor then; a part of one would move the rows by about 0.03."""
    for model in build("bert", "ForMaskedLM"):
        table = model.get_input_embeddings().weight.data
        table.copy_(torch.linspace(-1000.0, 1000.0, len(table))[:, None].expand_as(table))
        model.resize_token_embeddings(len(table) + 3)
        new = model.get_input_embeddings().weight[-3:]
        close(new, torch.zeros_like(new), 1e-3)


@pytest.mark.parametrize("name", ["bert", "electra"])
def test_an_encoder_inside_cannot_leave_its_decoder_behind(name):
    _, model = build(name, "ForMaskedLM")
    with pytest.raises(ValueError, match=r"resize_token_embeddings: .* a part of a .*ForMaskedLM"):
        model.base_model.resize_token_embeddings(130)
    with pytest.raises(ValueError, match=r"set_input_embeddings: .* a part of a .*ForMaskedLM"):
        model.base_model.set_input_embeddings(torch.nn.Embedding(120, 48))
    _, model = build(name, "ForTokenClassification")
    assert model.base_model.resize_token_embeddings(130).num_embeddings == model.config.vocab_size == 130


def test_resize_of_a_model_without_decoder():
    config = EncoderConfig.from_hf(pair("bert", "ForMaskedLM")[0].config)
    for model in (AutoModel.from_config(config), fastbert.BertForTokenClassification(config)):
        size = config.vocab_size
        assert model.resize_token_embeddings() is model.get_input_embeddings()
        assert model.resize_token_embeddings(size + 3).weight.shape == (size + 3, 48)
        assert model(torch.tensor([[size + 2]]))[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "task"), [c for c in CASES if c[0] in ("bert", "xlm-roberta", "mpnet", "albert")]
)
def test_copies(name, task):
    _, model = pair(name, task)
    inputs = inputs_for(name, task)
    with torch.no_grad():
        expected = model(**inputs)[0]
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is type(model)
            assert len(list(twin.parameters())) == len(list(model.parameters()))  # tied ones are still one
            assert torch.equal(twin(**inputs)[0], expected)
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(model(**inputs)[0], expected)


@pytest.mark.parametrize("task", [task for name, task in CASES if name == "albert"])
def test_fresh_heads_are_initialised(task):
    theirs, ours = pair("albert", task)
    config = EncoderConfig.from_hf(theirs.config)
    config.initializer_range = 0.5
    torch.manual_seed(3)
    for key, parameter in type(ours)(config).named_parameters():
        if parameter.dim() > 1:
            assert 0.4 < parameter.std() < 0.6, key
        else:
            assert parameter.eq(
                1.0 if key.endswith("norm.weight") or "LayerNorm.weight" in key else 0.0
            ).all(), key
