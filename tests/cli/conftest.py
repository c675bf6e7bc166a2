"""What the tests of commands share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from unittest import mock

import pytest
import torch
import transformers

from fastbert.cli import costs
from fastbert.cli.main import main
from fastbert.models.bert import BertModel
from fastbert.training.loop import Trainer
from tests.support import blank_figures
from tests.support.hf_models import hf_config
from tests.support.treebank import TREES, conllu

WORDS = '[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on a mat dog ran to house . , ! < > & { } $ " / b'
LINES = ["the cat sat on the mat .", "a dog ran to a house , a cat ran !", "the dog sat", "a mat ."]


def save(place, model):
    """A model with a tokenizer, as transformers saves them."""
    model.save_pretrained(place)
    (place / "vocab.txt").write_text(WORDS.replace(" ", "\n"))


def call(folder, kind, model, file, output, *more):
    """`fastbert analyze` of a file of examples, trees or labelled spans, if any."""
    arguments = ["analyze", kind, "--model", folder / model, "--output", output]
    if file is not None:
        option = "--conllu" if str(file).endswith(".conllu") else "--input"
        arguments += ["--edges" if file == "edges.jsonl" else option, folder / file]
    return main([*map(str, arguments), "--device", "cpu", *map(str, more)])


@contextlib.contextmanager
def signalled(number, at):
    """A command gets a signal in the step `at` of its training, counted from 0."""
    plain = Trainer._step

    def step(self, *given):
        if self.step == at:
            os.kill(os.getpid(), number)
        return plain(self, *given)

    before = signal.signal(number, signal.default_int_handler)  # a shell's background job ignores SIGINT
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "_step", step)
            yield
    finally:
        signal.signal(number, before)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Models and files of examples for `analyze`."""
    place = tmp_path_factory.mktemp("analyze")
    for name, cls, options in (
        ("words", transformers.BertForMaskedLM, {}),
        ("classes", transformers.BertForSequenceClassification, {"num_labels": 2}),
        ("answers", transformers.BertForQuestionAnswering, {}),
        ("encoder", transformers.BertModel, {}),
        ("wider", transformers.BertModel, {"hidden_size": 72}),
    ):
        torch.manual_seed(0)
        save(place / name, cls(hf_config("bert", **options)))
    (place / "lines.txt").write_text("".join(line + "\n" for line in LINES))
    (place / "many.txt").write_text("".join(f"{line} {LINES[3]}\n{line}\n" for line in LINES[:2]))
    (place / "longer.conllu").write_text(conllu([" | ".join(f"the X {i} dep" for i in range(100))] * 12))
    (place / "four.conllu").write_text(conllu([TREES[1]] * 4))
    (place / "trees.conllu").write_text(conllu(TREES * 3))
    write_rows(
        place / "rows.jsonl", ({"text": t, "pair": "the cat", "class": i % 2} for i, t in enumerate(LINES))
    )
    spans = [{"text": [line.split()[1]], "answer_start": [line.index(line.split()[1])]} for line in LINES]
    spans[3] = {"text": [], "answer_start": []}
    rows = [{"question": "the cat", "context": c, "answers": a} for c, a in zip(LINES, spans, strict=True)]
    write_rows(place / "squad.jsonl", rows)
    (place / "pairs.tsv").write_text("".join(f"{line}\tthe cat ran\n" for line in LINES))
    likes = zip(LINES, (1, 0.5, 0, -0.5), strict=True)
    write_rows(place / "like.jsonl", ({"text": t, "pair": LINES[0], "like": like} for t, like in likes))
    rows = [
        {"text": "the cat sat", "targets": [{"span1": [0, 2], "span2": [2, 3], "label": ["x", "y"]}]},
        {"text": "a dog ran", "targets": [{"span1": [1, 2], "span2": [0, 3], "label": "z"}]},
    ]
    write_rows(place / "edges.jsonl", rows * 10)
    verbs = list(zip((0, 1, 2, 1), ("sat .", "ran !", "ran to a mat", "sat on the"), strict=True))
    rows = [
        {
            "text": f"a {s} {v}",
            "pair": "the dog",
            "class": c,
            "number": c + 0.5,
            "name": "xyz"[c],
            "list": [c],
        }
        for s in ("cat", "dog", "mat", "house", "the cat")
        for c, v in verbs
    ]
    write_rows(place / "starts.jsonl", rows)
    return place


@pytest.fixture(autouse=True)
def quick_costs(monkeypatch):
    """Speeds are measured for no time."""
    measured = costs.tokens_per_second
    monkeypatch.setattr(
        costs, "tokens_per_second", lambda models: measured(models, sequences=1, seconds=0.001)
    )


@pytest.fixture
def drawn():
    """Figures are drawn."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures are blank unless the test takes `drawn`."""
    if "drawn" not in request.fixturenames:
        blank_figures.replace(monkeypatch, blank_figures.BLANK)


@pytest.fixture
def no_work(monkeypatch):
    """No model runs: what is wrong is said before."""
    ran = AssertionError("the model ran before the mistake was named")
    monkeypatch.setattr(BertModel, "encode_inputs", mock.Mock(side_effect=ran))
