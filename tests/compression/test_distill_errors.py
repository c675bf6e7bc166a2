"""Every argument that distillation refuses, in one line."""

from __future__ import annotations

import json
import random

import pytest

import fastbert
from tests.support.rule_tasks import SIZES, WORDS, quick, tiny_model, written


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "base")
    written("csv", folder / "data", 24, 6)
    quick("csv", folder / "base", folder / "data", folder / "teacher", epochs=1)
    lines = (" ".join(random.Random(i).choices(WORDS[5:], k=8)) for i in range(20))
    (folder / "text.txt").write_text("\n".join(lines))
    (folder / "empty.jsonl").write_text("\n")
    STUDENTS["quantised"]().save_pretrained(folder / "int8")
    (folder / "purple.jsonl").write_text(json.dumps({"text": "the cat", "label": "purple"}))
    (folder / "half.jsonl").write_text('{"text": "a", "pair": "b"}\n{"text": "a"}\n')
    (folder / "data" / "table.parquet").write_text("")
    written("csv", folder / "other", 24, 6)
    for name in ("train", "dev"):
        path = folder / "other" / f"{name}.csv"
        path.write_text(path.read_text().replace(",red\n", ",purple\n"))
    return folder


SMALL = {**SIZES, "hidden_size": 48, "num_attention_heads": 3}
TEXT = {"teacher": "base", "data": "text.txt"}
REFUSED = {
    "a recipe": ({"recipe": "pdk"}, "recipe: expected one of kd, bilstm, .*, got 'pdk'"),
    "no data": ({"data": "nothing.txt"}, "data: .*nothing.txt does not exist"),
    "an option": ({"reinit": 1}, "unknown option 'reinit': expected one of batch_size"),
    "a rate": ({"lr": [0.001, 0.0001]}, r"lr: expected one number, or 1 for this recipe"),
    "epochs": ({"epochs": 0}, "epochs: expected a finite number > 0, got 0"),
    "a later phase": ({"recipe": "theseus", "lr": [0.001, -1]}, "lr: expected a finite number > 0, got -1"),
    "a weight": ({"weights": {"mlm": 1}}, "weights: 'mlm' is no loss of this recipe; expected some of"),
    "weights": ({"weights": {"kd": 0, "task": 0}}, "weights: expected one above 0 in each phase"),
    "a weight's value": ({"weights": {"kd": -1}}, "weights: kd: expected a finite number >= 0, got -1"),
    "a temperature": ({"temperature": 0}, "temperature: expected a finite number > 0, got 0"),
    "rates": ({"replacing": (1,)}, r"replacing: expected two finite numbers >= 0, got \(1,\)"),
    "heads": ({"relation_heads": 2.0}, "relation_heads: expected an integer >= 1, got 2.0"),
    "a length": ({"max_length": 65}, "max_length: expected at most 64 for these models, got 65"),
    "an output": ({"output": "teacher"}, "output: expected another directory than that of a model"),
    "no head": ({"teacher": "base"}, "teacher: .*base has no trained head"),
    "no words' head": ({**TEXT, "recipe": "distilbert"}, "teacher: .*base has no masked-LM head"),
    "a student": ({"student": 3}, "student: expected a directory, a config, a model, .*, got int"),
    "a layer": ({"student": [0, 2]}, r"layers: expected ascending numbers of 2 layers, got \[0, 2\]"),
    "8 bits": ({"student": "int8"}, "model: .*int8 is quantised, so it cannot be trained"),
    "an encoder of 8 bits": ({**TEXT, "recipe": "minilm", "student": "int8"}, "model: student is quantised"),
    "a model of 8 bits": ({"student": "quantised"}, "model: student is quantised, so it cannot be trained"),
    "an encoder": (
        {"student": "model"},
        "student: expected a model ForSequenceClassification, got BertModel",
    ),
    "a classless file": ({"data": "purple.jsonl"}, "line 1: label: expected one of the teacher's classes"),
    "no example": ({"data": "empty.jsonl"}, "empty.jsonl: expected one example at least, found none"),
    "half a pair": ({"data": "half.jsonl"}, "line 2: expected a text as 'pair' in all lines, or in none"),
    "other classes": ({"data": "other"}, "data: .*other has the classes .*'purple'.*, but the teacher has"),
    "a kind of file": (
        {"data": "data/table.parquet"},
        "data: .*expected a directory, or a file that ends in",
    ),
    "another task": ({"task": "swag"}, "task: expected one with labels of texts, tokens or spans, got swag"),
    "a task of text": ({**TEXT, "recipe": "minilm", "task": "ner"}, "task: expected None, .*, got 'ner'"),
    "a folder": ({"recipe": "minilm", "teacher": "base"}, "data: .*: expected a corpus of fastbert prepare"),
    "text for a bilstm": (
        {**TEXT, "recipe": "minilm", "student": "bilstm"},
        "student: a BiLSTM learns from labelled",
    ),
    "layers of a bilstm": ({"recipe": "pkd", "student": "bilstm"}, "student: a BiLSTM has no layers"),
    "no layers": ({"layer_map": [1]}, "layer_map: expected None with a recipe that compares no layers"),
    "a far layer": (
        {"recipe": "pkd", "student": [0, 1], "layer_map": [3]},
        "layer_map: expected layers from 1 to 2",
    ),
    "a long map": (
        {"recipe": "pkd", "student": [0, 1], "layer_map": [1, 2]},
        r"layer_map: expected 1 layers .* \[1\], got 2",
    ),
    "one layer": ({"recipe": "pkd", "student": [0]}, "student: expected two layers at least"),
    "a deep student": (
        {"recipe": "tinybert-task", "student": "deep"},
        "student: has 3 layers, the teacher 2",
    ),
    "a width": (
        {"recipe": "pkd", "student": "small"},
        "student: hidden_size: expected 64 as the teacher has, got 48",
    ),
    "attention heads": (
        {"recipe": "tinybert-task", "student": "small"},
        "student: num_attention_heads: expected 4 .*, got 3",
    ),
    "minilm's heads": (
        {**TEXT, "recipe": "minilm", "student": "small"},
        "student: num_attention_heads: expected 4 .*, got 3",
    ),
    "relation heads": (
        {**TEXT, "recipe": "minilmv2", "student": "small", "relation_heads": 32},
        "relation_heads: .* 48, the width of the student's attention",
    ),
    "pruned heads": (
        {"recipe": "tinybert-task", "student": "pruned"},
        "student: num_attention_heads: expected 4 as .* in layer 1, got 3 in layer 1",
    ),
    "no heads": (
        {**TEXT, "recipe": "minilmv2", "student": "pruned", "relation_heads": 4},
        "layer_map: expected layers with heads, but the student's layer 2 has none",
    ),
    "a family": (
        {"recipe": "theseus", "student": "roberta"},
        "student: model_type: expected bert as the teacher",
    ),
    "falling groups": (
        {"recipe": "theseus", "student": [0, 1], "layer_map": [2, 1]},
        r"layer_map: expected rising numbers .* \[2, 1\]",
    ),
}
STUDENTS = {
    "small": lambda: fastbert.EncoderConfig(**SMALL),
    "deep": lambda: fastbert.EncoderConfig(**{**SIZES, "num_hidden_layers": 3}),
    "pruned": lambda: fastbert.EncoderConfig(**SIZES, pruned_heads={0: [1], 1: [0, 1, 2, 3]}),
    "roberta": lambda: fastbert.EncoderConfig("roberta", **{**SIZES, "max_position_embeddings": 66}),
    "quantised": lambda: fastbert.BertForSequenceClassification(fastbert.EncoderConfig(**SIZES)).quantize(),
    "model": lambda: fastbert.BertModel(fastbert.EncoderConfig(**SIZES)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_line(places, tmp_path, name):
    changes, message = REFUSED[name]
    options = {"epochs": 0.1, "batch_size": 8, "recipe": "kd", "progress": False, **changes}
    teacher, data = (places / options.pop(key, key) for key in ("teacher", "data"))
    student = options.pop("student", [0])
    student = places / student if student == "int8" else student
    student = STUDENTS[student]() if student in [*STUDENTS] else student
    output = places / options.pop("output") if "output" in options else tmp_path / "out"
    with pytest.raises((TypeError, ValueError), match=message):
        fastbert.distill(teacher, student, data, output, options.pop("recipe"), **options)
    assert output == places / "teacher" or not (output / "run").exists()


def test_scores_of_distances_are_refused(tmp_path):
    tiny_model(tmp_path / "mpnet", kind="MPNetModel", pad_token_id=1)
    (tmp_path / "text.txt").write_text("the red cat sees dog\n" * 9)
    given = tmp_path / "mpnet", [0], tmp_path / "text.txt", tmp_path / "out", "minilm"
    with pytest.raises(ValueError, match="recipe: layer 1 adds more to attention's scores"):
        fastbert.distill(*given, epochs=1, progress=False)
