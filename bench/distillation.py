"""Accuracy over the number of labels, with a teacher and without: `python bench/distillation.py`.

A text has a key, a number and other words. Its label is in a fixed random table of keys and numbers, so a
label says nothing of other cells. A teacher of six layers learns the table from many labelled texts. Then a
student of three layers reads a few labelled texts and many without a label, of which it learns the teacher's
logits. The same student is trained on the few labelled texts alone, for as many steps. Each seed has a table,
texts and models of its own.

    python bench/distillation.py [--seeds 5] [--json FILE] [--figure FILE.png]

A row has the accuracies of one seed on texts that no model has seen: the teacher's, and both students' for
each number of labels.
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

import fastbert
from bench.lib.curves import axes, band, measure, parser_of
from bench.pruning import accuracy
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import tokenized

KEYS, NUMBERS, WORDS, VALUES = 16, 16, 30, 4
VOCABULARY = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    *(f"key{i}" for i in range(KEYS)),
    *(f"number{i}" for i in range(NUMBERS)),
    *(f"word{i}" for i in range(WORDS)),
]
CONFIG = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
TEACHER, STUDENT = {"num_hidden_layers": 6}, {"num_hidden_layers": 3}
# Texts that the teacher learns from, that have no label, and that are measured
MANY, UNLABELLED, MEASURED = 6000, 3000, 2000
LABELLED = (50, 150, 500)
EPOCHS, BATCH, LEARNING_RATE = 6, 32, 1e-3


def texts(draw: np.random.Generator, table: np.ndarray, count: int) -> tuple[list[str], list[int]]:
    """Texts, and their labels."""
    keys, numbers = draw.integers(0, KEYS, count), draw.integers(0, NUMBERS, count)
    words = draw.integers(0, WORDS, (count, 4))
    made = [
        f"key{key} number{number} {' '.join(f'word{word}' for word in row)}"
        for key, number, row in zip(keys, numbers, words, strict=True)
    ]
    return made, table[keys, numbers].tolist()


def new_model(folder: Path, seed: int) -> Path:
    """A directory of the teacher with random weights."""
    torch.manual_seed(seed)
    fastbert.BertModel(fastbert.EncoderConfig(**CONFIG, **TEACHER)).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def write(path: Path, made: list[str], labels: list[Any]) -> Path:
    """A table, or lines of JSON, without the label where it is None."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([["text", "label"], *zip(made, labels, strict=True)])
        for text, label in zip(made, labels, strict=True) if path.suffix == ".jsonl" else ():
            file.write(json.dumps({"text": text} | ({} if label is None else {"label": label})) + "\n")
    return path


def row_of(seed: int, folder: Path) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    table, options = draw.integers(0, VALUES, (KEYS, NUMBERS)), {"seed": seed, "progress": False}
    options |= {"lr": LEARNING_RATE, "batch_size": BATCH, "max_length": 16}
    base, data, teacher = new_model(folder / "base", seed), folder / "data", folder / "teacher"
    data.mkdir()
    write(data / "train.csv", *texts(draw, table, MANY))
    write(data / "dev.csv", *texts(draw, table, 200))
    fastbert.finetune("csv", base, data, teacher, epochs=EPOCHS, **options)
    measured = texts(draw, table, MEASURED)
    examples = tokenized(load_tokenizer(base), measured[0], labels=measured[1])
    unlabelled, few = texts(draw, table, UNLABELLED)[0], texts(draw, table, max(LABELLED))
    student = fastbert.EncoderConfig(**CONFIG, **STUDENT)

    def trained(name: str, count: int, more: list[str], weights: dict[str, float]) -> float:
        labels = [*few[1][:count], *[None] * len(more)]
        path = write(folder / f"{name}-{count}.jsonl", [*few[0][:count], *more], labels)
        epochs = EPOCHS * (UNLABELLED + count) / len(labels)
        output = folder / f"{name}-{count}"
        how = {"weights": weights, "epochs": epochs, **options}
        return accuracy(fastbert.distill(teacher, student, path, output, "kd", **how).student, examples)

    whole = accuracy(fastbert.AutoModelForSequenceClassification.from_pretrained(teacher), examples)
    return {
        **{"step": "distillation", "name": f"distillation-{seed}", "status": "ok", "seed": seed},
        **{"labelled": [*LABELLED], "teacher": whole},
        "distilled": [trained("distilled", count, unlabelled, {}) for count in LABELLED],
        "alone": [trained("alone", count, [], {"kd": 0.0, "task": 1.0}) for count in LABELLED],
    }


def rows_of(seed: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        yield row_of(seed, Path(folder))


def line(row: dict[str, Any]) -> str:
    curves = (f"{name} {' '.join(f'{each:.3f}' for each in row[name])}" for name in ("distilled", "alone"))
    return f"{row['name']:<16} teacher {row['teacher']:.3f}  {'  '.join(curves)}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A chart: the median of seeds, and their range."""
    figure, (axis,) = axes(5.4, 3.4)
    for name, label, color in (
        ("distilled", "3 layers, distilled", "#2266aa"),
        ("alone", "3 layers, labels alone", "#cc7722"),
    ):
        band(axis, LABELLED, [row[name] for row in rows], color, label)
    teacher = 100 * np.median([row["teacher"] for row in rows])
    axis.axhline(teacher, color="black", linewidth=0.8, linestyle="--", label="6 layers, the teacher")
    axis.axhline(100 / VALUES, color="black", linewidth=0.6, linestyle=":", label="guessing")
    axis.set(xlabel="labelled texts", ylabel="accuracy, %", xscale="log", ylim=(0, 103))
    axis.set_xticks(LABELLED, [str(count) for count in LABELLED])
    axis.minorticks_off()
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(0.02, 0.68))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(measure(parser_of("distillation", __doc__).parse_args(), rows_of, line, draw))
