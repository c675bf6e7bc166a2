"""What `from_pretrained` and `save_pretrained` do with the arguments that scripts for transformers pass."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers

import fastbert
from fastbert.models import arguments
from tests.support.checkpoints import assert_same_state
from tests.support.hf_models import hf_model

CLASSIFIER = transformers.AutoModelForSequenceClassification
load = fastbert.AutoModelForSequenceClassification.from_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A classifier of five labels by transformers."""
    path = tmp_path_factory.mktemp("five")
    hf_model("bert", CLASSIFIER, num_hidden_layers=1, num_labels=5).save_pretrained(path)
    return path


def test_a_head_of_another_size_is_fresh_where_asked(folder):
    head = ("classifier.weight", "classifier.bias")
    with pytest.raises(fastbert.CheckpointError, match=r"classifier.weight: shape \(5, 48\)"):
        load(folder, num_labels=3)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="other shapes") as caught:
        model, info = load(folder, num_labels=3, ignore_mismatched_sizes=True, output_loading_info=True)
    (message,) = [str(w.message) for w in caught if "classifier" in str(w.message)]
    assert message == (
        f"{folder}: has weights of other shapes, left out: classifier.weight (5, 48), here (3, 48), "
        "classifier.bias (5,), here (3,): freshly initialised, train them before use"
    )
    assert model.classifier.weight.shape == (3, 48)
    assert 0.5 < model.classifier.weight.std() / model.config.initializer_range < 2
    assert model.classifier.bias.eq(0).all()
    assert model.config.num_labels == len(model.config.id2label) == 3
    whole = load(folder)
    assert_same_state(model.bert, whole.bert)
    with warnings.catch_warnings(action="ignore"):
        _, theirs = transformers.BertForSequenceClassification.from_pretrained(
            folder, num_labels=3, ignore_mismatched_sizes=True, output_loading_info=True
        )
    assert info["mismatched_keys"] == {(key, *shapes) for key, *shapes in theirs["mismatched_keys"]}
    assert info.keys() >= {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"}
    assert {key for key, _, _ in info["mismatched_keys"]} == set(head)
    assert info["missing_keys"] == info["unexpected_keys"] == set()
    with warnings.catch_warnings(action="error"):
        assert_same_state(load(folder, ignore_mismatched_sizes=True), whole)  # nothing to ignore


def test_an_8_bit_weight_of_another_shape_is_never_fresh(folder, tmp_path):
    load(folder).quantize().save_pretrained(tmp_path)
    with pytest.raises(fastbert.CheckpointError, match=r"intermediate.dense.weight: shape \(80, 48\)"):
        load(tmp_path, intermediate_size=96, ignore_mismatched_sizes=True)


def test_loading_info_names_fresh_and_left_over_keys(folder):
    with pytest.warns(UserWarning, match="has no weights for qa_outputs"):
        model, info = fastbert.BertForQuestionAnswering.from_pretrained(
            folder, num_labels=2, output_loading_info=True
        )
    assert isinstance(model, fastbert.BertForQuestionAnswering)
    assert "qa_outputs.weight" in info["missing_keys"]
    assert {"classifier.weight", "classifier.bias"} <= info["unexpected_keys"]
    assert all(key.startswith(("classifier.", "bert.pooler.")) for key in info["unexpected_keys"])
    assert info["mismatched_keys"] == set()
    assert info["error_msgs"] == []


@pytest.mark.parametrize(
    "given",
    [
        {"trust_remote_code": False},
        {"attn_implementation": "sdpa"},
        {"attn_implementation": "eager"},
        {"low_cpu_mem_usage": True},
        {"weights_only": True},
        {"use_safetensors": True},
        {"device_map": None},
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"device_map": {"bert": "cpu", "classifier": torch.device("cpu")}},
        {"quantization_config": None},
    ],
    ids=str,
)
def test_arguments_that_ask_for_what_happens_anyway(folder, given):
    model = load(folder, **given)
    assert_same_state(model, load(folder))
    assert model.device.type == "cpu"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code: True .* no code of a checkpoint is ever run"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation: 'flash_attention_2' .* own"),
        ({"load_in_8bit": True}, r"load_in_8bit: True .* quantize\(\)"),
        ({"quantization_config": {}}, r"quantization_config: \{\} .* quantize\(\)"),
        ({"variant": "fp16"}, "variant: 'fp16'"),
        ({"max_memory": {0: "1GB"}}, "max_memory: .* one device"),
        ({"device_map": {"bert": "cpu", "classifier": "cuda:0"}}, "device_map: .* got cpu, cuda:0"),
        ({"device_map": {}}, "device_map: expected one device for the whole model, got none"),
        ({"device_map": "disk"}, "device_map: expected a device or 'auto', got 'disk'"),
        ({"device_map": "meta"}, "device_map: 'meta' has no weights"),
        ({"device_map": "cpu", "device": "cpu"}, "device, device_map: expected one of the two"),
        (
            {"dtype": torch.float64, "torch_dtype": torch.float16},
            "dtype, torch_dtype: expected one of the two",
        ),
    ],
    ids=str,
)
def test_arguments_that_are_refused_by_name(folder, given, message):
    with pytest.raises(ValueError, match=message):
        load(folder, **given)


def test_every_argument_of_transformers_is_known_or_refused(folder):
    """No argument is silently ignored: one that is in no table does not exist."""
    with pytest.raises(TypeError, match=r"unexpected arguments \['use_flash'\]"):
        load(folder, use_flash=True)
    for name, (taken, reason) in arguments.LOADING.items():
        assert reason
        with pytest.raises(ValueError, match=f"^{name}: <object .* expected {taken[0]!r}.*: "):
            load(folder, **{name: object()})


@pytest.mark.parametrize(("count", "expected"), [(0, "cpu"), (1, "cuda:0"), (2, None)])
def test_device_map_auto(monkeypatch, count, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for name in ("auto", "balanced", "sequential"):
        if expected is None:
            with pytest.raises(ValueError, match=f"device_map: '{name}' spreads a model over the 2 GPUs"):
                arguments.single_device(None, name)
        else:
            assert arguments.single_device(None, name) == torch.device(expected)
    assert arguments.single_device(None, 1) == torch.device("cuda:1")
    assert arguments.single_device("cuda:1", None) == torch.device("cuda:1")
    assert arguments.single_device(None, None) == torch.device("cpu")


def test_subfolder(folder, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    load(folder).save_pretrained(tmp_path / "a" / "b")
    assert_same_state(load(tmp_path, subfolder="a/b"), load(folder))
    with pytest.raises(fastbert.CheckpointError, match="has no folder 'c', which subfolder names"):
        load(tmp_path, subfolder="c")


def test_subfolder_of_a_hub_name(folder, monkeypatch, tmp_path):
    import huggingface_hub

    asked = []

    def snapshot_download(name, *, allow_patterns, force_download, **options):
        asked.append((name, tuple(allow_patterns), force_download))
        load(folder).save_pretrained(tmp_path / "sub")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_same_state(load("someone/bert", subfolder="sub", force_download=True), load(folder))
    ((name, patterns, force),) = asked
    assert (name, force) == ("someone/bert", True)
    assert {"sub/model.safetensors", "sub/*.json"} <= set(patterns)
    assert all(pattern.startswith("sub/") for pattern in patterns)

    def hf_hub_download(name, *, filename, subfolder, **options):
        assert (name, subfolder, options["revision"]) == ("someone/bert", "sub", "v1")
        return str(tmp_path / subfolder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    config = fastbert.AutoConfig.from_pretrained("someone/bert", subfolder="sub", revision="v1")
    assert config == load(folder).config


def test_a_config_of_a_hub_name(folder, monkeypatch):
    import huggingface_hub

    hub = {"revision": "v1", "cache_dir": "c", "force_download": True, "local_files_only": True, "token": "t"}
    asked = []

    def hf_hub_download(name, *, filename, subfolder, **options):
        asked.append((name, options))
        return str(folder / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    model = load(folder)
    for place in (folder, None):
        loaded = load(place, config="someone/bert", state_dict=model.state_dict(), **hub)
        assert_same_state(loaded, model)
        assert loaded.name_or_path == "someone/bert"
    assert asked == [("someone/bert", hub)] * 2


def test_use_safetensors(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(tmp_path)
    other = {key: value + 1 for key, value in model.state_dict().items()}
    torch.save(other, tmp_path / "pytorch_model.bin")
    for asked in (None, True):
        assert_same_state(load(tmp_path, use_safetensors=asked), model)
    assert torch.equal(load(tmp_path, use_safetensors=False).classifier.bias, model.classifier.bias + 1)
    (tmp_path / "pytorch_model.bin").unlink()
    words = r"expected pytorch_model.bin or .*use_safetensors is False"
    with pytest.raises(fastbert.CheckpointError, match=words):
        load(tmp_path, use_safetensors=False)
    torch.save(other, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    words = r"expected model.safetensors or .*use_safetensors is True"
    with pytest.raises(fastbert.CheckpointError, match=words):
        load(tmp_path, use_safetensors=True)


def test_a_state_dict_instead_of_the_files(folder):
    model = load(folder)
    given = {key: value.double() + 1 for key, value in model.state_dict().items()}
    loaded = load(folder, state_dict=given)
    assert loaded.dtype == torch.float32
    assert loaded.load_report.files == []
    assert torch.equal(loaded.classifier.bias, model.classifier.bias + 1)
    fresh = load(None, config=model.config, state_dict=given, dtype="auto")
    assert torch.equal(fresh.classifier.bias, loaded.classifier.bias)
    read = load(None, config=folder, state_dict=given, dtype=torch.float64)
    assert torch.equal(read.classifier.bias, given["classifier.bias"])
    assert read.classifier.bias.data_ptr() != given["classifier.bias"].data_ptr()
    with pytest.raises(fastbert.CheckpointError, match=r"^state_dict: missing keys: bert.embeddings"):
        load(folder, state_dict={k: v for k, v in given.items() if "word_embeddings" not in k})
    for wrong, message in (
        ([], "state_dict: expected a dictionary of tensors, got list"),
        ({"a": 1}, "state_dict: a: expected a tensor with values, got int"),
        ({"a": torch.empty(1, device="meta")}, "got a tensor on meta"),
        ({7: torch.empty(1)}, "state_dict: expected texts as keys, got 7"),
    ):
        with pytest.raises(TypeError, match=message):
            load(folder, state_dict=wrong)
    config = type(model.config).from_hf(model.config)
    config.quantization_config = {"quant_method": "gptq"}
    words = r"^config\.json: quantization_config: expected none, or .*got 'gptq'"
    with pytest.raises(fastbert.CheckpointError, match=words):
        load(None, config=config, state_dict=given)
    words = r"name_or_path: .* NoneType; None needs both config= and state_dict="
    with pytest.raises(TypeError, match=words):
        load(None, state_dict=given)


def test_save_takes_what_scripts_pass(folder, tmp_path):
    model = load(folder)
    model.save_pretrained(
        tmp_path / "a",
        safe_serialization=True,
        push_to_hub=False,
        save_function=torch.save,
        variant=None,
        max_shard_size="1GB",
        save_peft_format=True,
    )
    assert_same_state(load(tmp_path / "a"), model)
    model.save_pretrained(save_directory=tmp_path / "b", is_main_process=False)
    assert not (tmp_path / "b").exists()
    state = {key: value + 1 for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "c", state_dict=state)
    assert torch.equal(load(tmp_path / "c").classifier.bias, model.classifier.bias + 1)
    for given, error, message in (
        ({"safe_serialization": False}, ValueError, "safe_serialization: False .* only safetensors"),
        ({"push_to_hub": True}, ValueError, "push_to_hub: True .*upload_folder"),
        ({"variant": "fp16"}, ValueError, "variant: 'fp16'"),
        ({"token": "t"}, ValueError, "token: 't' .* nothing is uploaded"),
        ({"save_function": 1}, TypeError, "save_function: expected a function, got int"),
        ({"zip": True}, TypeError, r"save_pretrained: unexpected arguments \['zip'\]"),
        ({"state_dict": {"a": torch.ones(1)}}, ValueError, "missing: bert.*; unknown: a$"),
        ({"state_dict": 5}, TypeError, "state_dict: expected a dictionary of tensors, got int"),
    ):
        with pytest.raises(error, match=message):
            model.save_pretrained(tmp_path / "d", **given)
    assert not (tmp_path / "d").exists()
    with pytest.raises(TypeError, match="save_directory: expected a path, got int"):
        model.save_pretrained(5)


def test_a_device_that_is_none_is_named(folder):
    for name in ("device", "device_map"):
        with pytest.raises(ValueError, match=rf"^{name}: 'cuda:99', but torch shows [0-9]+ GPUs here"):
            load(folder, **{name: "cuda:99"})
    with pytest.raises(ValueError, match=r"^device: expected a device such as 'cpu' or 'cuda:0', got 'x'"):
        load(folder, device="x")
    with pytest.raises(ValueError, match=r"^target: expected a device such as 'cpu' or 'cuda:0', got 'x'"):
        fastbert.explain("x")
    with pytest.raises(TypeError, match=r"^subfolder: expected a text, got int"):
        load(folder, subfolder=5)
