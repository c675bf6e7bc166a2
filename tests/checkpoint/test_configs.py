"""The config that belongs to the weights, and configs of 2018."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import fastbert
from fastbert.checkpoint import load as checkpoint
from fastbert.checkpoint import save as saving
from fastbert.checkpoint.files import CheckpointError
from fastbert.models.config import EncoderConfig
from tests.support.checkpoints import (
    LAYOUTS,
    assert_same_state,
    edit_config,
    old_norms,
    ours,
    random_model,
    saved,
    split_name,
    theirs,
    two_models,
    write,
)

# --- the config of the weights ------------------------------------------------------------------------------


MATHEMATICS = [
    (
        "BertModel",
        {"layer_norm_eps": 1e-5},
        "layer_norm_eps: config.json says 1e-05, .* saved with 1e-12",
    ),
    ("BertModel", {"hidden_act": "relu"}, "hidden_act: config.json says 'relu', .* saved with 'gelu'"),
    ("BertModel", {"num_attention_heads": 8}, "num_attention_heads: config.json says 8, .* with 4"),
    ("RobertaModel", {"pad_token_id": 3}, "pad_token_id: config.json says 3, .* with 1"),
    ("AlbertModel", {"num_hidden_layers": 5}, "num_hidden_layers: config.json says 5, .* with 3"),
    ("DistilBertModel", {"n_heads": 8}, "n_heads: config.json says 8, .* with 4"),
    ("XLMRobertaModel", {"model_type": "roberta"}, "model_type: config.json says 'roberta'"),
]


def test_weights_of_the_callers_own_take_any_config(tmp_path):
    """A state_dict does not say its config; a save records the config that it is given."""
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
@pytest.mark.parametrize(("name", "changes", "words"), MATHEMATICS)
def test_a_config_of_another_save_is_refused(name, changes, words, layout, tmp_path):
    model = random_model(name)
    saving.save(model, tmp_path, max_shard_size=LAYOUTS[layout])
    edit_config(tmp_path, **changes)
    message = rf"config\.json: does not belong to model.*safetensors: {words}"
    with pytest.raises(CheckpointError, match=message):
        fastbert.AutoModel.from_pretrained(tmp_path)
    if "model_type" not in changes:  # what the caller says overrides both
        overrides = {key: getattr(model.config, key) for key in changes}
        assert_same_state(fastbert.AutoModel.from_pretrained(tmp_path, **overrides), model)
    assert_same_state(fastbert.AutoModel.from_pretrained(tmp_path, config=model.config), model)


def test_every_shard_is_asked_for_its_config(tmp_path):
    """Another program may have written one of them, which then has no stamp."""
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
    with pytest.raises(CheckpointError, match="saved with 1e-12"):  # nothing says that the change is intended
        checkpoint.load_weights(two_models()[1], tmp_path)


def test_what_is_no_mathematics_may_be_edited(tmp_path):
    model = two_models()[0]
    saving.save(model, tmp_path)
    edit_config(
        tmp_path,
        id2label={"0": "a", "1": "b", "2": "c"},
        label2id={"a": 0, "b": 1, "c": 2},
        hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.2,
        problem_type="regression",
        dtype="float32",
        output_attentions=True,
        pad_token_id=5,
        hidden_act="gelu_python",
        transformers_version="9",
        initializer_range=1.0,
    )
    assert_same_state(ours("BertModel").from_pretrained(tmp_path), model)


@pytest.mark.parametrize(
    "name", ["BertModel", "RobertaModel", "AlbertModel", "MPNetModel", "DistilBertModel"]
)
def test_the_mathematics_are_whole(name):
    """They include every config key that changes a forward but no shape."""
    model = random_model(name)
    config, model_type = model.config, model.config.model_type
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


# --- configs of 2018 ----------------------------------------------------------------------------------------


def without_type(tmp_path, name):
    """As Google's and the first HuggingFace releases wrote them: only BERT's keys, old names of norms."""
    model = theirs(name)
    keys = (
        "attention_probs_dropout_prob",
        "hidden_act",
        "hidden_dropout_prob",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "type_vocab_size",
        "vocab_size",
    )
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
    words = r"config\.json: model_type: missing, and AutoModel chooses .*BertModel, .*Roberta.*MPNetModel"
    with pytest.raises(ValueError, match=words):
        fastbert.AutoModel.from_pretrained(tmp_path)
    words = r"AutoModelForNextSentencePrediction chooses .* \(BertForNext\w+, ErnieForNext\w+, MobileBertForN"
    with pytest.raises(ValueError, match=words):
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
