"""Accuracy over the operations of layers that drop tokens: `python bench/elimination.py`.

A three-layer encoder learns bench/pruning.py's task with four words among filler: numbers, which mean
nothing there. Each seed trains a model, which then learns further in three ways, in equally many steps:

    plain         as before; then a search of schedules
    length-drop   with LengthDrop; then the same search
    power-bert    with factors of tokens, at several prices; then as many steps with the schedule found

A row has one seed's costs, as shares of the operations with all tokens, and the accuracies there. Searches
score other texts than those whose accuracy is in the row.

    python bench/elimination.py [--seeds 5] [--json FILE] [--figure FILE.png]
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

import fastbert
from bench import pruning
from bench.lib.curves import axes, band, measure, parser_of
from fastbert.compression.length_drop import LengthDrop, LengthDropLosses
from fastbert.compression.schedule_search import search_schedules, within
from fastbert.compression.size import flops_of
from fastbert.compression.token_search import TokenSearch, search_groups
from fastbert.finetuning.losses import TaskLosses
from fastbert.training.optimizers import decay_groups, optimizer

WORDS, LENGTH, STEPS, BATCH, RATE = 4, 24, 300, 64, 3e-4
KINDS = {"plain": "#888888", "length-drop": "#2266aa", "power-bert": "#cc7722"}
COSTS = (0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
PRICES = (5e-4, 3e-3)


def texts(draw: np.random.Generator, table: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """As `pruning.texts`, with filler in place of most words."""
    ids, labels = pruning.texts(draw, table, count)
    asked = (ids[:, 4:] - pruning.FIRST_WORD) // pruning.VALUES == ids[:, 1:2] - pruning.FIRST_KEY
    words = np.take_along_axis(ids[:, 4:], np.argsort(~asked, axis=1, kind="stable")[:, :WORDS], 1)
    filler = pruning.FIRST_NUMBER + draw.integers(0, pruning.NUMBERS, (count, LENGTH - WORDS - 4))
    return np.hstack([ids[:, :4], draw.permuted(np.hstack([words, filler]), axis=1)]), labels


def learned(losses: Any, seed: int, groups: Any = decay_groups) -> Any:
    """The losses after the steps of a further training, in eval mode."""
    made, draw = optimizer("adamw", groups(losses.train(), 0.01), lr=RATE), np.random.default_rng([seed, 4])
    losses.optimized(made)
    starts = torch.arange(0, (BATCH + 1) * LENGTH, LENGTH, dtype=torch.int32)
    for step in range(STEPS):
        for group in made.param_groups:
            group["lr"] = RATE * group.get("lr_scale", 1.0) * pruning.rise_and_fall(step, STEPS)
        ids, labels = map(torch.from_numpy, texts(draw, pruning.table_of(seed), BATCH))
        inputs = {"input_ids": ids.flatten(), "cu_seqlens": starts, "max_seqlen": LENGTH, "labels": labels}
        made.zero_grad()
        rounds = losses.rounds(losses, inputs, False)
        for _ in range(losses.passes):
            torch.manual_seed(1000 * seed + step)
            found = next(rounds)[0]
            sum(loss * losses.weights.get(name, 1.0) for name, loss in found.items()).backward()
        made.step()
    return losses.eval()


def curves(seed: int) -> Iterator[dict[str, Any]]:
    first, steps = pruning.trained(seed, texts, num_hidden_layers=3)
    scored, measured = (
        pruning.examples(np.random.default_rng([seed, i]), pruning.table_of(seed), count, texts)
        for i, count in ((1, 500), (2, 2000))
    )
    for kind in KINDS:
        pairs: list[Any] = []
        for price in PRICES if kind == "power-bert" else ():
            model = copy.deepcopy(first)
            search = TokenSearch(TaskLosses(model), model, weight=price, bins=LENGTH)
            schedule = learned(search, seed, search_groups(1e-2 / RATE)).schedule()
            pairs.append((learned(TaskLosses(fastbert.eliminate(model, schedule)), seed).model, schedule))
        if not pairs:
            model = copy.deepcopy(first)
            drops = LengthDropLosses(model, options=LengthDrop(0.5))
            learned(TaskLosses(model) if kind == "plain" else drops, seed)
            points = search_schedules(model, scored, rounds=10, mutations=10, crossovers=10, seed=seed)
            pairs = [(model, within(points, cost).schedule) for cost in COSTS]
        whole = flops_of(first, [LENGTH], None)
        yield {
            **{"step": "elimination", "name": f"elimination-{kind}-{seed}", "status": "ok"},
            **{"kind": kind, "seed": seed, "trained_steps": steps},
            "schedules": [[*schedule] for _, schedule in pairs],
            "costs": [flops_of(model, [LENGTH], schedule) / whole for model, schedule in pairs],
            "accuracy": [pruning.accuracy(fastbert.eliminate(*pair), measured) for pair in pairs],
        }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed: accuracy by cost."""
    pairs = zip(row["costs"], row["accuracy"], strict=True)
    return f"{row['name']:<26} {' '.join(f'{cost:.2f}:{right:.3f}' for cost, right in pairs)}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line per kind: the median of seeds, and their range; a point per price and seed of power-bert."""
    figure, (axis,) = axes(6, 3.6)
    for kind, color in KINDS.items():
        own = [row for row in rows if row["kind"] == kind]
        costs, right = ([row[key] for row in own] for key in ("costs", "accuracy"))
        if kind == "power-bert":
            axis.plot(100 * np.ravel(costs), 100 * np.ravel(right), "x", color=color, label=kind)
        else:
            band(axis, 100 * np.array(COSTS), right, color, kind)
    axis.set(xlabel="operations of the layers, %", ylabel="accuracy, %", ylim=(0, 102))
    axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(measure(parser_of("elimination", __doc__).parse_args(), curves, line, draw))
