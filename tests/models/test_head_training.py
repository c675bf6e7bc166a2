"""Task heads in training: dropout, recomputed layers, torch.compile, other dtypes."""

from __future__ import annotations

import pytest
import torch
import transformers

from fastbert.models.config import EncoderConfig
from fastbert.models.deferred import DeferredTensor
from fastbert.models.families import FAMILIES
from tests.support.model_pairs import CASES, NO_DROPOUT, TASKS, build, close, inputs_for, labels_for


def assert_drawn_alike(hf, model, inputs):
    outputs = []
    for m in (hf, model):
        torch.manual_seed(11)
        outputs.append(m(**inputs))
    for key in outputs[1]:
        close(outputs[1][key], outputs[0][key])


@pytest.mark.parametrize(("name", "task"), CASES)
def test_head_dropout_is_transformers_own(name, task):
    """Only the head has dropout here. It draws from torch's generator in transformers' order and shapes."""
    keys = {
        "albert": ["classifier_dropout_prob"],
        "albert-groups": ["classifier_dropout_prob"],
        "distilbert": ["seq_classif_dropout", "qa_dropout"],
        "electra": ["classifier_dropout", "summary_last_dropout"],
    }.get(name, ["classifier_dropout"])
    encoder = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    inputs = inputs_for(name, task)
    del inputs["attention_mask"]
    for probabilities in (dict.fromkeys(keys, 0.3), {}):
        hf, model = (m.train() for m in build(name, task, **encoder, **probabilities))
        assert_drawn_alike(hf, model, inputs)


def test_a_heads_dropout_under_a_hook_is_transformers_own():
    """The module around the head is called then. RoBERTa drops before the dense layer and behind it."""
    encoder = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models = build("roberta", "ForSequenceClassification", classifier_dropout=0.3, **encoder)
    hf, model = (m.train() for m in models)
    model.classifier.register_forward_hook(lambda *_: None)
    inputs = inputs_for("roberta", "ForSequenceClassification")
    del inputs["attention_mask"]
    assert_drawn_alike(hf, model, inputs)


def test_which_layers_are_recomputed(monkeypatch):
    from fastbert.execution import eager

    _, model = build("bert", "ForTokenClassification", num_hidden_layers=5)
    inputs = inputs_for("bert", "ForTokenClassification")
    seen = []

    def recompute(layer, form, parts, *args, use_reentrant):
        assert use_reentrant is False
        seen.append(model.bert.layer_list().index(parts.owner))
        return layer(form, parts, *args)

    monkeypatch.setattr(eager, "checkpoint", recompute)
    model.train()
    for every, expected in ((1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])):
        seen.clear()
        model.activation_checkpointing_enable({"use_reentrant": False}, every)
        model(**inputs)
        assert seen == expected
    model.activation_checkpointing_disable()
    assert not model.is_activation_checkpointing
    model(**inputs)
    assert seen == expected
    for arguments, error in (
        (({"use_reentrant": True},), "use_reentrant=True is not supported"),
        (({"early_stop": False},), "'early_stop' is not supported"),
        ((None, 0), "every_n_layers: expected an integer >= 1, got 0"),
        ((None, True), "every_n_layers: expected an integer >= 1, got True"),
        ((None, 1, True), "offload: True is not supported"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            model.activation_checkpointing_enable(*arguments)
    assert not model.is_gradient_checkpointing


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "task", "training"),
    [
        ("bert", "ForMaskedLM", False),
        ("bert", "ForPreTraining", True),
        ("bert", "ForQuestionAnswering", False),
        ("roberta", "ForMultipleChoice", False),
        ("electra", "ForPreTraining", False),
    ],
)
def test_compiled_in_one_graph(name, task, training):
    _, model = build(name, task, num_hidden_layers=1, **(NO_DROPOUT if training else {}))
    inputs = inputs_for(name, task)
    labels = labels_for(model, inputs)
    if task == "ForQuestionAnswering":
        labels = {k: inputs["attention_mask"].argmax(1) for k in labels}
    inputs |= labels
    torch._dynamo.reset()
    if training:
        model.train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    grads = []
    for output in (compiled, model(**inputs)):
        model.zero_grad()
        output.loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for key, value in model(**inputs).items():
        if isinstance(value, DeferredTensor):
            for touch in (lambda t: t.argmax(-1), lambda t: torch.argmax(t, -1)):
                words = f"^{key}: not computed .*output_logits"
                with pytest.raises((AttributeError, TypeError), match=words):
                    touch(compiled[key])
        else:
            close(compiled[key], value, 1e-6)
    assert ("prediction_logits" in compiled) == (task == "ForPreTraining" and name == "bert")
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    for task in TASKS:
        _, model = build("bert", task)
        model.to(dtype)
        inputs = inputs_for("bert", task)
        labels = labels_for(model, inputs)
        if task == "ForQuestionAnswering":
            inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        output = model(**inputs, **labels)
        assert output[1].dtype == dtype
        assert output.loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        output.loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name in transformers.CONFIG_MAPPING])
def test_config_defaults_are_transformers_own(model_type):
    theirs = transformers.AutoConfig.for_model(model_type).to_dict()
    mine = EncoderConfig(model_type).to_dict()
    shared = (mine.keys() & theirs.keys()) - {"id2label"}
    assert {k: mine[k] for k in shared} == {k: theirs[k] for k in shared}
    dropouts = {k for k in theirs if "dropout" in k}
    assert dropouts <= mine.keys()
