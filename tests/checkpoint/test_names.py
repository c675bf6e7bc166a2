"""Every spelling of keys that HuggingFace wrote; heads that are missing or left over; tied weights."""

import logging
import re
import warnings

import pytest
import torch
import transformers
from safetensors.torch import load_file

import fastbert
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from tests.support.checkpoints import CONFIGS, assert_same_state, load, old_norms, theirs, write

# --- names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spell", "said"),
    [
        (old_norms, None),
        (lambda key: "bert." + key, None),
        (lambda key: "module." + key, r"keys without module\., which a wrapper"),
        (lambda key: "_orig_mod." + key, r"keys without _orig_mod\., "),
        (lambda key: "model." + key, r"keys without model\., "),
        (lambda key: "module._orig_mod." + old_norms(key), r"keys without module\._orig_mod\., "),
    ],
    ids=["gamma-beta", "prefix-twice", "data-parallel", "compiled", "lightning", "all-of-these"],
)
def test_old_and_wrapped_names(bert_mlm, tmp_path, spell, said):
    state = {spell(key): value for key, value in bert_mlm.state_dict().items() if key.startswith("bert.")}
    state |= {
        spell(key).removeprefix("bert."): v
        for key, v in bert_mlm.state_dict().items()
        if key.startswith("cls.")
    }
    state["bert.embeddings.position_ids"] = torch.arange(40)[None]
    state["embeddings.token_type_ids"] = torch.zeros(1, 40, dtype=torch.long)
    with warnings.catch_warnings(record=True, action="always") as told:
        assert_same_state(load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state)), bert_mlm)
    assert len(told) == (said is not None)
    assert said is None or re.search(said, str(told[0].message))


def test_a_head_inside_the_encoders_prefix_as_stock_reads_it(bert_mlm, tmp_path):
    """The masked-LM model was itself an attribute "bert" of what was saved."""
    state = {"bert." + key: value for key, value in bert_mlm.state_dict().items()}
    assert_same_state(load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state)), bert_mlm)
    assert_same_state(transformers.BertForMaskedLM.from_pretrained(tmp_path), bert_mlm)


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


@pytest.mark.parametrize("prefix", ["Bert", "Roberta", "Albert"])
def test_bare_encoder_without_pooler(prefix, tmp_path):
    model = theirs(f"{prefix}ForMaskedLM")
    model.save_pretrained(tmp_path / "a")
    ids = torch.arange(3, 9)[None]
    expected = transformers.AutoModel.from_pretrained(tmp_path / "a").eval()(ids).last_hidden_state
    for source, place in (("a", "b"), ("b", "c")):
        with pytest.warns(UserWarning, match="no pooler: pooler_output is None") as told:
            loaded = fastbert.AutoModel.from_pretrained(tmp_path / source)
        assert len(told) == 1
        output = loaded(ids)
        assert output.pooler_output is None
        assert torch.allclose(output.last_hidden_state, expected, atol=1e-4)
        loaded.save_pretrained(tmp_path / place)
    with warnings.catch_warnings(action="error"):
        fastbert.AutoModel.from_pretrained(tmp_path / "a", add_pooling_layer=False)
    with pytest.raises(CheckpointError, match=r"pooler\.[a-z.]*weight.*add_pooling_layer=False"):
        fastbert.AutoModel.from_pretrained(tmp_path / "a", add_pooling_layer=True)


# --- keys that no model has ---------------------------------------------------------------------------------

FIT = {"weight": torch.randn(48, 32), "bias": torch.randn(48)}
# the keys that TinyBERT's code adds to BERT's in general and in task distillation, in both of its versions
TINYBERT = {
    "general": ("BertForPreTraining", {f"fit_dense.{k}": v for k, v in FIT.items()}),
    "task": ("BertForSequenceClassification", {f"fit_dense.{k}": v for k, v in FIT.items()}),
    "per-layer": ("BertForPreTraining", {f"fit_denses.{i}.{k}": v for i in range(4) for k, v in FIT.items()}),
}


@pytest.mark.parametrize("wanted", ["own", "BertModel"])
@pytest.mark.parametrize("kind", TINYBERT)
def test_tinyberts_files(kind, wanted, tmp_path):
    name, aids = TINYBERT[kind]
    saved = theirs(name)
    # its config has no model_type and keys of its own
    config = {k: v for k, v in saved.config.to_dict().items() if k != "model_type"}
    config |= {"cell": {}, "emb_size": 32, "structure": [], "pre_trained": "", "training": ""}
    write(tmp_path, config, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save({**saved.state_dict(), **aids}, tmp_path / "pytorch_model.bin")
    wanted = name if wanted == "own" else wanted
    with pytest.warns(UserWarning, match=rf"left out, of the training alone: {next(iter(aids))}") as told:
        loaded, info = getattr(fastbert, wanted).from_pretrained(tmp_path, output_loading_info=True)
    assert len(told) == 1
    assert set(aids) <= info["unexpected_keys"]
    stock = getattr(transformers, wanted).from_pretrained(tmp_path)
    assert_same_state(loaded, stock)


def test_unknown_keys_are_left_out_only_by_request(bert_mlm, tmp_path):
    state = {**bert_mlm.state_dict(), "adapter.weight": torch.zeros(2)}
    write(tmp_path, bert_mlm.config, state)
    with pytest.raises(CheckpointError, match=r"unexpected keys: adapter\.weight; .*strict=False"):
        fastbert.BertForMaskedLM.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"left out, unknown: adapter\.weight") as told:
        model, info = fastbert.BertForMaskedLM.from_pretrained(
            tmp_path, strict=False, output_loading_info=True
        )
    assert len(told) == 1
    assert info["unexpected_keys"] == {"adapter.weight"}
    assert_same_state(model, bert_mlm)
    del state["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(CheckpointError, match=r"missing keys: bert\.encoder\.layer\.1\.output\.dense\.bias"):
        fastbert.BertForMaskedLM.from_pretrained(write(tmp_path, bert_mlm.config, state), strict=False)
    with pytest.raises(TypeError, match="strict: expected True or False, got 'no'"):
        fastbert.BertForMaskedLM.from_pretrained(tmp_path, strict="no")


# --- tied weights -------------------------------------------------------------------------------------------


def test_only_the_tied_copy_is_in_the_file(bert_mlm, tmp_path):
    state = bert_mlm.state_dict()
    del state["bert.embeddings.word_embeddings.weight"], state["cls.predictions.bias"]
    assert_same_state(load("BertForMaskedLM", write(tmp_path, bert_mlm.config, state)), bert_mlm)


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
