"""Accuracy in 4 bits over steps of training that rounds: `python bench/quantization.py`.

A small encoder remembers a random table: a text is a key and a number, and the label is their entry. So the
weights hold about as much as they can, and rounding them to 4 bits loses answers. Then training continues
from the same weights, with rounding (`fastbert.compression.qat`) and, for comparison, without. Each seed has
its own table and model.

    python bench/quantization.py [--seeds 5] [--json FILE] [--figure FILE.png]

A row has one seed's accuracies: of the floating-point model, in 8 and in 4 bits without further training, and
in 4 bits after each `EVERY` steps of both trainings.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from torch import Tensor

import fastbert
from bench.lib.curves import axes, band, measure, parser_of
from fastbert.compression import qat

KEYS, NUMBERS, VALUES = 56, 56, 8
CONFIG = {
    # [PAD], [CLS] and [SEP], then keys, then numbers
    "vocab_size": 3 + KEYS + NUMBERS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
    "num_labels": VALUES,
}
STEPS, BATCH, LEARNING_RATE = 3000, 400, 3e-3
MORE_STEPS, EVERY, MORE_RATE = 400, 50, 5e-4
WAYS = ("rounding", "floating point")

Model = fastbert.BertForSequenceClassification


def table_of(seed: int) -> tuple[Tensor, Tensor]:
    """(ids (KEYS · NUMBERS, 4), labels (KEYS · NUMBERS,)): all texts."""
    pairs = np.stack(np.meshgrid(np.arange(KEYS), np.arange(NUMBERS), indexing="ij"), -1).reshape(-1, 2)
    ids = np.full((len(pairs), 4), (1, 0, 0, 2), np.int64)
    ids[:, 1:3] = pairs + np.array([3, 3 + KEYS])
    labels = np.random.default_rng([seed, 0]).integers(0, VALUES, len(pairs))
    return torch.from_numpy(ids), torch.from_numpy(labels)


@torch.no_grad()
def accuracy(model: Model, table: tuple[Tensor, Tensor]) -> float:
    """The share of right answers; the model stays in its mode."""
    was, (ids, labels) = model.training, table
    right = model.eval()(input_ids=ids).logits.argmax(-1) == labels
    model.train(was)
    return right.double().mean().item()


def in_bits(model: Model, table: tuple[Tensor, Tensor], bits: int) -> float:
    """The accuracy of the model, quantised as it is."""
    return accuracy(qat.prepare(copy.deepcopy(model), bits), table)


def train(model: Model, table: tuple[Tensor, Tensor], steps: int, rate: float, seed: int) -> Any:
    """Train; yields after each step."""
    draw = np.random.default_rng([seed, 1])
    optimizer = torch.optim.AdamW(model.train().parameters(), rate, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 50) * (1 - step / steps)
        chosen = torch.from_numpy(draw.choice(len(table[0]), BATCH, replace=False))
        loss = model(input_ids=table[0][chosen], labels=table[1][chosen]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step + 1


def row_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, table = Model(fastbert.EncoderConfig(**CONFIG)), table_of(seed)
    for _ in train(model, table, STEPS, LEARNING_RATE, seed):
        pass
    row = {"step": "quantization", "name": f"quantization-{seed}", "status": "ok", "seed": seed}
    row |= {"float": accuracy(model, table), "int8": in_bits(model, table, 8)}
    after = in_bits(model, table, 4)
    row |= {"steps": [0, *range(EVERY, MORE_STEPS + 1, EVERY)]}
    for way in WAYS:
        own, found = copy.deepcopy(model), [after]
        if way == "rounding":
            qat.prepare(own, 4)
        for step in train(own, table, MORE_STEPS, MORE_RATE, seed):
            if step % EVERY == 0:
                found.append(accuracy(own, table) if way == "rounding" else in_bits(own, table, 4))
        row[way] = found
    return row


def line(row: dict[str, Any]) -> str:
    ends = ", ".join(f"{way} {row[way][-1]:.3f}" for way in WAYS)
    first = f"float {row['float']:.3f}, int8 {row['int8']:.3f}, int4 {row[WAYS[0]][0]:.3f}"
    return f"{row['name']:<16} {first}; {ends}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line per training: the median of seeds, and their range."""
    figure, (axis,) = axes(5.5, 3.4)
    for way, color in zip(WAYS, ("#2266aa", "#888888"), strict=True):
        label = "trained with rounding" if way == "rounding" else "trained without, then rounded"
        band(axis, rows[0]["steps"], [row[way] for row in rows], color, label)
    whole = 100 * np.median([row["float"] for row in rows])
    axis.axhline(whole, color="black", linewidth=0.6, linestyle=":")
    axis.annotate("floating point", (0, whole), va="bottom", fontsize=8)
    axis.set(xlabel="further steps", ylabel="accuracy in 4 bits, %")
    axis.legend(frameon=False, loc="center right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    args = parser_of("quantization", __doc__).parse_args()
    sys.exit(measure(args, lambda seed: [row_of(seed)], line, draw))
