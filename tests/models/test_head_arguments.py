"""Bad arguments of the task heads are refused by name."""

from __future__ import annotations

import pytest
import torch

import fastbert
from fastbert.models.config import EncoderConfig
from fastbert.models.families import FAMILIES
from tests.support.model_pairs import build, inputs_for, labels_for, pair


def _bad(task, what, match, error=ValueError, name="bert", **change):
    return pytest.param(name, task, change, error, match, id=f"{task}-{what}")


@pytest.mark.parametrize(
    ("name", "task", "change", "error", "match"),
    [
        _bad("ForMaskedLM", "range", r"labels: 120 at \(0, 1\)", labels=lambda b: _at(b, (0, 1), 120)),
        _bad("ForMaskedLM", "negative", r"labels: -1 at \(0, 1\)", labels=lambda b: _at(b, (0, 1), -1)),
        _bad(
            "ForMaskedLM",
            "masked",
            r"labels: 7 at \(1, 0\), where attention_mask",
            labels=lambda b: _at(b, (1, 0), 7),
        ),
        _bad("ForMaskedLM", "shape", "labels: expected shape", labels=lambda b: _at(b, (0, 1), 7)[:, 1:]),
        _bad("ForMaskedLM", "dtype", "labels: expected int64", TypeError, labels=lambda b: torch.ones(4, 18)),
        _bad("ForMaskedLM", "type", "labels: expected a torch.Tensor", TypeError, labels=lambda b: [[1]]),
        _bad("ForTokenClassification", "range", "labels: 5 at", labels=lambda b: _at(b, (0, 1), 5)),
        _bad("ForTokenClassification", "masked", "where attention_mask", labels=lambda b: _at(b, (1, 0), 1)),
        _bad(
            "ForSequenceClassification", "range", "labels: 5 at", labels=lambda b: torch.tensor([0, 1, 5, 2])
        ),
        _bad(
            "ForSequenceClassification",
            "shape",
            r"labels: expected shape \(4,\)",
            labels=lambda b: torch.zeros(3).long(),
        ),
        _bad(
            "ForSequenceClassification",
            "multi",
            r"labels: .*several labels per sequence: expected shape \(4, 5\)",
            labels=lambda b: torch.zeros(4),
        ),
        _bad(
            "ForSequenceClassification",
            "left",
            "attention_mask: position 0 of sequence 2",
            attention_mask=lambda b: _at(b, (2, 0), 0, "attention_mask"),
        ),
        _bad(
            "ForNextSentencePrediction", "range", "labels: 2 at", labels=lambda b: torch.tensor([0, 1, 2, 1])
        ),
        _bad(
            "ForPreTraining",
            "range",
            "next_sentence_label: 2 at",
            next_sentence_label=lambda b: torch.tensor([0, 1, 2, 1]),
        ),
        _bad(
            "ForPreTraining",
            "order",
            "sentence_order_label: 3 at",
            name="albert",
            sentence_order_label=lambda b: torch.tensor([0, 1, 3, 1]),
        ),
        _bad("ForMultipleChoice", "range", "labels: 2 at", labels=lambda b: torch.tensor([0, 2])),
        _bad(
            "ForMultipleChoice",
            "flat",
            r"input_ids: expected shape \(batch, choices",
            input_ids=lambda b: b["input_ids"][0],
        ),
        _bad(
            "ForMultipleChoice",
            "mask",
            "attention_mask: expected shape",
            attention_mask=lambda b: b["attention_mask"][0],
        ),
        _bad(
            "ForMultipleChoice",
            "neither",
            "input_ids, inputs_embeds: expected exactly one",
            input_ids=lambda b: None,
        ),
        _bad(
            "ForQuestionAnswering",
            "dtype",
            "start_positions: expected int64",
            TypeError,
            start_positions=lambda b: torch.zeros(4),
        ),
        _bad(
            "ForQuestionAnswering",
            "shape",
            r"end_positions: expected shape \(4,\)",
            end_positions=lambda b: torch.zeros(5).long(),
        ),
        _bad(
            "ForQuestionAnswering",
            "masked",
            "start_positions: 0 in sequence 1 is a masked token",
            start_positions=lambda b: torch.zeros(4).long(),
        ),
    ],
)
def test_bad_arguments(name, task, change, error, match):
    _, model = pair(name, task)
    model.config.problem_type = None
    inputs = inputs_for(name, task)
    inputs.update({k: make(inputs) for k, make in change.items()})
    with pytest.raises(error, match=match):
        model(**inputs)


def _at(inputs, where, value, name="labels"):
    t = inputs[name].clone() if name in inputs else torch.full_like(inputs["input_ids"], -100)
    t[where] = value
    return t


def test_families_without_a_head_are_refused_by_name():
    config = {
        m: EncoderConfig(m, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
        for m in FAMILIES
    }
    with pytest.raises(ValueError, match=r"'roberta' has no head 'ForNextSentencePrediction'.*bert, ernie"):
        fastbert.AutoModelForNextSentencePrediction.from_config(config["roberta"])
    with pytest.raises(ValueError, match="'distilbert' has no head 'ForPreTraining'"):
        fastbert.BertForPreTraining(config["distilbert"])
    with pytest.raises(ValueError, match="RobertaForMaskedLM is for 'roberta', got 'bert'"):
        fastbert.RobertaForMaskedLM(config["bert"])
    with pytest.raises(TypeError, match="from_pretrained"):
        fastbert.AutoModelForMaskedLM(config["bert"])
    with pytest.raises(ValueError, match="num_labels: expected 2"):
        fastbert.BertForQuestionAnswering(EncoderConfig(hidden_size=24, num_labels=3))
    with pytest.raises(ValueError, match="num_labels: expected 2"):
        fastbert.AlbertForPreTraining(
            EncoderConfig("albert", hidden_size=32, num_attention_heads=2, intermediate_size=8, num_labels=3)
        )
    config["electra"].summary_type = "mean"
    with pytest.raises(ValueError, match="summary_type: only 'first'"):
        fastbert.ElectraForMultipleChoice(config["electra"])


def test_bad_labels_in_training():
    _, model = build("bert", "ForMaskedLM")
    model.train()
    inputs = inputs_for("bert", "ForMaskedLM")
    labels = labels_for(model, inputs)["labels"]
    with pytest.raises(ValueError, match="labels: expected shape"):
        model(**inputs, labels=labels[:, 1:])
    with pytest.raises(ValueError, match="labels: 120 at"):
        model(**inputs, labels=labels.where(labels == -100, 120))
