"""Accuracy over the layers that texts go through, by threshold: `python bench/early_exit.py`.

A four-layer encoder learns bench/pruning.py's task with a third kind of text. In a third of the texts the
word of the key, which has the value, is beside the key; in a third it is among words in random order, to be
looked up; in a third the label is remembered. Each seed trains a model, then the branches of each kind.

    python bench/early_exit.py [--seeds 5] [--json FILE] [--figure FILE.png]

A row has one seed's mean number of layers and accuracy at each threshold; and, as what to beat, the accuracy
if all texts leave at the same layer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from bench import pruning
from bench.lib.curves import axes, measure, parser_of
from fastbert.compression.early_exit import EarlyExit
from fastbert.compression.exit_training import KINDS
from fastbert.models.heads.sequence_classification import BertForSequenceClassification

LAYERS = 4
# Shares of the largest uncertainty; "deebert" has it in nats
THRESHOLDS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
# More than any uncertainty
ALL = 100.0


def texts(draw: np.random.Generator, table: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As `pruning.texts`, with the word of the key beside it in a third of the texts."""
    ids, labels = pruning.texts(draw, table, count)
    shown = draw.random(count) < 1 / 3
    values = draw.integers(0, pruning.VALUES, count)
    word = pruning.FIRST_WORD + (ids[:, 1] - pruning.FIRST_KEY) * pruning.VALUES + values
    ids[:, 2] = np.where(shown, word, ids[:, 2])
    return ids, np.where(shown, values, labels)


def branches_alone(exits: EarlyExit, measured: Any) -> list[float]:
    """Accuracy if all texts leave at layer 1, 2, … and the last."""
    found = []
    for depth, branch in zip(exits.exits, exits.branches, strict=True):
        alone = EarlyExit(exits.model, exits.kind, depth).eval()
        alone.branches[0] = branch
        found.append(alone.curve(measured, [ALL])[0].accuracy)
    return [*found, exits.curve(measured, [0.0])[0].accuracy]


def curves(seed: int) -> Iterator[dict[str, Any]]:
    model, steps = pruning.trained(seed, texts, num_hidden_layers=LAYERS)
    assert isinstance(model, BertForSequenceClassification)
    table = pruning.table_of(seed)
    draws = (np.random.default_rng([seed, i]) for i in (1, 2))
    sizes = zip(draws, (4000, 1000), strict=True)
    learned, measured = (pruning.examples(draw, table, count, texts) for draw, count in sizes)
    for kind in KINDS:
        torch.manual_seed(seed)
        exits = EarlyExit(model, kind).fit(learned, epochs=5, seed=seed, progress=False)
        largest = 1.0 if kind == "fastbert" else float(np.log(pruning.VALUES))
        points = exits.curve(measured, [each * largest for each in THRESHOLDS])
        yield {
            **{"step": "early-exit", "name": f"early-exit-{kind}-{seed}", "status": "ok"},
            **{"kind": kind, "seed": seed, "trained_steps": steps},
            "thresholds": [point.threshold for point in points],
            "layers": [point.layers for point in points],
            "accuracy": [point.accuracy for point in points],
            "accuracy_of_layers": branches_alone(exits, measured),
        }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed: layers and accuracy by threshold."""
    pairs = zip(row["layers"], row["accuracy"], strict=True)
    alone = " ".join(f"{each:.3f}" for each in row["accuracy_of_layers"])
    return f"{row['name']:<24} {' '.join(f'{n:.2f}:{a:.3f}' for n, a in pairs)}  all at one layer: {alone}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A chart per kind: a line per seed, and the layers by themselves."""
    figure, each_axis = axes(9, 3.4, 2)
    for axis, kind in zip(each_axis, KINDS, strict=True):
        for row in (row for row in rows if row["kind"] == kind):
            first = row["seed"] == 0
            axis.plot(
                *(row["layers"], 100 * np.array(row["accuracy"])),
                **{"color": "#2266aa", "linewidth": 0.8, "marker": "o", "markersize": 3},
                label="texts leave where they are certain" if first else None,
            )
            axis.plot(
                *(range(1, LAYERS + 1), 100 * np.array(row["accuracy_of_layers"])),
                **{"color": "#888888", "linewidth": 0.8, "linestyle": "--"},
                label="all texts leave at one layer" if first else None,
            )
        axis.set(title=kind, xlabel="layers per text, mean", ylim=(0, 102), xlim=(0.9, LAYERS + 0.1))
        axis.axhline(100 / pruning.VALUES, color="black", linewidth=0.6, linestyle=":")
    each_axis[0].set_ylabel("accuracy, %")
    each_axis[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(measure(parser_of("early_exit", __doc__).parse_args(), curves, line, draw))
