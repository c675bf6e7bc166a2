"""Distillation of labels of tokens and of spans: losses by their formulas, runs, caches and mistakes."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import fastbert
from fastbert.compression.distillation.data import Taught
from fastbert.compression.distillation.objective import Distilled
from fastbert.compression.distillation.reading import SPANS, TOKENS
from fastbert.finetuning.encoded import Encoded, Source
from fastbert.finetuning.spans import Squad
from fastbert.finetuning.tagging import Ner
from tests.support.rule_tasks import SIZES, logged, quick, resumes, tiny_model, written

LENGTHS = (5, 9, 2, 7)
GIVEN = {"lr": 2e-3, "batch_size": 8, "progress": False}


def model(kind, layers, seed, **config):
    torch.manual_seed(seed)
    sizes = {**SIZES, "num_hidden_layers": layers, **config}
    return getattr(fastbert, f"BertFor{kind}")(fastbert.EncoderConfig(**sizes)).eval()


def batch(**labels):
    draw = np.random.default_rng(0)
    return {
        "input_ids": torch.from_numpy(draw.integers(5, 30, sum(LENGTHS))),
        "cu_seqlens": torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32),
        "max_seqlen": max(LENGTHS),
        **{name: torch.tensor(values) for name, values in labels.items()},
    }


def outputs(model, inputs):
    names = ("input_ids", "cu_seqlens", "max_seqlen")
    return model(**{name: inputs[name] for name in names}, output_hidden_states=True)


def soft(student, teacher, temperature):
    """T² · KL of one row."""
    p, q = (t.div(temperature).log_softmax(0) for t in (teacher, student))
    return temperature**2 * F.kl_div(q, p, reduction="sum", log_target=True)


def both(kind, weights, inputs, **config):
    teacher, student = model(kind, 4, 1, **config), model(kind, 2, 2, **config)
    module = Distilled(student, teacher, dict.fromkeys(weights, 1.0), [(1, 2), (2, 4)], temperature=3.0)
    losses, correct = module(inputs, True)
    return outputs(student, inputs), outputs(teacher, inputs), losses, correct["task"], module


def test_losses_of_tokens_are_means_over_labelled_ones():
    labels = [-100, 0, 2, -100, 1] + [-100] * 8 + [1, 0] + [-100] * 8
    inputs = batch(labels=labels)
    kinds = ("kd", "task", "patient", "hidden")
    names = dict(enumerate("abc"))
    s, t, losses, right, module = both("TokenClassification", kinds, inputs, id2label=names)
    counted = [i for i, label in enumerate(labels) if label >= 0]
    expected = {
        "kd": torch.stack([soft(s.logits[i], t.logits[i], 3.0) for i in counted]).mean(),
        "task": F.cross_entropy(s.logits, inputs["labels"]),
        "hidden": sum(F.mse_loss(s.hidden_states[m], t.hidden_states[2 * m]) for m in (1, 2)),
        # Of all tokens, not of the first ones
        "patient": F.mse_loss(
            *(
                torch.stack([F.normalize(o.hidden_states[n]) for n in of])
                for o, of in ((s, (1, 2)), (t, (2, 4)))
            )
        ),
    }
    for name, value in expected.items():
        assert losses[name].item() == pytest.approx(value.item(), rel=2e-5), name
    found = [s.logits[i].argmax() == labels[i] for i in counted]
    assert right == sum(found)
    losses["kd"].backward()
    assert module.student.classifier.weight.grad.any()


def test_losses_of_spans_are_means_over_starts_and_ends():
    starts, ends = [0, 3, 1, 6], [2, 8, 1, 6]
    inputs = batch(start_positions=starts, end_positions=ends)
    s, t, losses, right, module = both("QuestionAnswering", ("kd", "task", "patient"), inputs)
    kd, hits = [], []
    for i in range(4):
        part = slice(*inputs["cu_seqlens"][i : i + 2].tolist())
        kd += [soft(s[name][part], t[name][part], 3.0) for name in ("start_logits", "end_logits")]
        hits.append(
            s.start_logits[part].argmax() == starts[i] and s.end_logits[part].argmax() == ends[i],
        )
    stock = module.student(**inputs)
    assert losses["kd"].item() == pytest.approx(torch.stack(kd).mean().item(), rel=2e-5)
    assert losses["task"].item() == pytest.approx(stock.loss.item(), rel=2e-5)
    assert right == sum(hits)
    torch.stack([losses["kd"], losses["task"]]).sum().backward()
    grad = module.student.qa_outputs.weight.grad
    assert grad.isfinite().all()
    assert grad.any()
    # Where a sequence ends changes nothing for another
    alone = {name: inputs[name] for name in ("start_positions", "end_positions")}
    alone = {name: values[:1] for name, values in alone.items()}
    alone |= {"input_ids": inputs["input_ids"][:5], "cu_seqlens": inputs["cu_seqlens"][:2], "max_seqlen": 5}
    expected = torch.stack(kd[:2]).mean().item()
    assert module(alone)[0]["kd"].item() == pytest.approx(expected, rel=2e-5)


def test_spans_that_are_right_are_counted_once():
    inputs = batch(start_positions=[0, 3, 1, 6], end_positions=[2, 8, 1, 6])
    found = outputs(model("QuestionAnswering", 2, 2), inputs)
    at = inputs["cu_seqlens"].tolist()
    for name in ("start", "end"):
        scores = found[f"{name}_logits"]
        best = [int(scores[a:b].argmax()) for a, b in itertools.pairwise(at)]
        inputs[f"{name}_positions"] = torch.tensor(best)
    # One end is wrong, and so its span
    inputs["end_positions"][1] = (inputs["end_positions"][1] + 1) % LENGTHS[1]
    assert both("QuestionAnswering", ("task",), inputs)[3] == 3


@pytest.mark.parametrize(("rows", "counts"), [(TOKENS, (4, 4, 23)), (SPANS, (4, 4, 23))])
def test_batches_count_what_losses_are_means_of(rows, counts):
    ids = np.arange(sum(LENGTHS))
    labels = np.full(len(ids), -100)
    labels[[1, 4, 9, 22]] = 0
    given = (
        {"labels": labels} if rows == TOKENS else dict.fromkeys(("start_positions", "end_positions"), ids[:4])
    )
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    source = Source(Encoded(ids, ids, starts, given, token_labels=rows == TOKENS), False)
    names = ("kd", "task", "patient")
    found = Taught(source, names, rows).collate([(i, i) for i in range(4)])
    assert found.counts == dict(zip(names, counts, strict=True))
    two = Taught(source, names, rows).collate([(i, i) for i in (0, 3)])
    assert two.counts == dict(zip(names, (3, 3, 12) if rows == TOKENS else (2, 2, 12), strict=True))


# -- runs


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    tiny_model(folder / "base")
    for name, task in TASKS.items():
        written(name, folder / f"{name}-data", 48, 16)
        options = {"epochs": 12, "max_length": 32, "lr": 2e-3, "batch_size": 8}
        quick(task(), folder / "base", folder / f"{name}-data", folder / name, **options)
    return folder


TASKS = {"ner": lambda: Ner(context=4), "squad2": lambda: Squad(2, doc_stride=8, max_query=8)}
RECIPES = {"kd": ([0], 6), "pkd": ("base", 8), "tinybert-task": ("base", (12, 8)), "theseus": ([0], 3)}


def distil(places, task, recipe, output, **options):
    student, epochs = RECIPES[recipe]
    given = {"epochs": epochs, "max_length": 32, "task": TASKS[task](), **GIVEN, **options}
    student = given.pop("student", student)
    student = places / student if student == "base" else student
    return fastbert.distill(places / task, student, places / f"{task}-data", output, recipe, **given)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("task", TASKS)
def test_losses_fall_and_students_score(places, tmp_path, task, recipe):
    found = distil(places, task, recipe, tmp_path / "out")
    lines = logged(tmp_path / "out")
    for name in {key for line in lines for key in line if key.endswith("_loss")}:
        curve = [line[name] for line in lines if name in line]
        assert np.mean(curve[-3:]) < np.mean(curve[:3]), name
    scores = {who: found.scores[who]["dev"]["f1"] for who in ("teacher", "student")}
    assert scores["teacher"] > 0.6
    # Also the threshold of no answer is that of the teacher's own training
    of_training = json.loads((places / task / "results.json").read_text())["scores"]["dev"]
    assert found.scores["teacher"]["dev"] == pytest.approx(of_training)
    assert scores["student"] > 0.5 * scores["teacher"]
    assert found.student.config.id2label == found.teacher.config.id2label
    loaded = type(found.student).from_pretrained(tmp_path / "out")
    ids = torch.arange(5, 20)[None]
    assert torch.equal(loaded(ids)[0], found.student(ids)[0])


@pytest.mark.parametrize("task", TASKS)
def test_cached_scores_of_tokens_change_nothing(places, tmp_path, task):
    for name in ("live", "cached", "again"):
        cache = {} if name == "live" else {"cache": tmp_path / "cache"}
        distil(places, task, "kd", tmp_path / name, epochs=1, **cache)
    live, stored, again = (logged(tmp_path / name) for name in ("live", "cached", "again"))
    assert stored == again
    for line, other in zip(live, stored, strict=True):
        assert line == pytest.approx(other, rel=1e-4)


def test_a_stopped_run_of_spans_resumes_to_the_same_bytes(places, tmp_path, monkeypatch):
    resumes(monkeypatch, 3, tmp_path, lambda out: distil(places, "squad2", "kd", out, epochs=1))


def test_new_students_have_the_head_of_the_task(places, tmp_path):
    sizes = {**SIZES, "hidden_size": 32, "num_hidden_layers": 1}
    for task in TASKS:
        config = fastbert.EncoderConfig(**sizes)
        new = distil(places, task, "kd", tmp_path / f"{task}-new", student=config, epochs=0.2)
        base = distil(places, task, "kd", tmp_path / f"{task}-base", student="base", epochs=0.2)
        family = {"student": [1], "student_family": "distilbert"}
        distilled = distil(places, task, "kd", tmp_path / f"{task}-distilbert", **family, epochs=0.2)
        for found in (new, base, distilled):
            assert found.student.task == found.teacher.task
            assert found.student.config.id2label == found.teacher.config.id2label
        assert distilled.student.config.model_type == "distilbert"


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        (
            "ner",
            {"student": "bilstm"},
            "student: a BiLSTM has scores of texts; expected another student for ner",
        ),
        ("squad2", {"data": "text.txt"}, "data: .*text.txt: expected a directory of squad2"),
        (
            "squad2",
            {"recipe": "bilstm"},
            "recipe: squared errors are of scores of texts; expected kd for those",
        ),
        ("ner", {"student": "other"}, "student: has another vocabulary than the teacher"),
        ("ner", {"teacher": "squad2"}, "teacher: .*squad2 has no trained head for ner"),
        (
            "ner",
            {"task": "ner-features"},
            "task: expected one with labels of texts, tokens or spans, got ner-f",
        ),
        ("squad2", {"max_length": 18}, "doc_stride: 8 leaves context tokens unread"),
    ],
)
def test_a_mistake_is_one_line(places, tmp_path, task, changes, message):
    (places / "text.txt").write_text("the red cat\n")
    if not (places / "other").exists():
        tiny_model(places / "other", vocab_size=40)
        words = (places / "other" / "vocab.txt").read_text().splitlines()
        (places / "other" / "vocab.txt").write_text("\n".join(words[:40]) + "\n")
    given = {"epochs": 0.2, "max_length": 32, "task": TASKS[task](), **GIVEN, **changes}
    names = {"teacher": task, "data": f"{task}-data", "student": [0], "recipe": "kd"}
    teacher, data, student, recipe = (given.pop(key, value) for key, value in names.items())
    student = places / student if student == "other" else student
    with pytest.raises((TypeError, ValueError), match=message):
        fastbert.distill(places / teacher, student, places / data, tmp_path / "out", recipe, **given)


def test_windows_have_the_length_of_their_task(places, tmp_path):
    tiny_model(
        tmp_path / "long", kind="BertForTokenClassification", max_position_embeddings=300, num_labels=4
    )
    teacher = fastbert.BertForTokenClassification.from_pretrained(tmp_path / "long")
    own = fastbert.AutoConfig.from_pretrained(places / "ner")
    teacher.config.id2label, teacher.config.label2id = own.id2label, own.label2id
    teacher.save_pretrained(tmp_path / "long")
    given = tmp_path / "long", [0], places / "ner-data", tmp_path / "out", "kd"
    fastbert.distill(*given, task="ner", epochs=0.1, progress=False)
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["max_length"] == 300
