"""Distillation by every recipe: losses fall, runs resume to the same bits, and caches change nothing."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

import fastbert
from fastbert.compression.distillation.bilstm import BiLstmForSequenceClassification
from fastbert.compression.distillation.cache import FILE
from fastbert.compression.distillation.recipes import RECIPES, TASK, layer_pairs
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.training.loop import TrainingError
from tests.support.rule_tasks import SIZES, WORDS, logged, quick, resumes, tiny_model, written

SMALL = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
OPTIONS = {"lr": 1e-3, "epochs": 3, "batch_size": 8, "max_length": 32, "progress": False}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A teacher of three colours and its data, a masked-LM teacher, and a text."""
    folder = tmp_path_factory.mktemp("distil")
    tiny_model(folder / "base", **DROPS)
    written("csv", folder / "data", 48, 24)
    quick("csv", folder / "base", folder / "data", folder / "teacher", epochs=6)
    tiny_model(folder / "words", kind="BertForMaskedLM", **DROPS)
    lines = (" ".join(random.Random(i).choices(WORDS[5:], k=8)) for i in range(60))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    return folder


def distil(places, recipe, student, output, **options):
    given = {**OPTIONS, **options}
    if RECIPES[recipe].data == TASK:
        return fastbert.distill(places / "teacher", student, places / "data", output, recipe, **given)
    teacher = places / ("words" if recipe == "distilbert" else "base")
    return fastbert.distill(teacher, student, places / "text.txt", output, recipe, **given)


# recipe -> (student, options)
RUNS = {
    "kd": ([0], {}),
    "bilstm": ("bilstm", {"lr": 1e-2, "epochs": 12}),
    "pkd": (fastbert.EncoderConfig(**SIZES), {"epochs": 12}),
    "tinybert-task": (fastbert.EncoderConfig(**SMALL), {"epochs": (12, 9), "lr": 3e-3}),
    "theseus": ([0], {}),
    "distilbert": ([0], {}),
    "tinybert": (fastbert.EncoderConfig(**SMALL), {"epochs": 6}),
    "minilm": (fastbert.EncoderConfig(**SMALL), {"epochs": 6}),
    "minilmv2": (fastbert.EncoderConfig(**SMALL), {"epochs": 6, "relation_heads": 8}),
}


@pytest.mark.parametrize("recipe", RUNS)
def test_losses_fall(places, tmp_path, recipe):
    student, options = RUNS[recipe]
    found = distil(places, recipe, student, tmp_path / "out", **options)
    lines = logged(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    phases, begin, epochs = stored["phases"], 0, sum(phase["epochs"] for phase in stored["phases"])
    for phase in phases:
        own = lines[begin : begin + round(len(lines) * phase["epochs"] / epochs)]
        begin += len(own)
        for name in phase["weights"]:
            curve = [line[f"{name}_loss"] for line in own]
            assert np.mean(curve[-3:]) < np.mean(curve[:3]), name
        weighted = {name: w * own[-1][f"{name}_loss"] for name, w in phase["weights"].items()}
        assert own[-1]["loss"] == pytest.approx(sum(weighted.values()))
    assert len(lines) == begin
    assert stored["last"] == found.last == lines[-1]
    words = load_tokenizer(tmp_path / "out")
    assert words.get_vocab() == load_tokenizer(places / "base").get_vocab()
    ids = torch.tensor([words.encode("the red cat sees dog").ids])
    loaded = (BiLstmForSequenceClassification if recipe == "bilstm" else type(found.student)).from_pretrained(
        tmp_path / "out"
    )
    assert torch.equal(loaded(ids)[0], found.student(ids)[0])
    if RECIPES[recipe].data == TASK:
        assert stored["scores"] == found.scores
        assert found.scores["teacher"]["dev"]["accuracy"] == 1
        assert found.scores["student"]["dev"]["accuracy"] > 0.9
        assert loaded.config.id2label == found.teacher.config.id2label
    checkpoint = next((tmp_path / "out" / "run").glob("step-*"))
    held = {path.parent.name for path in checkpoint.rglob("*.safetensors")}
    assert held == {checkpoint.name} | ({"model"} if recipe != "bilstm" else set())


@pytest.mark.parametrize("recipe", ["kd", "tinybert-task", "theseus", "bilstm", "distilbert", "minilm"])
@pytest.mark.parametrize("step", [4, 9])
def test_a_stopped_run_resumes_to_the_same_bytes(places, tmp_path, monkeypatch, recipe, step):
    student, more = RUNS[recipe]
    options = {**more, "lr": 1e-3, "epochs": 1 if RECIPES[recipe].data == TASK else 4}
    # Theseus has two phases of six steps; runs of other recipes are longer, or have six
    step = 2 if step == 9 and recipe in ("kd", "bilstm") else step
    # Twice: a finished run is not trained again
    resumes(monkeypatch, step, tmp_path, lambda out: distil(places, recipe, student, out, **options), 2)


@pytest.mark.parametrize("recipe", ["kd", "pkd", "tinybert-task", "bilstm", "tinybert", "minilm", "minilmv2"])
def test_a_cached_teacher_says_the_same(places, tmp_path, recipe):
    student, more = RUNS[recipe]
    options = {**more, "epochs": 2}
    distil(places, recipe, student, tmp_path / "live", **options)
    for name in ("first", "second"):
        stamp = (tmp_path / "cache" / FILE).stat().st_mtime_ns if name == "second" else None
        distil(places, recipe, student, tmp_path / name, cache=tmp_path / "cache", **options)
        assert stamp in (None, (tmp_path / "cache" / FILE).stat().st_mtime_ns)
        live, stored = (logged(tmp_path / each) for each in ("live", name))
        if recipe in ("kd", "bilstm"):
            assert live == stored
        for line, other in zip(live, stored, strict=True):
            # Rows of hidden states are rounded by the shape of their batch
            assert line == pytest.approx(other, rel=1e-4)
    distil(places, recipe, student, tmp_path / "seed", cache=tmp_path / "cache", seed=1, **options)
    assert logged(tmp_path / "seed") != stored


def test_a_phase_begins_where_the_previous_ended(places, tmp_path):
    student = fastbert.EncoderConfig(**{**SIZES, "num_hidden_layers": 1})
    apart = []
    for lr in (1e-9, 3e-3):
        output = tmp_path / str(lr)
        found = distil(places, "tinybert-task", student, output, lr=[lr, 1e-9], epochs=[9, 0.2])
        ids = torch.tensor([load_tokenizer(output).encode("the red cat sees dog").ids])
        with torch.no_grad():
            a, b = (
                m(ids, output_hidden_states=True).hidden_states[-1] for m in (found.student, found.teacher)
            )
        apart.append((a - b).square().mean())
    assert apart[1] < 0.7 * apart[0]


def test_a_cache_keeps_half_precision(places, tmp_path):
    options = {"epochs": 1, "dtype": "bf16"}
    distil(places, "kd", [0], tmp_path / "live", **options)
    distil(places, "kd", [0], tmp_path / "stored", cache=tmp_path / "cache", **options)
    assert logged(tmp_path / "live") == logged(tmp_path / "stored")


def test_a_stale_cache_is_refused(places, tmp_path):
    options = {"cache": tmp_path / "cache", "epochs": 1}
    distil(places, "kd", [0], tmp_path / "a", **options)
    with pytest.raises(ValueError, match=r"cache: .* was made with another max_length"):
        distil(places, "kd", [0], tmp_path / "b", **{**options, "max_length": 31})
    with pytest.raises(ValueError, match=r"cache: .* has no first\.1, which this recipe reads"):
        distil(places, "pkd", [0, 1], tmp_path / "b", **options)
    shutil.copytree(places / "teacher", tmp_path / "teacher")
    other = fastbert.AutoModelForSequenceClassification.from_pretrained(tmp_path / "teacher")
    torch.nn.init.normal_(other.classifier.weight)
    other.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"cache: .* was made with another teacher"):
        fastbert.distill(
            tmp_path / "teacher",
            [0],
            places / "data",
            tmp_path / "b",
            "kd",
            **OPTIONS,
            cache=tmp_path / "cache",
        )
    with pytest.raises(ValueError, match=r"cache: expected None, because no loss of this recipe reads"):
        distil(places, "theseus", [0], tmp_path / "b", **options)


def test_another_run_in_the_output_is_refused(places, tmp_path):
    distil(places, "kd", [0], tmp_path / "run", epochs=0.5)
    for name, more in (
        ("temperature", {"temperature": 3.0}),
        ("settings.batch_size", {"batch_size": 4}),
        (r"phases.0.weights.kd", {"weights": {"kd": 0.4}}),
    ):
        with pytest.raises(TrainingError, match=rf"^{name}: the run in"):
            distil(places, "kd", [0], tmp_path / "run", **{"epochs": 0.5, **more})
    with pytest.raises(TrainingError, match=r"^student.*: the run in"):
        distil(places, "kd", [1], tmp_path / "run", epochs=0.5)


def test_texts_without_labels_are_learned_from_the_teacher(places, tmp_path):
    rows = [{"text": f"the {colour} cat sees dog"} for colour in ("red", "blue", "green") * 8]
    rows[0]["label"], rows[1]["label"] = "red", 1
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "none.txt").write_text("".join(row["text"] + "\n" for row in rows))
    for name, count in (("some.jsonl", 2), ("none.txt", 0)):
        options = {**OPTIONS, "batch_size": 24, "epochs": 1, "lr": 1e-9}
        out = tmp_path / name.partition(".")[0]
        found = fastbert.distill(places / "teacher", [0, 1], tmp_path / name, out, **options)
        # The student is the teacher, but for dropout
        assert found.last["kd_loss"] < 0.2
        assert (found.last["task_loss"] > 0) == (count > 0)
    with pytest.raises(ValueError, match=r"data: .* has no labels, by which alone this recipe learns"):
        fastbert.distill(places / "teacher", [0], tmp_path / "none.txt", tmp_path / "x", "theseus", **OPTIONS)


def test_a_student_with_words_of_its_own(places, tmp_path):
    tiny_model(tmp_path / "other", **{**SMALL, "vocab_size": len(WORDS) - 10})
    (tmp_path / "other" / "vocab.txt").write_text("\n".join(WORDS[:-10]) + "\n")
    options = {"epochs": 20, "lr": 3e-3}
    live = distil(places, "kd", tmp_path / "other", tmp_path / "a", **options)
    assert live.scores["student"]["dev"]["accuracy"] > 0.9
    assert load_tokenizer(tmp_path / "a").get_vocab_size() == len(WORDS) - 10
    distil(places, "kd", tmp_path / "other", tmp_path / "b", cache=tmp_path / "cache", **options)
    logs = [(tmp_path / name / "run" / "log.jsonl").read_bytes() for name in "ab"]
    assert logs[0] == logs[1]
    with pytest.raises(ValueError, match=r"student: has another vocabulary than the teacher"):
        distil(places, "pkd", tmp_path / "other", tmp_path / "c")


def test_a_regression(tmp_path):
    tiny_model(tmp_path / "base")
    written("stsb", tmp_path / "data", 48, 24)
    quick("stsb", tmp_path / "base", tmp_path / "data", tmp_path / "teacher", epochs=1)
    each = ("kd", [0], "loss"), ("bilstm", "bilstm", "logits_loss"), ("tinybert-task", [0], "kd_loss")
    for recipe, student, name in each:
        out, options = tmp_path / recipe, {**OPTIONS, "epochs": 4, "task": "stsb"}
        found = fastbert.distill(tmp_path / "teacher", student, tmp_path / "data", out, recipe, **options)
        curve = [line[name] for line in logged(out) if name in line]
        assert np.mean(curve[-3:]) < np.mean(curve[:3])
        assert "spearman" in found.scores["student"]["dev"]


def test_a_student_may_be_a_model_or_a_file(places, tmp_path):
    whole = fastbert.AutoModelForSequenceClassification.from_pretrained(places / "teacher")
    whole.config.save_pretrained(tmp_path / "config")
    config = next((tmp_path / "config").glob("*.json"))
    found = {
        name: distil(places, "kd", student, tmp_path / name, epochs=0.1, lr=1e-9).student
        for name, student in (("model", whole), ("teacher", places / "teacher"), ("file", config))
    }
    same = [torch.allclose(m.classifier.weight, whole.classifier.weight) for m in found.values()]
    assert same == [True, True, False]
    assert all(m.num_parameters() == whole.num_parameters() for m in found.values())
    lstm = distil(places, "bilstm", "bilstm", tmp_path / "lstm", epochs=0.1, lr=1e-9).student
    words = (m.weight for m in (lstm.embeddings, whole.get_input_embeddings()))
    assert torch.allclose(*words)


def test_layers_are_matched_in_equal_steps():
    assert layer_pairs("all", 4, 12) == [(1, 3), (2, 6), (3, 9), (4, 12)]
    assert layer_pairs("inner", 6, 12) == [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10)]
    assert layer_pairs("last", 6, 12) == [(6, 12)]
    assert layer_pairs("last", 12, 24, [21]) == [(12, 21)]
    assert layer_pairs("all", 2, 3, [2, 3]) == [(1, 2), (2, 3)]
