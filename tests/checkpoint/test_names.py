"""Every spelling of keys that HuggingFace wrote; heads that are missing or left over; tied weights."""

import logging
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file

from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from tests.support.checkpoints import CONFIGS, assert_same_state, empty, load, old_norms, theirs, write

# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spell",
    [
        old_norms,
        lambda key: "module." + key,
        lambda key: "_orig_mod." + key,
        lambda key: "module._orig_mod." + old_norms(key),
        lambda key: "bert." + key,
    ],
    ids=["gamma-beta", "data-parallel", "compiled", "all-of-these", "prefix-twice"],
)
def test_old_and_wrapped_names(bert_mlm, tmp_path, spell):
    state = {spell(key): value for key, value in bert_mlm.state_dict().items() if key.startswith("bert.")}
    state |= {
        spell(key).removeprefix("bert."): v
        for key, v in bert_mlm.state_dict().items()
        if key.startswith("cls.")
    }
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["embeddings.token_type_ids"] = torch.zeros(1, 40, dtype=torch.long)
    assert_same_state(load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state)), bert_mlm)


@pytest.mark.parametrize("name", [p + "Model" for p in CONFIGS])
def test_missing_and_extra_prefix(name, tmp_path):
    base = theirs(name)
    prefix = base.base_model_prefix + "."
    with_prefix = write(tmp_path / "a", base.config, {prefix + k: v for k, v in base.state_dict().items()})
    assert_same_state(load(name, with_prefix), base)

    head = name.removesuffix("Model") + "ForTokenClassification"
    base.save_pretrained(tmp_path / "b")  # keys without the prefix
    with pytest.warns(UserWarning, match=r"classifier\.weight, classifier\.bias: freshly"):
        model = load(head, tmp_path / "b")
    inside = {k: v for k, v in base.state_dict().items() if not k.startswith("pooler")}
    loaded = model.base_model.state_dict()
    assert set(loaded) == set(inside)
    assert all(torch.equal(loaded[key], inside[key]) for key in inside)


# --- heads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("BertForPreTraining", "BertModel"),
        ("RobertaForSequenceClassification", "RobertaForMaskedLM"),
        ("DistilBertForMaskedLM", "DistilBertModel"),
        ("DistilBertForSequenceClassification", "DistilBertForQuestionAnswering"),
        ("ElectraForPreTraining", "ElectraModel"),
        ("ElectraForMaskedLM", "ElectraForTokenClassification"),
        ("ElectraForMultipleChoice", "ElectraModel"),
        ("AlbertForPreTraining", "AlbertForQuestionAnswering"),
        ("MPNetModel", "MPNetForMaskedLM"),
        ("BertForNextSentencePrediction", "BertForSequenceClassification"),
    ],
)
def test_another_models_head_is_left_over_and_reported(stored, wanted, tmp_path, caplog):
    model = theirs(stored)
    model.save_pretrained(tmp_path)
    own = {"add_pooling_layer": False} if stored == "BertForPreTraining" else {}
    caplog.set_level(logging.INFO, logger="fastbert.checkpoint.load")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if "For" in wanted else "error", UserWarning)
        loaded = load(wanted, tmp_path, **own)
    report, state = loaded.load_report, loaded.state_dict()
    files = set(load_file(tmp_path / "model.safetensors"))
    wanted_keys = set(state) - set(loaded.tied_weights())
    if wanted.endswith("Model"):
        prefix = loaded.base_model_prefix + "."
        files = {key.removeprefix(prefix): key for key in files}
        assert set(report.unused) == {files[key] for key in set(files) - wanted_keys}
    else:
        prefixed = {
            k if k in wanted_keys or "For" in stored else f"{loaded.base_model_prefix}.{k}": k for k in files
        }
        assert set(report.unused) == {prefixed[key] for key in set(prefixed) - wanted_keys}
        assert set(report.missing) == wanted_keys - set(prefixed)
    assert report.unused
    assert report.unused[0] in caplog.text
    theirs_base = model.base_model.state_dict()
    assert all(torch.equal(value, theirs_base[key]) for key, value in loaded.base_model.state_dict().items())


def test_fresh_head_is_initialised_and_named_once(tmp_path):
    theirs("RobertaModel").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="freshly initialised") as record:
        model = load("RobertaForMaskedLM", tmp_path)
    (warning,) = record
    missing = [
        "lm_head.bias",
        "lm_head.dense.bias",
        "lm_head.dense.weight",
        "lm_head.layer_norm.bias",
        "lm_head.layer_norm.weight",
    ]
    assert sorted(model.load_report.missing) == missing
    assert all(key in str(warning.message) for key in missing)
    assert model.lm_head.layer_norm.weight.eq(1).all()
    assert model.lm_head.dense.bias.eq(0).all()
    assert 0.01 < model.lm_head.dense.weight.std() < 0.03
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    with pytest.raises(CheckpointError, match=r"missing keys: .*lm_head\.dense\.weight"):
        checkpoint.load_weights(empty("RobertaForMaskedLM", tmp_path), tmp_path, allow_missing_head=False)


def test_fresh_sentence_pair_head_beside_a_stored_lm_head(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="freshly initialised"):
        report = load("BertForPreTraining", tmp_path).load_report
    pooler = ["bert.pooler.dense.bias", "bert.pooler.dense.weight"]
    assert sorted(report.missing) == [*pooler, "cls.seq_relationship.bias", "cls.seq_relationship.weight"]


def test_bare_encoder_without_pooler(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    assert load("BertModel", tmp_path, add_pooling_layer=False).load_report.missing == []
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.weight.*add_pooling_layer=False"):
        load("BertModel", tmp_path)


# --- tied weights -------------------------------------------------------------------------------------------


def test_tied_copy_in_the_file(bert_mlm, tmp_path):
    state = bert_mlm.state_dict()  # decoder.weight and decoder.bias are in it, equal
    model = load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert model.cls.predictions.decoder.bias is model.cls.predictions.bias


def test_only_the_tied_copy_is_in_the_file(bert_mlm, tmp_path):
    state = bert_mlm.state_dict()
    del state["bert.embeddings.word_embeddings.weight"], state["cls.predictions.bias"]
    assert_same_state(load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state)), bert_mlm)


@pytest.mark.parametrize("key", ["cls.predictions.decoder.weight", "cls.predictions.decoder.bias"])
def test_tied_copy_that_differs_is_refused(bert_mlm, tmp_path, key):
    state = bert_mlm.state_dict()
    state[key] = state[key] + 1
    write(tmp_path, bert_mlm.config, state)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {key}: differs .*tie_word_embeddings"):
        load("BertForMaskedLM", tmp_path)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"])
def test_untied(name, tmp_path):
    model = theirs(name, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = load(name, tmp_path)
    assert_same_state(loaded, model)
    saving.save(loaded, tmp_path / "ours")
    assert_same_state(getattr(transformers, name).from_pretrained(tmp_path / "ours"), model)


def test_untied_but_one_bias_stored(tmp_path):  # older transformers tied the bias all the same
    model = theirs("BertForMaskedLM", tie_word_embeddings=False)
    state = model.state_dict()
    bias = state.pop("cls.predictions.decoder.bias")
    state["cls.predictions.bias"] = bias
    loaded = load("BertForMaskedLM", write(tmp_path, model.config, state))
    torch.testing.assert_close(loaded.cls.predictions.decoder.bias, bias, rtol=0, atol=0)


def test_untied_decoder_missing(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"decoder\.weight; config tie_word_embeddings is false"):
        load("BertForMaskedLM", tmp_path, tie_word_embeddings=False)
