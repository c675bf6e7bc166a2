"""Checkpoints: every layout and spelling HuggingFace wrote, both ways, and saves that lose nothing."""

import functools
import itertools
import json
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.checkpoint import files, hub
from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
}
DISTIL = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "hidden_dim": 48,
    "vocab_size": 61,
    "max_position_embeddings": 40,
}
# class prefix -> config; sizes that differ from each other, so that a swapped axis shows
CONFIGS = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "XLMRoberta": SIZES,
    "Camembert": SIZES,
    "DistilBert": DISTIL,
    "Electra": {**SIZES, "embedding_size": 16},
    "Albert": {**SIZES, "embedding_size": 16, "num_hidden_groups": 2, "inner_group_num": 2},
    "Ernie": SIZES,
    "MPNet": SIZES,
}
TASKS = ("Model", "ForPreTraining", "ForMaskedLM", "ForNextSentencePrediction", "ForSequenceClassification",
         "ForMultipleChoice", "ForTokenClassification", "ForQuestionAnswering")  # fmt: skip
# ELECTRA's discriminator is not among our tasks; its keys are tested as left-over ones.
NAMES = [
    prefix + task
    for prefix in CONFIGS
    for task in TASKS
    if hasattr(transformers, prefix + task) and prefix + task != "ElectraForPreTraining"
]


def ours(name):
    """Our class of HuggingFace's name."""
    return getattr(fastbert, name)


def split_name(name):
    prefix = next(p for p in sorted(CONFIGS, key=len, reverse=True) if name.startswith(p))
    return prefix, name[len(prefix) :]


def randomise(model, seed=0):
    """No two parameters alike, and none at its default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model.eval()


def theirs(name, **overrides):
    """A randomised transformers model of one of `NAMES`."""
    prefix, _ = split_name(name)
    config = getattr(transformers, prefix + "Config")(**{**CONFIGS[prefix], **overrides})
    return randomise(getattr(transformers, name)(config))


def empty(name, directory, dtype=torch.float32, device="meta", **overrides):
    """Our model of the directory's config, without its weights."""
    own = {k: overrides.pop(k) for k in ("add_pooling_layer",) if k in overrides}
    config = EncoderConfig.from_pretrained(directory, **overrides)
    with torch.device(device):
        return ours(name)(config, **own).to(dtype)


def load(name, directory, **overrides):
    model = empty(name, directory, **overrides)
    model.load_report = checkpoint.load_weights(model, directory)
    return model


def assert_same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert set(a) == set(b)
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def write(directory, config, state):
    """A checkpoint directory from a plain dictionary of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.clone().contiguous() for k, v in state.items()},
        directory / "model.safetensors",
        {"format": "pt"},
    )
    return directory


@pytest.fixture
def bert_mlm():
    return theirs("BertForMaskedLM")


# --- both ways, every family and head -----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_saved_by_transformers_loads_here(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load(name, tmp_path)
    assert_same_state(loaded, model)
    assert loaded.load_report.missing == loaded.load_report.unused == []
    assert all(param.requires_grad and not param.is_meta for param in loaded.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_saved_here_loads_in_transformers(name, tmp_path):
    prefix, task = split_name(name)
    num_labels = 3 if task in ("ForSequenceClassification", "ForTokenClassification") else 2
    model_type = next(family.model_type for family in FAMILIES.values() if family.class_prefix == prefix)
    config = EncoderConfig(model_type, **CONFIGS[prefix], num_labels=num_labels)
    model = randomise(ours(name)(config))
    saving.save(model, tmp_path)

    loaded, info = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(loaded, model)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["architectures"] == [name]
    assert stored["dtype"] == "float32"
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is getattr(transformers, prefix + "Config")
    with safe_open(tmp_path / "model.safetensors", "pt") as reader:
        assert not set(reader.keys()) & set(model.tied_weights())
        assert reader.metadata()["format"] == "pt"


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForSequenceClassification", "AlbertModel"])
def test_round_trip_keeps_config(name, tmp_path):
    model = theirs(name, num_labels=5, hidden_dropout_prob=0.25)
    model.config.our_own_key = {"kept": [1, 2]}
    model.save_pretrained(tmp_path / "a")
    before = json.loads((tmp_path / "a" / "config.json").read_text())
    saving.save(load(name, tmp_path / "a"), tmp_path / "b")
    after = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {key: after.get(key) for key in before} == before


def test_from_pretrained_and_save_pretrained(tmp_path):
    theirs("DistilBertForMaskedLM").save_pretrained(tmp_path / "a")
    model = ours("DistilBertForMaskedLM").from_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    assert_same_state(model, transformers.DistilBertForMaskedLM.from_pretrained(tmp_path / "b"))
    assert model.vocab_projector.weight is model.distilbert.embeddings.word_embeddings.weight
    assert not model.training


def test_fresh_head_from_pretrained_is_initialised(tmp_path):
    theirs("BertModel").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"classifier\.weight.*freshly initialised"):
        model = ours("BertForSequenceClassification").from_pretrained(tmp_path, num_labels=3)
    assert model.classifier.bias.eq(0).all()
    assert 0 < model.classifier.weight.std() < 0.1


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BertForPreTraining", "AlbertForMaskedLM"])
def test_shards_of_transformers(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = load(name, tmp_path)
    assert_same_state(loaded, model)
    assert len(loaded.load_report.files) > 2


def test_our_shards_load_in_transformers(tmp_path):
    model = randomise(ours("BertForMaskedLM")(EncoderConfig("bert", **SIZES)))
    files = saving.save(model, tmp_path, max_shard_size="20KB")
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    loaded, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_state(loaded, model)
    assert_same_state(load("BertForMaskedLM", tmp_path), model)


@pytest.mark.parametrize("zip_format", [True, False], ids=["zip", "older-than-1.6"])
def test_bin(bert_mlm, tmp_path, zip_format):
    bert_mlm.config.save_pretrained(tmp_path)
    torch.save(
        bert_mlm.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zip_format
    )
    assert_same_state(load("BertForMaskedLM", tmp_path), bert_mlm)  # holds the tied decoder too


def test_sharded_bin(bert_mlm, tmp_path):
    bert_mlm.config.save_pretrained(tmp_path)
    state = list(bert_mlm.state_dict().items())
    names = [f"pytorch_model-{i}-of-2.bin" for i in (1, 2)]
    halves = state[:20], state[20:]
    for name, half in zip(names, halves, strict=True):
        torch.save(dict(half), tmp_path / name)
    weight_map = {key: name for name, half in zip(names, halves, strict=True) for key, _ in half}
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_same_state(load("BertForMaskedLM", tmp_path), bert_mlm)


def test_safetensors_stand_before_bin(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert_same_state(load("BertForMaskedLM", tmp_path), bert_mlm)


def test_loaded_weights_do_not_hang_on_the_file(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    model = load("BertForMaskedLM", tmp_path)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as handle:  # in place, as a mapping would see it
        handle.write(bytes(file.stat().st_size))
    assert_same_state(model, bert_mlm)


def test_links_into_a_cache(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(file)
    assert_same_state(load("BertForMaskedLM", tmp_path / "snapshot"), bert_mlm)


# --- names --------------------------------------------------------------------------------------------------


def old_norms(key):
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


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
    missing = ["lm_head.bias", "lm_head.dense.bias", "lm_head.dense.weight", "lm_head.layer_norm.bias",
               "lm_head.layer_norm.weight"]  # fmt: skip
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


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(stored, wanted, tmp_path):
    model = theirs("BertModel").to(stored)
    model.save_pretrained(tmp_path)
    assert_same_state(load("BertModel", tmp_path, dtype=wanted), model.to(wanted))
    assert checkpoint.stored_dtype(tmp_path) == stored


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("wanted", [torch.bfloat16, "float64", "auto"])
def test_both_spellings_of_dtype_are_obeyed(key, wanted, tmp_path):
    theirs("BertModel").to(torch.float16).save_pretrained(tmp_path)
    model = fastbert.BertModel.from_pretrained(tmp_path, **{key: wanted})
    expected = {"auto": torch.float16, "float64": torch.float64}.get(wanted, wanted)
    assert {p.dtype for p in model.parameters()} == {expected}


@pytest.mark.parametrize("value", [7e4, -7e4])
@pytest.mark.parametrize("place", [0, -1])
def test_a_value_too_large_for_the_models_dtype_is_refused(value, place, bert_mlm, tmp_path):
    state = bert_mlm.state_dict()
    state["bert.encoder.layer.1.output.LayerNorm.bias"][place] = value
    write(tmp_path, bert_mlm.config, state)
    words = r"layer\.1\.output\.LayerNorm\.bias.*: 7e\+04 is too large for torch\.float16"
    with pytest.raises(CheckpointError, match=words):
        load("BertForMaskedLM", tmp_path, dtype=torch.float16)
    load("BertForMaskedLM", tmp_path, dtype=torch.bfloat16)


def test_into_a_live_model_in_place(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    model = empty("BertForMaskedLM", tmp_path, device="cpu")
    model.bert.embeddings.requires_grad_(False)
    before = {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()}
    checkpoint.load_weights(model, tmp_path)
    assert {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()} == before
    assert_same_state(model, bert_mlm)


def test_meta_keeps_requires_grad(bert_mlm, tmp_path):
    bert_mlm.save_pretrained(tmp_path)
    model = empty("BertForMaskedLM", tmp_path)
    model.bert.embeddings.requires_grad_(False)
    checkpoint.load_weights(model, tmp_path)
    assert {k for k, p in model.named_parameters() if not p.requires_grad} == {
        k for k, _ in model.named_parameters() if k.startswith("bert.embeddings.")
    }


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_changed_when_refused(device, bert_mlm, tmp_path):
    state = bert_mlm.state_dict()
    state["bert.encoder.layer.2.output.LayerNorm.bias"][3] = float("nan")  # among the last
    write(tmp_path, bert_mlm.config, state)
    model = empty("BertForMaskedLM", tmp_path, device=device)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"layer\.2\.output\.LayerNorm\.bias: holds NaN"):
        checkpoint.load_weights(model, tmp_path)
    for key, value in model.state_dict().items():
        assert value.is_meta if device == "meta" else torch.equal(value, before[key])


# --- saving -------------------------------------------------------------------------------------------------


def test_save_of_views_and_shared_storage(tmp_path):
    model = randomise(ours("BertModel")(EncoderConfig("bert", **SIZES)))
    storage = torch.randn(32 * 32 + 32)
    one, two, three = (layer.attention.self for layer in model.encoder.layer)
    one.query.weight = torch.nn.Parameter(torch.randn(32, 32).t())  # not contiguous
    two.query.weight = torch.nn.Parameter(storage[:1024].view(32, 32))  # two that overlap
    two.key.weight = torch.nn.Parameter(storage[32:].view(32, 32))
    three.key.weight = three.query.weight  # one parameter under two names
    saving.save(model, tmp_path)
    assert_same_state(load("BertModel", tmp_path), model)
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * 4 * sum(
        v.numel() for v in model.state_dict().values()
    )


def test_save_refuses_what_could_not_be_loaded(tmp_path):
    model = randomise(ours("BertModel")(EncoderConfig("bert", **SIZES)))
    saving.save(model, tmp_path)
    with torch.no_grad():
        model.pooler.dense.bias[0] = float("inf")
    with pytest.raises(CheckpointError, match=r"pooler\.dense\.bias: holds NaN or infinity"):
        saving.save(model, tmp_path)
    load("BertModel", tmp_path)
    with torch.device("meta"):
        model = ours("BertModel")(EncoderConfig("bert", **SIZES))
    with pytest.raises(CheckpointError, match=r"word_embeddings\.weight: is on the meta device"):
        saving.save(model, tmp_path)
    for size in ("5 parsecs", 0, "-3GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            saving.save(model, tmp_path, max_shard_size=size)


def two_models():
    """The same sizes, other weights, and other values of a key that is mathematics and of two others."""
    return [
        randomise(
            ours("BertModel")(
                EncoderConfig(
                    "bert", **SIZES, hidden_dropout_prob=seed / 10, layer_norm_eps=eps,
                    id2label={0: f"no {seed}", 1: f"yes {seed}"},
                )
            ),
            seed,
        )
        for seed, eps in ((1, 1e-12), (2, 1e-3))
    ]  # fmt: skip


def is_checkpoint_of(directory, model):
    """Config and weights are this model's; raises where the directory does not load at all."""
    loaded = ours("BertModel").from_pretrained(directory)
    same = all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), model.state_dict().values(), strict=True)
    )
    for key in ("hidden_dropout_prob", "layer_norm_eps", "id2label"):  # never half and half
        assert same == (getattr(loaded.config, key) == getattr(model.config, key)), key
    return same


LAYOUTS = {"single": "5GB", "shards": "60KB"}


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_save_over_another_layout(first, second, tmp_path):
    old, new = two_models()
    saving.save(old, tmp_path, max_shard_size=LAYOUTS[first])
    (tmp_path / "tokenizer.json").write_text("{}")
    files = saving.save(new, tmp_path, max_shard_size=LAYOUTS[second])
    assert is_checkpoint_of(tmp_path, new)
    assert_same_state(transformers.BertModel.from_pretrained(tmp_path), new)
    assert {file.stat().st_mode for file in files} == {(tmp_path / "tokenizer.json").stat().st_mode}
    names = {file.name for file in files} | {"config.json", "tokenizer.json"}
    assert {p.name for p in tmp_path.iterdir()} == names | (
        {"model.safetensors.index.json"} if len(files) > 1 else set()
    )


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", [None, *LAYOUTS])
def test_every_failing_step_of_a_save_leaves_one_whole_checkpoint(first, second, tmp_path, monkeypatch):
    old, new = two_models()
    calls = fail_at = 0
    flush = False  # of a folder: a failure there is passed over

    def failing(function):
        def wrapper(*args, **kwargs):
            nonlocal calls, flush
            calls += 1
            if calls == fail_at:
                flush = function is fsync and stat.S_ISDIR(os.fstat(*args).st_mode)
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return wrapper

    fsync = os.fsync
    for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (saving, "_write_safetensors")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    outcomes = []
    for step in range(1, 100):
        directory = tmp_path / str(step)
        calls, fail_at = 0, -1
        directory.mkdir()
        if first is not None:
            saving.save(old, directory, max_shard_size=LAYOUTS[first])
        calls, fail_at, flush = 0, step, False
        try:
            saving.save(new, directory, max_shard_size=LAYOUTS[second])
        except CheckpointError as error:
            assert "No space left on device" in str(error)  # noqa: PT017 - not every step's failure is raised
            assert list(directory.iterdir()) == [] if first is None else is_checkpoint_of(directory, old)
            outcomes.append("old")
        else:
            assert is_checkpoint_of(directory, new)
            if not flush:
                outcomes.append("new")
        if calls < fail_at:  # no step was left to fail
            break
    assert outcomes[-1] == "new"
    assert outcomes.count("old") >= (5 if second == "single" else 10)
    assert outcomes == sorted(outcomes, reverse=True)  # one moment at which it becomes the new one


def states_of_a_save(directory, target, save, monkeypatch):
    """Copies of the directory as a kill before each call that changes a name leaves it, and the last."""
    states = []

    def snapshot(*_):
        copy = target / str(len(states))
        shutil.copytree(directory, copy, symlinks=True)
        for folder in copy.glob(".saving-*"):  # whose process is dead
            folder.rename(folder.with_suffix(".4194305"))  # above the largest process id
        states.append(copy)

    def watched(function):
        def wrapper(*args, **kwargs):
            snapshot()
            return function(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for owner, name in ((os, "replace"), (os, "unlink"), (Path, "unlink"), (shutil, "rmtree")):
            patch.setattr(owner, name, watched(getattr(owner, name)))
        save()
    snapshot()
    return states


def save_as(kind, model, directory):
    """A checkpoint in one of our layouts, or as others write it."""
    if kind in LAYOUTS:
        saving.save(model, directory, max_shard_size=LAYOUTS[kind])
        return
    saving.save(model, directory)
    state = load_file(directory / "model.safetensors")
    if kind == "of others":
        save_file(state, directory / "model.safetensors", {"format": "pt"})
    else:
        (directory / "model.safetensors").unlink()
        torch.save(state, directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("first", "second"),
    [*itertools.product([None, *LAYOUTS], LAYOUTS), ("of others", "shards"), ("bin", "single")],
)
def test_every_state_that_a_kill_leaves_is_old_or_new(first, second, tmp_path, monkeypatch):
    old, new = two_models()
    directory = tmp_path / "live"
    directory.mkdir()
    if first is not None:
        save_as(first, old, directory)
    states = states_of_a_save(directory, tmp_path, lambda: save_as(second, new, directory), monkeypatch)
    assert len(states) >= 4
    renamed_config = 0
    outcomes = []
    for state in states:
        before = sorted(p.name for p in state.iterdir())
        renamed_config += (state / "config.json").exists() and any(state.glob(".saving-*/config.json.new"))
        if (
            first is None
            and "new" not in outcomes
            and not {"model.safetensors", "model.safetensors.index.json"} & set(before)
        ):
            with pytest.raises(
                CheckpointError, match=r"config\.json: (no such file|is of a save that was killed)"
            ):
                is_checkpoint_of(state, old)
            outcomes.append("old")
        else:
            outcomes.append("old" if is_checkpoint_of(state, old) else "new")
        assert sorted(p.name for p in state.iterdir()) == before  # reading changes nothing
    assert renamed_config  # the state between the two renames is among them
    assert outcomes[0] == "old"
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, reverse=True)
    whole = sorted(p.name for p in states[-1].iterdir())
    assert not any(name.startswith(".") for name in whole)
    for state in states:  # the next save cleans up
        if any(state.glob(".saving-*/config.json.new")):  # and a kill in that one is survived too
            save = functools.partial(save_as, "single", new, state)
            for later in states_of_a_save(state, tmp_path / f"after-{state.name}", save, monkeypatch):
                if first is not None:
                    is_checkpoint_of(later, old)
        else:
            save_as("single", new, state)
        assert is_checkpoint_of(state, new)
        left = {p.name for p in state.iterdir()} - {"pytorch_model.bin"}
        assert left == {"config.json", "model.safetensors"}


def test_a_kill_between_the_renames(tmp_path):
    """A real one, of a process of its own."""
    old, new = two_models()
    saving.save(old, tmp_path / "m")
    saving.save(new, tmp_path / "new")
    script = """
        import os, signal, sys
        from fastbert import BertModel
        replace = os.replace
        def last(source, target):
            if os.path.basename(target) == "model.safetensors":
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
        os.replace = last
        BertModel.from_pretrained(sys.argv[2]).save_pretrained(sys.argv[1])
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "m"), str(tmp_path / "new")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    new_config = (tmp_path / "new" / "config.json").read_bytes()
    assert (tmp_path / "m" / "config.json").read_bytes() == new_config  # killed in between indeed
    assert is_checkpoint_of(tmp_path / "m", old)
    saving.save(new, tmp_path / "m")
    assert is_checkpoint_of(tmp_path / "m", new)
    assert sorted(os.listdir(tmp_path / "m")) == ["config.json", "model.safetensors"]


def test_a_subfolder_in_which_a_save_was_killed(tmp_path, monkeypatch):
    """Its config too is the one of the weights."""
    old, new = two_models()
    saving.save(old, tmp_path / "live")
    states = states_of_a_save(
        tmp_path / "live", tmp_path / "states", lambda: saving.save(new, tmp_path / "live"), monkeypatch
    )
    renamed_too_early = 0
    for state in states:
        model = old if is_checkpoint_of(state, old) else new
        renamed_too_early += b"0.001" in (state / "config.json").read_bytes() and model is old
        config = EncoderConfig.from_pretrained(state.parent, subfolder=state.name)
        loaded = ours("BertModel").from_pretrained(state.parent, subfolder=state.name)
        assert config.layer_norm_eps == loaded.config.layer_norm_eps == model.config.layer_norm_eps
        assert_same_state(loaded, model)
    assert renamed_too_early


def test_the_config_is_put_back_where_even_that_failed(tmp_path, monkeypatch):
    """The weights cannot be renamed, and then the old config cannot either."""
    old, new = two_models()
    saving.save(old, tmp_path)
    replace, calls = os.replace, []

    def fails(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(CheckpointError, match="Input/output error"):
            saving.save(new, tmp_path)
    assert len(calls) == 3
    assert is_checkpoint_of(tmp_path, old)


def test_a_living_process_keeps_the_folder_of_its_save(tmp_path):
    old, _ = two_models()
    host = socket.gethostname()
    mine, others = f".saving-0.{host}.{os.getpid()}", f".saving-0.x{host}.4194305"
    dead = [f".saving-0.{host}.4194305", f".saving-0.{host}.{10**30}"]
    for name in (mine, others, *dead, f".saving-0.{host}.x"):
        (tmp_path / name).mkdir()
    saving.save(old, tmp_path)
    assert sorted(p.name for p in tmp_path.glob(".saving*")) == sorted((mine, others, f".saving-0.{host}.x"))


def test_a_save_that_ends_while_its_notes_are_read(tmp_path, monkeypatch):
    new = two_models()[1]
    saving.save(new, tmp_path)
    new_text = (tmp_path / "config.json").read_bytes()
    folder = tmp_path / f".saving-0.{socket.gethostname()}.{os.getpid()}"
    folder.mkdir()
    (folder / "config.json.old").write_bytes(b"{}")
    (folder / "config.json.new").write_bytes(new_text)

    def ends(directory):
        shutil.rmtree(folder)
        return "another config's"

    monkeypatch.setattr(files, "_config_digest", ends)
    assert files.config_of_weights(tmp_path) == b"{}"


def test_notes_of_a_save_long_past_count_for_nothing(tmp_path):
    """Another machine's save died between its renames; later ones, one of them with its config, did not."""
    old, new = two_models()
    saving.save(new, tmp_path)
    new_text = (tmp_path / "config.json").read_bytes()
    saving.save(old, tmp_path)
    folder = tmp_path / ".saving-0.elsewhere.1"
    folder.mkdir()
    (folder / "config.json.old").write_bytes((tmp_path / "config.json").read_bytes())
    (folder / "config.json.new").write_bytes(new_text)
    (folder / "model.safetensors").write_bytes(b"")
    assert is_checkpoint_of(tmp_path, old)
    saving.save(new, tmp_path)
    assert is_checkpoint_of(tmp_path, new)
    assert folder.exists()


# --- the config of the weights ------------------------------------------------------------------------------


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


MATHEMATICS = [
    (
        "BertModel",
        {},
        {"layer_norm_eps": 1e-5},
        "layer_norm_eps: config.json says 1e-05, .* saved with 1e-12",
    ),
    ("BertModel", {}, {"hidden_act": "relu"}, "hidden_act: config.json says 'relu', .* saved with 'gelu'"),
    ("BertModel", {}, {"num_attention_heads": 8}, "num_attention_heads: config.json says 8, .* with 4"),
    ("RobertaModel", {}, {"pad_token_id": 3}, "pad_token_id: config.json says 3, .* with 1"),
    ("AlbertModel", {}, {"num_hidden_layers": 5}, "num_hidden_layers: config.json says 5, .* with 3"),
    ("DistilBertModel", {}, {"n_heads": 8}, "n_heads: config.json says 8, .* with 4"),
    ("XLMRobertaModel", {}, {"model_type": "roberta"}, "model_type: config.json says 'roberta'"),
]


def test_weights_of_the_callers_own_take_any_config(tmp_path):
    """Nothing says with which config a state_dict was saved; a save says it of the one it is given."""
    model = saved(tmp_path)
    edit_config(tmp_path, layer_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match="does not belong"):
        ours("BertModel").from_pretrained(tmp_path)
    state = {key: value + 1 for key, value in model.state_dict().items()}
    loaded = ours("BertModel").from_pretrained(tmp_path, state_dict=state)
    assert loaded.config.layer_norm_eps == 1e-3
    model.save_pretrained(tmp_path / "given", state_dict=state)
    assert_same_state(loaded, ours("BertModel").from_pretrained(tmp_path / "given"))
    edit_config(tmp_path / "given", layer_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match="does not belong"):
        ours("BertModel").from_pretrained(tmp_path / "given")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "values", "changes", "words"), MATHEMATICS)
def test_a_config_of_another_save_is_refused(name, values, changes, words, layout, tmp_path):
    prefix, _ = split_name(name)
    model_type = next(family.model_type for family in FAMILIES.values() if family.class_prefix == prefix)
    model = randomise(ours(name)(EncoderConfig(model_type, **CONFIGS[prefix], **values)))
    saving.save(model, tmp_path, max_shard_size=LAYOUTS[layout])
    edit_config(tmp_path, **changes)
    with pytest.raises(
        CheckpointError, match=rf"config\.json: does not belong to model.*safetensors: {words}"
    ):
        fastbert.AutoModel.from_pretrained(tmp_path)
    if "model_type" not in changes:  # what the caller says overrides both
        overrides = {key: getattr(model.config, key) for key in changes}
        assert_same_state(fastbert.AutoModel.from_pretrained(tmp_path, **overrides), model)
    assert_same_state(fastbert.AutoModel.from_pretrained(tmp_path, config=model.config), model)


def test_every_shard_is_asked_for_its_config(tmp_path):
    """Others may have written one of them, which then says nothing."""
    first, *_, last = saving.save(two_models()[0], tmp_path, max_shard_size="40KB")
    edit_config(tmp_path, layer_norm_eps=1e-3)
    for foreign, asked in ((first, first.with_name(r"model-00002-")), (last, first)):
        held = foreign.read_bytes()
        save_file(load_file(foreign), foreign, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=f"does not belong to {asked.name}"):
            ours("BertModel").from_pretrained(tmp_path)
        foreign.write_bytes(held)


def test_an_override_is_no_config_of_another_save(tmp_path):
    model = two_models()[0]
    saving.save(model, tmp_path)
    loaded = ours("BertModel").from_pretrained(tmp_path, hidden_act="relu", layer_norm_eps=0.1)
    assert (loaded.config.hidden_act, loaded.config.layer_norm_eps) == ("relu", 0.1)
    (tmp_path / "config.json").unlink()
    ours("BertModel").from_pretrained(tmp_path, config=model.config)
    with pytest.raises(CheckpointError, match="saved with 1e-12"):  # nothing says that it is meant
        checkpoint.load_weights(two_models()[1], tmp_path)


def test_what_is_no_mathematics_may_be_edited(tmp_path):
    model = two_models()[0]
    saving.save(model, tmp_path)
    edit_config(
        tmp_path, id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2},
        hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2, problem_type="regression",
        dtype="float32", output_attentions=True,
        pad_token_id=5, hidden_act="gelu_python", transformers_version="9", initializer_range=1.0,
    )  # fmt: skip
    assert_same_state(ours("BertModel").from_pretrained(tmp_path), model)


@pytest.mark.parametrize(
    "name", ["BertModel", "RobertaModel", "AlbertModel", "MPNetModel", "DistilBertModel"]
)
def test_the_mathematics_are_whole(name):
    """Every config key that changes a forward, though all shapes are the same, is among them."""
    prefix, _ = split_name(name)
    model_type = next(family.model_type for family in FAMILIES.values() if family.class_prefix == prefix)
    config = EncoderConfig(model_type, **CONFIGS[prefix])
    model = randomise(ours(name)(config))
    ids = torch.tensor([[5, 9, 3, 11, 1, 20, 7]])
    truth = model(ids).last_hidden_state
    for key, value in config.to_dict().items():
        key = config.family.aliases.get(key, key)
        other = (
            2 * value
            if type(value) in (int, float) and value
            else {"gelu": "relu", "gelu_new": "relu"}.get(value if isinstance(value, str) else None)
        )
        if key == "layer_norm_eps":
            other = 0.5
        if other is None:
            continue
        try:
            changed = ours(name)(EncoderConfig(**{**config.to_dict(), "model_type": model_type, key: other}))
            changed.load_state_dict(model.state_dict())
            changes = not torch.equal(changed.eval()(ids).last_hidden_state, truth)
        except (ValueError, RuntimeError):  # refused, or another shape
            continue
        ours_now, before = changed.config.mathematics(), config.mathematics()
        assert changes == (ours_now != before) or key == "pad_token_id", key


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", '{"config": 1, "mathematics": {}}', '{"config": "x"}', "[" * 100_000]
)
def test_a_damaged_stamp_is_named(text, tmp_path):
    model = two_models()[0]
    saving.save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", "fastbert": text})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: metadata fastbert: "):
        ours("BertModel").from_pretrained(tmp_path)


def test_quantised_weights_say_their_config_too(tmp_path):
    model = two_models()[0].quantize()
    saving.save(model, tmp_path)
    edit_config(tmp_path, layer_norm_eps=0.5)
    with pytest.raises(CheckpointError, match=r"layer_norm_eps: config\.json says 0\.5"):
        ours("BertModel").from_pretrained(tmp_path)


def test_full_disk(tmp_path):
    old, new = two_models()
    saving.save(old, tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (30_000, hard)
    )  # a write past it fails, like one to a full disk
    try:
        with pytest.raises(
            CheckpointError, match=r"/model\.safetensors: could not be saved, what was there is unchanged"
        ):
            saving.save(new, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_save_removes_the_folders_of_dead_saves_alone(tmp_path):
    """Not those of a living process, of another machine, or of anyone else's naming."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    kept = {
        f".saving-00000001.{host}.{os.getpid()}",
        f".saving-00000002.{host}.{os.getppid()}",
        f".saving-00000003.not-{host}.{dead.pid}",
        f".saving-00000004.{host}.backup",
    }
    for name in (*kept, f".saving-00000005.{host}.{dead.pid}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    saving.save(two_models()[0], tmp_path)
    assert {p.name for p in tmp_path.iterdir() if p.name.startswith(".saving-")} == kept
    assert all((tmp_path / name / "model.safetensors").read_bytes() == b"half" for name in kept)


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path
    import torch
    from fastbert.checkpoint import save as saving
    from fastbert.models.bert import BertModel
    from fastbert.models.config import EncoderConfig

    torch.set_num_threads(1)
    kills, directory, sizes = int(sys.argv[1]), Path(sys.argv[2]), ("5GB", "40KB")
    # keys of every kind differ: mathematics, labels, dropout, one that is not ours
    models = [
        BertModel(
            EncoderConfig("bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=61,
                          intermediate_size=48, max_position_embeddings=40, layer_norm_eps=eps,
                          id2label={0: f"no {eps}", 1: f"yes {eps}"}, hidden_dropout_prob=eps, ours=eps)
        )
        for eps in (0.1, 0.2)
    ]
    quantised = [BertModel(model.config) for model in models]
    for model, twin in zip(models, quantised):
        twin.load_state_dict(model.state_dict())
        twin.quantize()
    sources = models + quantised

    def whole():
        "Whose checkpoint it is; fails where its config or one of its tensors is another model's."
        loaded = BertModel.from_pretrained(directory)
        state, config = loaded.state_dict(), loaded.config.to_dict()
        for key in ("architectures", "dtype"):
            config.pop(key)
        quantization = config.pop("quantization_config", None)
        same = [
            config == m.config.to_dict() and state.keys() == m.state_dict().keys()
            and (quantization is not None) == (m in quantised)
            and all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
            for m in sources
        ]
        assert same.count(True) == 1, (same, config, quantization)
        return same.index(True)

    def die_at(step):
        calls = 0
        for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (os, "unlink"), (os, "open")):
            def wrapper(*args, function=getattr(owner, name), **kwargs):
                nonlocal calls
                calls += 1
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            setattr(owner, name, wrapper)

    def forked(job, patience):
        pid = os.fork()
        if pid == 0:
            try:
                job()
            finally:
                os._exit(0)
        if patience:
            time.sleep(patience)
            os.kill(pid, signal.SIGKILL)
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

    killed, outcomes = 0, [0, 0]
    for first in sizes:
        for second in sizes:
            for step in range(1, 90):
                saving.save(models[0], directory, max_shard_size=first)
                assert whole() == 0
                def job():
                    die_at(step)
                    saving.save(models[1], directory, max_shard_size=second)
                if not forked(job, 0):
                    assert whole() == 1
                    break
                killed += 1
                outcomes[whole()] += 1
    assert min(outcomes) > 10, outcomes

    # at moments spread over a save: the time of one is measured in a fork, as the kills are
    random.seed(0)
    seen = {False: 0, True: 0}
    while sum(seen.values()) < kills:
        old, new = random.sample(range(4), 2)
        saving.save(sources[old], directory, max_shard_size=random.choice(sizes))
        size = random.choice(sizes)
        start = time.perf_counter()
        forked(lambda: saving.save(sources[new], directory, max_shard_size=size), 0)
        seconds = time.perf_counter() - start
        assert whole() == new
        for _ in range(10):
            saving.save(sources[old], directory, max_shard_size=random.choice(sizes))
            job = lambda: saving.save(sources[new], directory, max_shard_size=size)
            if not forked(job, random.uniform(0.1, 1.0) * seconds):
                continue
            found = whole()
            assert found in (old, new), (found, old, new)
            seen[found == new] += 1
    saving.save(models[0], directory)
    assert whole() == 0
    assert sorted(os.listdir(directory)) == ["config.json", "model.safetensors"], os.listdir(directory)
    print(killed, "killed at steps;", seen, "at moments:", sum(seen.values()))
"""


@pytest.mark.parametrize("kills", [25, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_saves(kills, tmp_path):
    """SIGKILL: at every step of a save, then at moments spread over it."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(kills), str(tmp_path / "m")],
        env=env, capture_output=True, text=True, timeout=240 if kills < 100 else 3600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    assert int(run.stdout.split()[-1]) >= kills


# --- refused before anything is built -----------------------------------------------------------------------


def saved(tmp_path, name="BertModel"):
    """A checkpoint of ours, and the model."""
    prefix, _ = split_name(name)
    model_type = next(family.model_type for family in FAMILIES.values() if family.class_prefix == prefix)
    model = randomise(ours(name)(EncoderConfig(model_type, **CONFIGS[prefix])))
    saving.save(model, tmp_path)
    return model


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("BertModel", "num_hidden_layers", 10**5, "num_hidden_layers says 100000, the file has 3"),
        ("BertModel", "num_hidden_layers", 101, "num_hidden_layers says 101, the file has 3"),
        ("DistilBertModel", "n_layers", 10**6, "n_layers says 1000000, the file has 3"),
        ("AlbertModel", "inner_group_num", 10**5,
         r"num_hidden_groups \* inner_group_num says 200000, the file has 4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["safetensors", "bin", "bin asked for", "state_dict", "state_dict alone"])
def test_layers_are_counted_before_they_are_built(name, key, value, words, layout, tmp_path, monkeypatch):
    model = saved(tmp_path, name)
    path, given, counted = tmp_path, {}, "model.safetensors"
    if layout.startswith("bin"):
        torch.save(model.state_dict(), tmp_path / (counted := "pytorch_model.bin"))
    if layout == "bin asked for":
        given = {"use_safetensors": False}
    else:
        if layout != "safetensors":
            (tmp_path / "model.safetensors").unlink()
        if layout.startswith("state_dict"):
            given, counted = {"state_dict": model.state_dict()}, "^state_dict"
        if layout == "state_dict alone":
            path, given["config"] = None, tmp_path
    edit_config(tmp_path, **{key: value})
    monkeypatch.setattr(fastbert.BertModel, "layer_class", None)  # not to be built
    with pytest.raises(CheckpointError, match=f"{counted}: config {words}"):
        fastbert.AutoModel.from_pretrained(path, **given)


def test_a_deep_model_still_loads(tmp_path):
    config = {**SIZES, "num_hidden_layers": 101, "hidden_size": 4, "intermediate_size": 4}
    model = randomise(ours("BertModel")(EncoderConfig("bert", **config)))
    saving.save(model, tmp_path)
    assert_same_state(ours("BertModel").from_pretrained(tmp_path), model)
    given = {"config": model.config, "state_dict": model.state_dict()}
    assert_same_state(ours("BertModel").from_pretrained(None, **given), model)


def test_a_compressed_archive_is_refused_before_it_is_unpacked(bert_mlm, tmp_path, monkeypatch):
    bert_mlm.config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(bert_mlm.state_dict(), tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            content = plain.read(entry)
            packed.writestr(
                entry.filename, content + bytes(10**6) if entry.filename.endswith("data.pkl") else content
            )
    monkeypatch.setattr(torch, "load", None)  # not to be called
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin: is compressed: it unpacks to 1,\d{3},\d{3} bytes from"
    ):
        load("BertForMaskedLM", tmp_path)


def test_an_archive_whose_table_is_damaged_is_named(bert_mlm, tmp_path):
    bert_mlm.config.save_pretrained(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save(bert_mlm.state_dict(), file)
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 2] = 9
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: truncated, or not a PyTorch file"):
        load("BertForMaskedLM", tmp_path)


def test_weights_saved_from_meta_are_named(bert_mlm, tmp_path):
    bert_mlm.config.save_pretrained(tmp_path)
    torch.save(bert_mlm.to("meta").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin: bert\.\S+: was saved from the meta device"
    ):
        load("BertForMaskedLM", tmp_path)


def test_a_model_on_meta_is_not_saved_and_nothing_is_written(tmp_path):
    with torch.device("meta"):
        model = ours("BertForMaskedLM")(EncoderConfig("bert", **SIZES))
    with pytest.raises(CheckpointError, match="is on the meta device and has no value to save"):
        model.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()


HOSTILE = [
    ({"model_type": ["bert"]}, TypeError, r"model_type: expected a text, got \['bert'\]"),
    ({"model_type": {"a": 1}}, TypeError, r"model_type: expected a text"),
    ({"model_type": None}, TypeError, r"model_type: expected a text, got None"),
    ({"id2label": ["a", "b"]}, TypeError, r"config id2label: expected an object, got \['a', 'b'\]"),
    ({"id2label": {"no": "a"}}, ValueError, r"config id2label: expected class numbers as keys, got 'no'"),
    ({"id2label": "a"}, TypeError, r"config id2label: expected an object, got 'a'"),
    ({"label2id": ["a", "b"]}, TypeError, r"config label2id: expected an object, got \['a', 'b'\]"),
    ({"validate": 1}, ValueError, r"config validate: is a method of EncoderConfig"),
    ({"to_dict": {}}, ValueError, r"config to_dict: is a method of EncoderConfig"),
    ({"get": None}, ValueError, r"config get: is a method of EncoderConfig"),
    ({"_set_labels": 1}, ValueError, r"config _set_labels: is a method of EncoderConfig"),
    ({"__class__": 1}, ValueError, r"config __class__: is a method of EncoderConfig"),
    ({"vocab_size": 2**62}, ValueError, r"config vocab_size: expected an integer <= 16777216, got 461168"),
    ({"vocab_size": 10**4000}, ValueError, r"config vocab_size: expected an integer <= 16777216, got 1000"),
    ({"vocab_size": 1e30}, TypeError, r"config vocab_size: expected an integer, got 1e\+30"),
    ({"hidden_size": 2**31}, ValueError, r"config hidden_size: expected an integer <= 16777216"),
    ({"intermediate_size": 2**24 + 1}, ValueError, r"config intermediate_size: expected an integer <= 167"),
    ({"layer_norm_eps": 10**400}, ValueError, r"config layer_norm_eps: expected a finite number >= 0"),
    ({"hidden_act": ["gelu"]}, ValueError, r"config hidden_act: unknown activation \['gelu'\]"),
    ({"problem_type": ["regression"]}, ValueError, r"config problem_type: expected one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), HOSTILE)
def test_a_hostile_config_is_refused_by_name(changes, error, words, tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    for load_one in (fastbert.AutoModel.from_pretrained, ours("BertModel").from_pretrained):
        with pytest.raises(error, match=words):
            load_one(tmp_path)


def test_labels_are_counted_before_they_are_named(tmp_path):
    saved(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    del content["id2label"], content["label2id"]
    (tmp_path / "config.json").write_text(json.dumps({**content, "num_labels": 2**20 + 1}))
    with pytest.raises(ValueError, match=r"num_labels: expected at most 1048576, got 1048577"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_sizes_at_the_limit_are_checked_against_the_file(tmp_path):
    """The largest sizes are no overflow on the way to the message that names them."""
    saved(tmp_path)
    edit_config(tmp_path, hidden_size=2**24, intermediate_size=2**24, vocab_size=2**24)
    with pytest.raises(CheckpointError, match=r"config vocab_size says 16777216, the file has 61"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_keys_with_odd_names_are_kept(tmp_path):
    model = saved(tmp_path)
    odd = {"self": 1, "head_dim": 7, "family": "x", "values": 2, "overrides": 3}
    edit_config(tmp_path, **odd)
    loaded = ours("BertModel").from_pretrained(tmp_path)
    assert_same_state(loaded, model)
    assert odd.items() <= loaded.config.to_dict().items()
    assert loaded.config.head_dim == 8  # the property


def nested(depth, inside='"model_type": "bert"'):
    return "{" + inside + ', "x": ' + "[" * depth + "]" * depth + "}"


@pytest.mark.parametrize("depth", [101, 400, 990, 100_000])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
)
def test_deeply_nested_json_is_named(name, depth, tmp_path):
    saved(tmp_path)
    if name != "config.json":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_text(nested(depth))
    with pytest.raises(CheckpointError, match=rf"{name}: is nested deeper than 100 levels"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_moderately_nested_json_is_kept(tmp_path):
    saved(tmp_path)
    edit_config(tmp_path, x=json.loads("[" * 99 + "]" * 99))
    model = ours("BertModel").from_pretrained(tmp_path)
    saving.save(model, tmp_path)
    assert len(str(json.loads((tmp_path / "config.json").read_text())["x"])) == 198


def test_a_fifo_as_config_does_not_hang(tmp_path):
    saved(tmp_path)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: is not a plain file"):
        fastbert.AutoModel.from_pretrained(tmp_path)


def test_a_full_disk_leaves_the_old_config_whole(tmp_path):
    config = EncoderConfig("bert", **SIZES)
    config.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"/config\.json: could not be saved, what was there is unch.*large"
        ):
            EncoderConfig("bert").save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["config.json"]


# --- configs of 2018 ----------------------------------------------------------------------------------------


def without_type(tmp_path, name):
    """As Google's and the first HuggingFace releases wrote them: only BERT's keys, old names of norms."""
    model = theirs(name)
    keys = ("attention_probs_dropout_prob", "hidden_act", "hidden_dropout_prob", "hidden_size",
            "initializer_range", "intermediate_size", "max_position_embeddings", "num_attention_heads",
            "num_hidden_layers", "type_vocab_size", "vocab_size")  # fmt: skip
    config = {key: value for key, value in model.config.to_dict().items() if key in keys}
    assert len(config) == len(keys)
    write(
        tmp_path, config, {old_norms(key): v for key, v in model.state_dict().items() if "decoder" not in key}
    )
    return model


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("BertModel", "BertModel"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        ("BertForPreTraining", "BertForPreTraining"),
        ("RobertaModel", "RobertaModel"),
        ("ErnieForMaskedLM", "ErnieForMaskedLM"),
    ],
)
def test_an_explicit_class_knows_the_model_type(stored, name, tmp_path):
    model = without_type(tmp_path, stored)
    loaded = ours(name).from_pretrained(tmp_path, hidden_dropout_prob=0.3)
    assert_same_state(loaded, model)
    assert loaded.config.model_type == model.config.model_type
    assert loaded.config.hidden_dropout_prob == 0.3
    for config in (tmp_path, str(tmp_path / "config.json")):
        assert_same_state(ours(name).from_pretrained(tmp_path, config=config), model)
    loaded.save_pretrained(tmp_path)  # and from now on the file says it
    assert type(fastbert.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)).__name__ == (
        split_name(name)[0] + "Model"
    )


def test_auto_classes_say_that_model_type_is_missing(tmp_path):
    model = without_type(tmp_path, "BertForMaskedLM")
    with pytest.raises(
        ValueError,
        match=r"config\.json: model_type: missing, and AutoModel chooses .*BertModel, Roberta.*MPNetModel",
    ):
        fastbert.AutoModel.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"AutoModelForNextSentencePrediction chooses .* \(BertForNext\w+, ErnieForNext\w+\)"
    ):
        fastbert.AutoModelForNextSentencePrediction.from_pretrained(tmp_path)
    assert_same_state(fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path, model_type="bert"), model)
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "config.json", tmp_path / "other")
    for config in (tmp_path / "other", tmp_path / "other" / "config.json"):
        with pytest.raises(ValueError, match=r"other/config\.json: model_type: missing, and AutoModel ch"):
            fastbert.AutoModel.from_pretrained(tmp_path, config=config)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="AutoModelForMaskedLM chooses"):
        fastbert.AutoModelForMaskedLM.from_pretrained(tmp_path)


# --- where the files are ------------------------------------------------------------------------------------


def test_resolve_a_directory(tmp_path, monkeypatch):
    assert hub.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_resolve_a_hub_name(layout, tmp_path, monkeypatch):
    """A stand-in for the hub: copies the files that the patterns ask for, as snapshot_download does."""
    import fnmatch

    import huggingface_hub

    remote, local = tmp_path / "remote", tmp_path / "local"
    model = theirs("BertForMaskedLM")
    model.config.save_pretrained(remote)
    torch.save(model.state_dict(), remote / "pytorch_model.bin")
    if layout == "safetensors":
        model.save_pretrained(remote)
    (remote / "vocab.txt").write_text("[PAD]")
    (remote / "flax_model.msgpack").write_text("large")
    asked = []

    def snapshot_download(
        name, *, allow_patterns, revision, cache_dir, local_files_only, token, force_download
    ):
        asked.append((name, revision, cache_dir, local_files_only, token, force_download))
        local.mkdir(exist_ok=True)
        for file in remote.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                (local / file.name).write_bytes(file.read_bytes())
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    directory = hub.resolve("someone/bert", revision="v1", cache_dir="c", local_files_only=True, token="t")
    assert directory == local
    assert set(asked) == {("someone/bert", "v1", "c", True, "t", False)}
    weights = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[layout]
    assert {p.name for p in local.iterdir()} == {"config.json", "vocab.txt", weights} | (
        {"generation_config.json"} if (remote / "generation_config.json").exists() else set()
    )
    assert_same_state(load("BertForMaskedLM", directory), model)


def test_read_config(tmp_path, monkeypatch):
    import huggingface_hub

    theirs("BertModel").save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert hub.read_config(tmp_path) == content
    assert hub.read_config(str(tmp_path / "config.json")) == content
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, filename, **_: str(tmp_path / filename)
    )
    assert hub.read_config("someone/bert") == content


def test_hub_name_without_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    for call in (hub.resolve, hub.read_config):
        with pytest.raises(
            CheckpointError, match=r"someone/bert: no such directory; .*install huggingface_hub"
        ):
            call("someone/bert")


def test_hub_error_is_named(monkeypatch):
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError,
        match=r"someone/bert: .* could not be downloaded from the hub: ConnectionError: no route to host$",
    ):
        hub.resolve("someone/bert")
