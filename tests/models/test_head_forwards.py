"""Outputs, losses and gradients of the task heads, against transformers, for every family."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import transformers

from tests.support.accelerated_models import calls, same_gradients, same_outputs
from tests.support.model_pairs import (
    CASES,
    TASKS,
    build,
    close,
    inputs_for,
    labels_for,
    pair,
    token_level,
    trio,
)

# --- against transformers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), CASES)
def test_names_outputs_and_loss_equal_transformers(name, task):
    hf, model, *fast = trio(name, task)
    assert type(model).__name__ == type(hf).__name__
    assert {k: v.shape for k, v in model.state_dict().items()} == {
        k: v.shape for k, v in hf.state_dict().items()
    }

    inputs = inputs_for(name, task)
    # else accelerated models do not pack
    inputs["attention_mask"][..., 0], inputs["input_ids"][..., 0] = 1, 7
    if task == "ForQuestionAnswering":  # the loss of a padded batch has its own test
        del inputs["attention_mask"]
        inputs["input_ids"].masked_fill_(inputs["input_ids"] == 1, 8)
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    labels = labels_for(hf, {**inputs, "attention_mask": kept})
    with torch.no_grad():
        expected = hf(**inputs, **labels, output_hidden_states=True, output_attentions=True)
        actual = model(**inputs, **labels, output_hidden_states=True, output_attentions=True)
        same_outputs(actual, expected, kept, 2e-5, types=False)
        for each in fast:
            with calls(each, packed=1, padded=0, stock=0):  # which has no probabilities to return
                actual_fast = each(**inputs, **labels, output_hidden_states=True)
            same_outputs(actual_fast, hf(**inputs, **labels, output_hidden_states=True), kept)
    for key, logits in actual.items():
        if "logits" in key and token_level(logits, kept):
            assert logits[~kept].eq(0).all()


@pytest.mark.parametrize(
    ("name", "task", "dtype", "tolerance"),
    # deep ALBERT's gradients are so ill-conditioned that transformers' own float32 ones are off by 4e-4
    [(*case, torch.float64, 1e-9) for case in CASES]
    + [(*case, torch.float32, 1e-4) for case in CASES if case[0] in ("bert", "distilbert", "mpnet")],
)
def test_gradients_equal_transformers(name, task, dtype, tolerance):
    hf, *models = (copy.deepcopy(m).to(dtype) for m in trio(name, task))
    inputs = inputs_for(name, task, seed=1)
    inputs["attention_mask"][..., 0], inputs["input_ids"][..., 0] = 1, 7
    if task == "ForQuestionAnswering":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
        inputs["input_ids"].masked_fill_(inputs["input_ids"] == 1, 8)
    labels = labels_for(hf, inputs, seed=1)
    hf(**inputs, **labels).loss.backward()
    for model in models:
        with calls(model, **({"packed": 1, "stock": 0} if model is not models[0] else {})):
            model(**inputs, **labels).loss.backward()
        same_gradients(model, hf, tolerance)


# --- arguments and outputs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_tuples(task):
    hf, model = pair("bert", task)
    inputs = inputs_for("bert", task)
    if task == "ForQuestionAnswering":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    with torch.no_grad():
        for extra in ({}, labels_for(hf, inputs), {"output_hidden_states": True}):
            expected = hf(**inputs, **extra, return_dict=False)
            actual = model(**inputs, **extra, return_dict=False)
            assert isinstance(actual, tuple)
            assert [type(a) for a in actual] == [type(e) for e in expected]
            for a, e in zip(actual, expected, strict=True):
                assert len(a) == len(e) if isinstance(a, tuple) else a.shape == e.shape
            named = model(**inputs, **extra)
            assert torch.equal(named[0], actual[0])
    model.config.return_dict = False
    try:
        assert isinstance(model(**inputs), tuple)
    finally:
        model.config.return_dict = True


@pytest.mark.parametrize("task", TASKS)
def test_positional_arguments_stand_where_transformers_has_them(task):
    for name in ("bert", "albert"):
        hf, model = pair(
            name, "ForMaskedLM" if name == "albert" and task == "ForNextSentencePrediction" else task
        )
        decoder_only = ("encoder_hidden_states", "encoder_attention_mask")
        theirs = [
            k for k in inspect.signature(type(hf).forward).parameters if k not in (*decoder_only, "kwargs")
        ]
        assert list(inspect.signature(type(model).forward).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("distilbert", "ForTokenClassification", 2),
        ("mpnet", "ForMaskedLM", 2),
        ("ernie", "ForMaskedLM", 3),
        ("longformer", "ForTokenClassification", 2),
        ("roberta", "ForMultipleChoice", 1),
    ],
)
def test_arguments_that_stand_elsewhere_in_transformers_must_be_named(name, task, count):
    hf, model = pair(name, task)
    theirs, mine = (list(inspect.signature(type(m).forward).parameters)[1:] for m in (hf, model))
    assert mine[:count] == theirs[:count]
    assert mine[count] != theirs[count]
    inputs = inputs_for(name, task)
    given = [inputs[k] for k in mine[:count]]
    inspect.signature(model.forward).bind(*given)  # as torch.export does
    with torch.no_grad():
        assert torch.equal(model(*given)[0], model(**dict(zip(mine, given, strict=False)))[0])
    words = f"at most {count} positional arguments, got {count + 1}; pass {mine[count]} by"
    with pytest.raises(TypeError, match=words):
        model(*given, given[0])


@pytest.mark.parametrize(
    ("name", "task"), [(n, t) for n, t in CASES if n in ("bert", "mpnet") and t != "ForMultipleChoice"]
)
def test_masks_of_keys_alone(name, task):
    hf, model = pair(name, task)
    inputs = inputs_for(name, task)
    keys = inputs.pop("attention_mask")[:, None, None, :].bool()
    additive = torch.zeros(keys.shape).masked_fill(~keys, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = hf(**inputs, attention_mask=additive.expand(-1, -1, keys.shape[-1], -1)).to_tuple()
        for mask in (keys, additive):
            for ours, theirs in zip(model(**inputs, attention_mask=mask).to_tuple(), expected, strict=True):
                torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def test_inputs_embeds_and_no_mask():
    for task in ("ForMaskedLM", "ForMultipleChoice"):
        hf, model = pair("bert", task)
        inputs = inputs_for("bert", task)
        embeds = hf.bert.embeddings.word_embeddings(inputs["input_ids"])
        with torch.no_grad():
            close(model(inputs_embeds=embeds).logits, hf(inputs_embeds=embeds).logits)


# --- losses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        (None, 1, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
        ("regression", 3, torch.linspace(-1, 1, 12).reshape(4, 3)),
        (None, 3, torch.tensor([0, 2, 1, 1])),
        (None, 3, torch.tensor([0, -100, 1, 1])),
        (None, 3, torch.tensor([[0.0, 1.0, 1.0]] * 4)),
        ("multi_label_classification", 3, torch.tensor([[0.0, 1.0, 0.3]] * 4)),
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1])),
    ],
)
@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta"])
def test_problem_types(name, problem, num_labels, labels):
    hf, model = build(name, "ForSequenceClassification", num_labels=num_labels, problem_type=problem)
    inputs = inputs_for(name, "ForSequenceClassification")
    with torch.no_grad():
        expected, actual = hf(**inputs, labels=labels), model(**inputs, labels=labels)
    close(actual.loss, expected.loss, 1e-5)
    close(actual.logits, expected.logits)
    assert model.config.problem_type == hf.config.problem_type


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_a_pipeline_serves_the_labels_that_were_trained(tmp_path, compiled):
    """Several labels per sequence get a sigmoid each; a refused call decides nothing."""
    _, model = build("bert", "ForSequenceClassification", num_labels=2)
    inputs = inputs_for("bert", "ForSequenceClassification")
    words = r"float32 numbers with problem_type None mean several labels.*\(4, 2\), got \(4,\).*pass integers"
    with pytest.raises(ValueError, match=words):
        model(**inputs, labels=torch.zeros(4))
    assert model.config.problem_type is None
    call = torch.compile(model, backend="eager") if compiled else model
    call(**inputs, labels=torch.ones(4, 2))
    model.save_pretrained(tmp_path)
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert stock.config.problem_type == "multi_label_classification"


def test_problem_type_takes_integers_where_it_must():
    _, model = build("bert", "ForSequenceClassification", num_labels=1)
    inputs = inputs_for("bert", "ForSequenceClassification")
    ones = model(**inputs, labels=torch.ones(4, dtype=torch.long))
    close(ones.loss, model(**inputs, labels=torch.ones(4)).loss)
    _, model = build(
        "bert", "ForSequenceClassification", num_labels=3, problem_type="multi_label_classification"
    )
    labels = torch.tensor([[0, 1, 1]] * 4)
    close(model(**inputs, labels=labels).loss, model(**inputs, labels=labels.float()).loss)


def test_pretraining_has_a_loss_only_with_both_labels():
    for name in ("bert", "albert"):
        _, model = pair(name, "ForPreTraining")
        inputs = inputs_for(name, "ForPreTraining")
        labels = labels_for(model, inputs)
        for key, value in labels.items():
            assert model(**inputs, **{key: value}).loss is None
        assert model(**inputs, **labels).loss.isfinite()


def test_question_answering_positions_are_clamped():
    hf, model = pair("distilbert", "ForQuestionAnswering")
    inputs = inputs_for("distilbert", "ForQuestionAnswering")
    del inputs["attention_mask"]
    for shape in ((4,), (4, 1)):
        start = torch.tensor([-3, 17, 18, 500]).reshape(shape)
        end = torch.tensor([2, 18, 500, 17]).reshape(shape)
        with torch.no_grad():
            close(
                model(**inputs, start_positions=start, end_positions=end).loss,
                hf(**inputs, start_positions=start, end_positions=end).loss,
                1e-5,
            )
    assert model(**inputs, start_positions=start).loss is None


def test_electra_discriminator_counts_kept_tokens_only():
    hf, model = pair("electra", "ForPreTraining")
    inputs = inputs_for("electra", "ForMaskedLM")
    kept = inputs["attention_mask"].bool()
    labels = torch.ones(4, 18, dtype=torch.long).where(kept, -100)
    labels[:, 9] = 0
    with torch.no_grad():
        close(model(**inputs, labels=labels).loss, hf(**inputs, labels=labels).loss, 1e-5)
        assert model(inputs["input_ids"], torch.zeros(4, 18), labels=labels).loss == 0.0
    with pytest.raises(ValueError, match="labels: expected 0 or 1, got -100"):
        model(inputs["input_ids"], labels=labels)


def test_a_wholly_masked_sequence_is_finite():
    for name, task in (
        ("bert", "ForSequenceClassification"),
        ("roberta", "ForTokenClassification"),
        ("bert", "ForQuestionAnswering"),
    ):
        _, model = pair(name, task)
        inputs = inputs_for(name, task)
        inputs["attention_mask"][:] = 0
        assert all(t.isfinite().all() for t in model(**inputs).values())
