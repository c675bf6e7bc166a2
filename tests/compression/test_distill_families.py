"""Layers of BERT as a DistilBERT, and back: the same function, and files that transformers loads."""

from __future__ import annotations

import pytest
import torch
import transformers

import fastbert
from fastbert.compression import shrink
from fastbert.compression.distillation.families import in_family
from tests.support.rule_tasks import SIZES, quick, tiny_model, written

TASKS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
IDS = torch.tensor([[2, 7, 9, 11, 3], [2, 30, 5, 8, 3]])


def model(task, model_type="bert", **config):
    torch.manual_seed(0)
    prefix = {"bert": "Bert", "distilbert": "DistilBert", "roberta": "Roberta"}[model_type]
    made = getattr(fastbert, f"{prefix}{task}")(fastbert.EncoderConfig(model_type, **{**SIZES, **config}))
    for name, p in made.named_parameters():
        if name.endswith("bias") or "norm" in name.lower():
            # Equal values would hide an exchange
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return made.eval()


@torch.no_grad()
def outputs(model):
    found = model(IDS, output_hidden_states=True)
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits]), found.hidden_states
    return found[0], found.hidden_states


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("of", ["bert", "distilbert"])
def test_the_function_is_the_same_and_transformers_loads_it(tmp_path, task, of):
    before = model(task, of)
    state = {key: t.clone() for key, t in before.state_dict().items()}
    to = {"bert": "distilbert", "distilbert": "bert"}[of]
    after = in_family(before, to)
    assert after.config.model_type == to
    (scores, states), (found, found_states) = outputs(before), outputs(after)
    for one, other in zip(states, found_states, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=2e-5)
    if task == "ForSequenceClassification":
        assert not torch.allclose(found, scores, atol=0.01)
        inner = {key: t for key, t in after.state_dict().items() if "pooler" in key or "classifier" in key}
        expected = [t for key, t in state.items() if "pooler" in key or "classifier" in key]
        assert all(any(torch.equal(t, other) for other in expected) for t in inner.values())
        assert len(inner) == len(expected) == 4
    else:
        torch.testing.assert_close(found, scores, rtol=1e-5, atol=2e-5)
    after.save_pretrained(tmp_path)
    prefix = {"bert": "Bert", "distilbert": "DistilBert"}[to]
    stock, report = getattr(transformers, f"{prefix}{task}").from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["unexpected_keys"]
    assert not [key for key in report["missing_keys"] if task != "Model" or "pooler" not in key]
    with torch.no_grad():
        torch.testing.assert_close(stock.eval()(IDS)[0], after(IDS)[0], rtol=1e-5, atol=2e-5)
    assert all(torch.equal(t, state[key]) for key, t in before.state_dict().items())
    pointers = {t.data_ptr() for t in before.parameters()}
    assert not pointers & {t.data_ptr() for t in after.parameters()}


def test_a_masked_lm_stays_tied():
    before = model("ForMaskedLM")
    after = in_family(before, "distilbert")
    assert after.get_output_embeddings().weight is after.get_input_embeddings().weight
    back = in_family(after, "bert")
    assert back.cls.predictions.decoder.bias is back.cls.predictions.bias
    torch.testing.assert_close(outputs(back)[0], outputs(before)[0], rtol=1e-5, atol=2e-5)


def test_a_cut_teacher_becomes_plain():
    cut = shrink.without(model("ForTokenClassification"), heads={0: [1]}, neurons={1: range(40)})
    after = in_family(cut, "distilbert")
    assert (after.config.pruned_heads, after.config.intermediate_sizes) == (None, None)
    torch.testing.assert_close(outputs(after)[0], outputs(cut)[0], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("of", "to", "config", "message"),
    [
        ("roberta", "distilbert", {}, "expected bert or distilbert, .* 'distilbert' from layers of roberta"),
        ("bert", "roberta", {}, "expected bert or distilbert, .*, got 'roberta' from layers of bert"),
        ("bert", "distilbert", {"layer_norm_eps": 1e-5}, "norms .* have eps 1e-12, the teacher's have 1e-05"),
        (
            "bert",
            "distilbert",
            {"is_decoder": True},
            "expected a teacher without config is_decoder, got True",
        ),
        (
            "bert",
            "distilbert",
            {"fixed_heads": ["current"] + ["learned"] * 3},
            ".* without config fixed_heads",
        ),
    ],
)
def test_other_mathematics_is_refused(of, to, config, message):
    with pytest.raises(ValueError, match=f"student_family: {message}"):
        in_family(model("Model", of, **config), to)


def test_a_run_of_layers_writes_what_transformers_loads(tmp_path):
    tiny_model(tmp_path / "base")
    written("csv", tmp_path / "data", 48, 24)
    quick("csv", tmp_path / "base", tmp_path / "data", tmp_path / "teacher", epochs=6)
    given = {"epochs": 3, "batch_size": 8, "max_length": 32, "lr": 1e-3, "progress": False}
    run = tmp_path / "teacher", [0], tmp_path / "data", tmp_path / "out", "kd"
    found = fastbert.distill(*run, student_family="distilbert", **given)
    assert found.scores["student"]["dev"]["accuracy"] > 0.9
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    read = words("the red cat sees dog", return_tensors="pt")
    assert type(stock).__name__ == "DistilBertForSequenceClassification"
    assert read.keys() == {"input_ids", "attention_mask"}
    with torch.no_grad():
        torch.testing.assert_close(stock(**read).logits, found.student(read["input_ids"]).logits)
    assert stock.config.id2label == found.teacher.config.id2label
    with pytest.raises(
        ValueError, match="student_family: expected None, as the student is no list of layers"
    ):
        fastbert.distill(run[0], run[0], *run[2:], student_family="distilbert", **given)
