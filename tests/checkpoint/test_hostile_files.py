"""Files that are refused by name before anything is built from them."""

import json
import os
import resource
import zipfile

import pytest
import torch

import fastbert
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from fastbert.models.config import EncoderConfig
from tests.support.checkpoints import SIZES, assert_same_state, edit_config, load, ours, randomise, saved


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("BertModel", "num_hidden_layers", 10**5, "num_hidden_layers says 100000, the file has 3"),
        ("BertModel", "num_hidden_layers", 101, "num_hidden_layers says 101, the file has 3"),
        ("DistilBertModel", "n_layers", 10**6, "n_layers says 1000000, the file has 3"),
        (
            "AlbertModel",
            "inner_group_num",
            10**5,
            r"num_hidden_groups \* inner_group_num says 200000, the file has 4",
        ),
    ],
)
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


@pytest.mark.sweep
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
    words = r"pytorch_model\.bin: is compressed: it unpacks to 1,\d{3},\d{3} bytes from"
    with pytest.raises(CheckpointError, match=words):
        load("BertForMaskedLM", tmp_path)


HOSTILE = [
    ({"model_type": ["bert"]}, TypeError, r"model_type: expected a text, got \['bert'\]"),
    ({"model_type": None}, TypeError, r"model_type: expected a text, got None"),
    ({"id2label": ["a", "b"]}, TypeError, r"config id2label: expected an object, got \['a', 'b'\]"),
    ({"id2label": {"no": "a"}}, ValueError, r"config id2label: expected class numbers as keys, got 'no'"),
    ({"label2id": ["a", "b"]}, TypeError, r"config label2id: expected an object, got \['a', 'b'\]"),
    ({"validate": 1}, ValueError, r"config validate: is a method of EncoderConfig"),
    ({"_set_labels": 1}, ValueError, r"config _set_labels: is a method of EncoderConfig"),
    ({"__class__": 1}, ValueError, r"config __class__: is a method of EncoderConfig"),
    ({"vocab_size": 2**62}, ValueError, r"config vocab_size: expected an integer <= 16777216, got 461168"),
    ({"vocab_size": 10**4000}, ValueError, r"config vocab_size: expected an integer <= 16777216, got 1000"),
    ({"intermediate_size": 2**24 + 1}, ValueError, r"config intermediate_size: expected an integer <= 167"),
    ({"layer_norm_eps": 10**400}, ValueError, r"config layer_norm_eps: expected a finite number >= 0"),
    ({"hidden_act": ["gelu"]}, ValueError, r"config hidden_act: unknown activation \['gelu'\]"),
    ({"problem_type": ["regression"]}, ValueError, r"config problem_type: expected one of"),
    ({"architectures": [1, 2]}, TypeError, r"config architectures: expected a list of class names, got \[1"),
    ({"id2label": {"0": ["a"]}}, TypeError, r"config id2label: expected a text per class, got \['a'\]"),
    ({"hidden_dropout_prob": None}, ValueError, r"config hidden_dropout_prob: expected a probability"),
    (
        {"model_type": "albert", "embedding_size": 32, "num_hidden_groups": None},
        TypeError,
        r"config num_hidden_groups: expected an integer, got None",
    ),
]


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


def test_a_full_disk_leaves_the_old_config_whole(tmp_path):
    config = EncoderConfig("bert", **SIZES)
    config.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        words = r"/config\.json: could not be saved, what was there is unch.*large"
        with pytest.raises(CheckpointError, match=words):
            EncoderConfig("bert").save_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "config.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["config.json"]
