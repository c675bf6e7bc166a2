"""Native models in other libraries: transformers' Trainer, accelerate, peft.

The oracle is transformers' model with the same weights in the same program. Loss curves and pipelines:
tests/acceleration.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest
import torch
import transformers
from torch.utils import _pytree

import fastbert
from fastbert.compression import qat
from fastbert.models import outputs
from fastbert.models.base import PreTrainedModel
from tests.support import ddp_logits_worker, ranks
from tests.support.checkpoints import assert_same_state
from tests.support.hf_models import batch, hf_model
from tests.support.model_pairs import NO_DROPOUT, build, inputs_for, labels_for
from tests.support.trainers import logged, trainer_of, word_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer((f"w{i}" for i in range(115)), 48)


def native(task: str = "ForSequenceClassification", **config) -> PreTrainedModel:
    return build("bert", task, **{"num_hidden_layers": 2, "num_labels": 3, **NO_DROPOUT, **config})[1]


def native_encoder() -> PreTrainedModel:
    return fastbert.AutoModel.from_config(native().config)


# -- Trainer -------------------------------------------------------------------------------------------------


def test_checkpoints_reload_and_resume(tmp_path, fresh_accelerator, tokenizer):
    settings = {
        "save_strategy": "steps",
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "save_total_limit": 3,
    }
    whole = native()
    trainer = trainer_of(whole, tmp_path / "a", tokenizer, **settings)
    trainer.train()
    best = trainer.state.best_model_checkpoint
    assert best is not None
    assert_same_state(whole, fastbert.AutoModelForSequenceClassification.from_pretrained(best))
    for name in ("config.json", "model.safetensors", "tokenizer.json", "trainer_state.json"):
        assert (tmp_path / "a" / "checkpoint-8" / name).is_file()
    last = fastbert.BertForSequenceClassification.from_pretrained(tmp_path / "a" / "checkpoint-8")
    assert_same_state(
        last, transformers.BertForSequenceClassification.from_pretrained(tmp_path / "a/checkpoint-8")
    )
    assert last.config.id2label == whole.config.id2label
    assert last.name_or_path == str(tmp_path / "a" / "checkpoint-8")

    resumed = trainer_of(native(), tmp_path / "a", tokenizer, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert torch.equal(logged(resumed)[-4:], logged(trainer)[-4:])
    trainer.save_model(str(tmp_path / "end"))
    assert_same_state(whole, fastbert.BertForSequenceClassification.from_pretrained(tmp_path / "end"))
    trainer.create_model_card(model_name="x")


def test_training_that_rounds_is_that_of_a_plain_loop(tmp_path, fresh_accelerator, tokenizer):
    model, plain = qat.prepare(native(), 4), qat.prepare(native(), 4)
    trainer = trainer_of(model, tmp_path, tokenizer, max_steps=2, save_strategy="steps", save_steps=2)
    batches = [*trainer.get_train_dataloader()]
    trainer.train()
    optimizer = torch.optim.AdamW(plain.train().parameters(), 1e-3, weight_decay=0.0)
    losses = []
    for given, lr in zip(batches, (1e-3, 5e-4), strict=False):
        optimizer.param_groups[0]["lr"] = lr
        losses.append(plain(**given).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    torch.testing.assert_close(logged(trainer)[:2], torch.stack(losses).detach(), rtol=1e-3, atol=1e-3)
    saved = fastbert.BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    assert_same_state(model, saved)


@pytest.mark.sweep
def test_masked_lm_with_the_data_collator(tmp_path, fresh_accelerator, tokenizer, caplog):
    model = native("ForMaskedLM")
    trainer = trainer_of(model, tmp_path, tokenizer, bf16=True, save_strategy="steps", save_steps=4)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < logged(trainer)[0] + 1
    assert trainer.predict(trainer.eval_dataset).predictions.shape[2] == 120
    folder = tmp_path / "checkpoint-8"
    for cls in (fastbert.BertForMaskedLM, transformers.BertForMaskedLM):
        reloaded = cls.from_pretrained(folder)
        assert_same_state(model, reloaded)
        assert reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight
    resumed = trainer_of(native("ForMaskedLM"), tmp_path, tokenizer, bf16=True)
    caplog.clear()
    with caplog.at_level("WARNING"):
        resumed.train(resume_from_checkpoint=str(folder))
    assert "missing keys" not in caplog.text
    assert_same_state(model, resumed.model)
    assert resumed.model.cls.predictions.decoder.weight is resumed.model.get_input_embeddings().weight


def test_label_smoothing_reads_the_logits(tmp_path, fresh_accelerator, tokenizer):
    """It takes the labels from the call, and makes the loss itself."""
    model = native("ForMaskedLM")
    before = model.get_input_embeddings().weight.detach().clone()
    trainer = trainer_of(model, tmp_path, tokenizer, max_steps=2, label_smoothing_factor=0.1)
    assert trainer.train().training_loss > 0
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] > 0
    assert not torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize("options", [{}, {"exclude_embeddings": True}, {"only_trainable": True}], ids=str)
def test_parameters_are_counted_as_transformers_counts_them(options):
    hf, model = build("bert", "ForMaskedLM")
    for one in (hf, model):
        one.get_input_embeddings().requires_grad_(False)
    assert model.num_parameters(**options) == hf.num_parameters(**options)


def test_a_loop_that_measures_accuracy_while_it_trains(fresh_accelerator):
    """A hand-written loop under accelerate in bf16, which reads the logits before the step."""
    accelerator = fresh_accelerator.Accelerator(cpu=True, mixed_precision="bf16")
    native_model = native("ForMaskedLM")
    model, optimizer = accelerator.prepare(native_model, torch.optim.SGD(native_model.parameters(), 0.1))
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(native_model, inputs)
    plain = model(**inputs)
    assert type(plain) is outputs.LogitsOutput
    assert plain.loss.dtype == plain.logits.dtype == torch.float32
    assert not plain.logits.is_computed
    right = []
    for _ in range(3):
        output = model(**inputs)
        accelerator.backward(output.loss)
        counted = inputs["labels"] != -100
        logits = accelerator.gather_for_metrics(output.logits)
        right.append((logits.argmax(-1) == inputs["labels"])[counted].float().mean().item())
        optimizer.step()
        optimizer.zero_grad()
    assert right[-1] > right[0]


@pytest.mark.sweep  # another process
def test_ddp_neither_computes_nor_breaks_deferred_logits():
    """DDP searches the outputs for tensors; the Trainer makes it search for unused parameters."""
    (found,) = ranks.in_a_group(1, ddp_logits_worker.results)
    expected = {
        "type": "LogitsOutput",
        "computed_by_forward": False,
        "computed_by_backward": False,
        "logits_equal": True,
    }
    assert found == {False: expected, True: expected}


# -- accelerate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForMaskedLM", "Model"])
def test_prepared_in_bf16_unwrapped_and_saved(tmp_path, fresh_accelerator, task):
    accelerator = fresh_accelerator.Accelerator(cpu=True, mixed_precision="bf16")
    stock = hf_model(
        "bert", getattr(transformers, "AutoModel" + task.removeprefix("Model")), num_hidden_layers=2
    )
    stock.save_pretrained(tmp_path / "stock")
    model = getattr(fastbert, "AutoModel" + task.removeprefix("Model")).from_pretrained(tmp_path / "stock")
    prepared = accelerator.prepare(model)
    inputs = inputs_for("bert", "ForSequenceClassification")
    with torch.no_grad():
        found, exact = prepared(**inputs)[0], stock(**inputs)[0]
    kept = inputs["attention_mask"].bool() if found.dim() == 3 else slice(None)
    assert found.dtype == torch.float32
    error = (found[kept] - exact[kept]).norm() / exact[kept].norm()
    assert 1e-4 < error < 0.02  # bf16's
    state = accelerator.get_state_dict(prepared)
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert plain is model
    plain.save_pretrained(
        tmp_path / "a",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=state,
    )
    assert_same_state(type(model).from_pretrained(tmp_path / "a"), stock)
    accelerator.save_model(model, tmp_path / "b")  # weights alone, as for any model
    model.config.save_pretrained(tmp_path / "b")
    assert_same_state(type(model).from_pretrained(tmp_path / "b"), stock)
    assert_same_state(type(stock).from_pretrained(tmp_path / "b"), stock)


# -- what isinstance says ------------------------------------------------------------------------------------


def test_models_and_outputs_pass_for_those_of_transformers():
    model = native("ForMaskedLM")
    output = model(**batch("bert"))
    for thing, theirs in ((model, transformers.PreTrainedModel), (output, transformers.utils.ModelOutput)):
        assert isinstance(thing, theirs)
        assert isinstance(thing, (type(thing), PreTrainedModel, outputs.ModelOutput))
        assert not issubclass(type(thing), theirs)
        assert thing.__class__.__name__ == type(thing).__name__
        assert thing.__class__ is thing.__class__
        assert issubclass(thing.__class__, type(thing))
    assert not isinstance(model, (transformers.BertForMaskedLM, transformers.PreTrainedConfig))
    for made in (copy.deepcopy(model), model.__class__(model.config)):
        assert type(made) is type(model)
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        made = pickle.loads(pickle.dumps(model, protocol))
        assert type(made) is type(model)
        assert_same_state(made, model)
        assert type(pickle.loads(pickle.dumps(output, protocol))) is outputs.LogitsOutput
    for made in (
        copy.copy(output),
        pickle.loads(pickle.dumps(output)),
        output.__class__(logits=output.logits),
    ):
        assert type(made) is outputs.LogitsOutput
        assert torch.equal(made.logits, output.logits)

    class Sub(model.__class__):
        """A subclass, as FSDP makes one of a module's class."""

    assert Sub.__mro__[1] is type(model)
    assert type(Sub) is type
    before = model.__class__
    model.__class__ = Sub
    assert type(model) is Sub
    assert isinstance(model, transformers.PreTrainedModel)
    model.__class__ = before
    assert type(model) is fastbert.BertForMaskedLM


def test_nothing_of_transformers_is_imported(monkeypatch):
    model = native_encoder()
    others = {"transformers", "accelerate", "peft"}
    for name in [name for name in sys.modules if name.partition(".")[0] in others]:
        monkeypatch.delitem(sys.modules, name)
    output = model(torch.ones(1, 3, dtype=torch.long))
    assert model.__class__ is type(model)
    assert output.__class__ is type(output)
    assert isinstance(model, torch.nn.Module)
    assert isinstance(output, dict)
    assert not others & sys.modules.keys()


# -- outputs -------------------------------------------------------------------------------------------------


def test_outputs_behave_as_those_of_transformers():
    x, y, z = torch.ones(()), torch.ones(2, 3), (torch.ones(1),)
    mine = outputs.LogitsOutput(x, y, hidden_states=z)
    theirs = transformers.modeling_outputs.MaskedLMOutput(x, y, hidden_states=z)
    for ask in (
        lambda o: list(o),
        lambda o: list(o.keys()),
        lambda o: [id(v) for v in o.values()],
        len,
        lambda o: [(k, id(v)) for k, v in o.items()],
        lambda o: id(o["logits"]),
        lambda o: id(o.logits),
        lambda o: id(o[0]),
        lambda o: id(o[-1]),
        lambda o: [id(v) for v in o[:2]],
        lambda o: o.attentions,
        lambda o: [id(v) for v in o.to_tuple()],
        lambda o: "attentions" in o,
        lambda o: o.get("loss", 7),
        lambda o: o.get("attentions", 7),
        lambda o: [id(v) for v in _pytree.tree_leaves(o)],
        lambda o: isinstance(o, dict),
        lambda o: [*map(id, (lambda loss, logits, states: (loss, logits, states))(*o[:]))],
    ):
        assert ask(mine) == ask(theirs)
    for wrong in (lambda o: o["attentions"], lambda o: o["nothing"], lambda o: o[3]):
        for o in (mine, theirs):
            with pytest.raises((KeyError, IndexError)):
                wrong(o)
    for wrong in (
        lambda o: o.pop("loss"),
        lambda o: o.update(loss=y),
        lambda o: o.__delitem__("loss"),
        lambda o: o.setdefault("loss", y),
        lambda o: o.popitem(),
        lambda o: o.clear(),
    ):
        with pytest.raises(TypeError, match="LogitsOutput: its fields cannot be removed"):
            wrong(mine)
    for o in (mine, theirs):  # as the fill-mask pipeline does
        o["input_ids"] = y
        assert o["input_ids"] is o.input_ids is o[3] is y
        o["input_ids"] = x
        assert o["input_ids"] is o.input_ids is o[3] is x
    for made in (copy.copy(mine), _pytree.tree_map(lambda t: t, mine)):
        assert list(made) == list(mine)
        assert made.input_ids is x
    mine = outputs.LogitsOutput(x, y, hidden_states=z)

    mine.logits = mine["loss"] = z[0]
    assert mine[0] is mine[1] is mine.loss is mine["logits"] is z[0]
    mine.loss = None
    assert list(mine) == ["logits", "hidden_states"]
    mine.loss = x  # back in the place of the field
    assert list(mine) == ["loss", "logits", "hidden_states"]
    mapped = _pytree.tree_map(lambda t: t + 1, mine)
    assert type(mapped) is outputs.LogitsOutput
    assert mapped.loss == 2


def test_an_output_is_made_from_a_mapping_as_accelerate_makes_it():
    from accelerate.utils import convert_to_fp32, send_to_device

    half = outputs.LogitsOutput(
        None, torch.ones(2, dtype=torch.bfloat16), (torch.ones(1).half(), torch.ones(1))
    )
    for made in (convert_to_fp32(half), send_to_device(convert_to_fp32(half), "cpu")):
        assert type(made) is outputs.LogitsOutput
        assert list(made) == ["logits", "hidden_states"]
        assert made.loss is None
        assert made.logits.dtype == made.hidden_states[0].dtype == torch.float32
    with pytest.raises(TypeError, match=r"LogitsOutput: expected a mapping of its fields .* got \['other'\]"):
        outputs.LogitsOutput({"other": 1})
    with pytest.raises(TypeError, match=r"got \['loss'\] beside \['logits'\]"):
        outputs.LogitsOutput({"loss": 1}, torch.ones(1))


# -- config --------------------------------------------------------------------------------------------------


def test_config_answers_what_transformers_asks(tmp_path):
    config = fastbert.EncoderConfig(num_hidden_layers=3, eos_token_id=3, attention_probs_dropout_prob=0.2)
    assert config.get_text_config() is config.get_text_config(decoder=True) is config
    assert config.is_encoder_decoder is False
    assert config.bos_token_id is config.architectures is config.dtype is None
    assert (config.eos_token_id, config.use_return_dict, config.name_or_path) == (3, True, "")
    assert config.to_diff_dict() == {
        "model_type": "bert",
        "num_hidden_layers": 3,
        "eos_token_id": 3,
        "attention_probs_dropout_prob": 0.2,
    }
    assert json.loads(config.to_json_string(use_diff=True)) == config.to_diff_dict()
    other = fastbert.EncoderConfig("distilbert", num_hidden_layers=3)
    assert other.to_diff_dict() == {"model_type": "distilbert", "n_layers": 3}
    assert json.loads(config.to_json_string()) == config.to_dict()
    config.name_or_path = "before"
    config.update({"num_labels": 4, "hidden_size": 96})
    assert config.name_or_path == "before"
    assert (config.num_labels, config.hidden_size, config.num_hidden_layers) == (4, 96, 3)
    with pytest.raises(ValueError, match="num_attention_heads: 12 heads do not divide hidden_size 97"):
        config.update({"hidden_size": 97, "num_labels": 5})
    assert (config.num_labels, config.hidden_size) == (4, 96)
    config.name_or_path = "somewhere"
    config.save_pretrained(tmp_path)
    assert "somewhere" not in (tmp_path / "config.json").read_text()
    config.to_json_file(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "config.json").read_text()
    again = fastbert.AutoConfig.from_pretrained(tmp_path)
    assert again == config
    assert again.name_or_path == str(tmp_path)
    assert again.num_labels == transformers.AutoConfig.from_pretrained(tmp_path).num_labels == 4
    with pytest.raises(ValueError, match=r"push_to_hub: True is not supported, .*upload_folder"):
        config.save_pretrained(tmp_path, push_to_hub=True)


@pytest.mark.parametrize("name", ["distilbert", "albert", "mpnet"])
def test_auto_config(tmp_path, name):
    stock = hf_model(name)
    stock.save_pretrained(tmp_path / "sub")
    config = fastbert.AutoConfig.from_pretrained(tmp_path, subfolder="sub", num_labels=7)
    assert type(config) is fastbert.EncoderConfig
    assert (config.model_type, config.hidden_size, config.num_labels) == (name, 48, 7)
    assert type(fastbert.AutoModel.from_config(config)).__name__ == type(stock).__name__
    assert fastbert.AutoConfig.for_model(name, num_labels=4) == fastbert.EncoderConfig(name, num_labels=4)
    with pytest.raises(ValueError, match="trust_remote_code: True is not supported"):
        fastbert.AutoConfig.from_pretrained(tmp_path / "sub", trust_remote_code=True)
    with pytest.raises(fastbert.CheckpointError, match="has no folder 'other', which subfolder names"):
        fastbert.AutoConfig.from_pretrained(tmp_path, subfolder="other")
    for auto, given in (
        (fastbert.AutoModel, ()),
        (fastbert.AutoModelForMaskedLM, ()),
        (fastbert.AutoModel, (1,)),
    ):
        with pytest.raises(TypeError, match=rf"{auto.__name__}: use from_pretrained\(path\) or from_config"):
            auto(*given)
    with pytest.raises(TypeError, match=r"config: .*got str; from_pretrained\(path\) loads a directory"):
        fastbert.BertModel("some/folder")
    with pytest.raises(TypeError, match="AutoConfig: use from_pretrained"):
        fastbert.AutoConfig()


def test_what_is_absent_says_so():
    model = native_encoder()
    with pytest.raises(NotImplementedError, match=r"push_to_hub: .* huggingface_hub.upload_folder"):
        model.push_to_hub("me/model")
    assert model.can_generate() is False
    model.add_model_tags("a")
    model.add_model_tags(["b", "a"])
    assert model.model_tags == ["a", "b"]
    assert type(model).model_tags is None


# -- peft ----------------------------------------------------------------------------------------------------


def test_lora_on_a_masked_lm(tmp_path):
    peft = pytest.importorskip("peft")
    model = native("ForMaskedLM").train()
    inputs = inputs_for("bert", "ForMaskedLM")
    inputs |= labels_for(model, inputs)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    )
    assert not any("decoder" in name for name, _ in adapted.named_parameters() if "lora" in name)
    output = adapted(**inputs)
    output.loss.backward()
    expected = adapted(**inputs, output_logits=True).logits
    assert torch.equal(output.logits, expected)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(native("ForMaskedLM"), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**inputs).logits, adapted.eval()(**inputs).logits)
