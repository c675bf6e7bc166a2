"""Every layout of files that HuggingFace wrote, both ways; values, dtypes, and where the files are."""

import json
import sys
import warnings

import pytest
import torch
import transformers
from safetensors import safe_open

import fastbert
from fastbert.checkpoint import hub
from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from tests.support.checkpoints import (
    CONFIGS,
    assert_same_state,
    empty,
    load,
    random_model,
    split_name,
    theirs,
    write,
)

TASKS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForNextSentencePrediction",
    "ForSequenceClassification",
    "ForMultipleChoice",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
# We have no ELECTRA discriminator; its keys are tested as unused ones.
NAMES = [
    prefix + task
    for prefix in CONFIGS
    for task in TASKS
    if hasattr(transformers, prefix + task) and prefix + task != "ElectraForPreTraining"
]


# --- both ways, every family and head -----------------------------------------------------------------------


@pytest.mark.sweep_of("Camembert", "XLMRoberta", "Ernie")  # RoBERTa and BERT by other names
@pytest.mark.parametrize("name", NAMES)
def test_saved_by_transformers_loads_here(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings(action="error"):
        loaded = load(name, tmp_path)
    assert_same_state(loaded, model)
    assert loaded.load_report.missing == loaded.load_report.unused == []
    assert all(param.requires_grad and not param.is_meta for param in loaded.parameters())


@pytest.mark.sweep_of("Camembert", "XLMRoberta", "Ernie")  # RoBERTa and BERT by other names
@pytest.mark.parametrize("name", NAMES)
def test_saved_here_loads_in_transformers(name, tmp_path):
    prefix, task = split_name(name)
    num_labels = 3 if task in ("ForSequenceClassification", "ForTokenClassification") else 2
    model = random_model(name, num_labels=num_labels)
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
    model = random_model("BertForMaskedLM")
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_into_a_live_model_in_place(bert_mlm, tmp_path, device):
    bert_mlm.save_pretrained(tmp_path)
    model = empty("BertForMaskedLM", tmp_path, device=device)
    model.bert.embeddings.requires_grad_(False)
    before = {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()}
    checkpoint.load_weights(model, tmp_path)
    after = {key: (id(p), p.data_ptr(), p.requires_grad) for key, p in model.named_parameters()}
    assert {key: a[2] for key, a in after.items()} == {key: b[2] for key, b in before.items()}
    assert device == "meta" or after == before
    assert_same_state(model, bert_mlm)


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


# --- where the files are ------------------------------------------------------------------------------------


def test_resolve_a_directory(tmp_path, monkeypatch):
    assert hub.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize("layout", ["safetensors", "bin"])
def test_resolve_a_hub_name(layout, tmp_path, monkeypatch):
    """A stand-in for the hub copies the files that match the patterns, as snapshot_download does."""
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
        words = r"someone/bert: no such directory; .*install huggingface_hub"
        with pytest.raises(CheckpointError, match=words):
            call("someone/bert")
