"""Accuracy over the share that is pruned, by score and without retraining: `python bench/pruning.py`.

A small encoder learns two tasks. In one half of the texts there is a key, then words that each have a key and
a value, in random order; the label is the value of the word with the text's key, which heads find. In the
other half there is a number beside the key, and the label is in a fixed random table, which neurons
remember. Each seed trains its own model, on texts and a table of its own.

    python bench/pruning.py [--seeds 5] [--json FILE] [--figure FILE.png]

A row has the accuracy of one seed's whole model and at each share, for one unit and score.

    python bench/pruning.py --learned [--seeds 5] [--json FILE]

The model is fine-tuned to another table, and single weights become zeros meanwhile: those of the smallest
size, or those that movement pruning finds. Both have the same texts, steps, learning rate and cubic schedule.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

import fastbert
from bench.lib.curves import axes, band, measure, parser_of
from fastbert.analysis.measures import Measure
from fastbert.compression import shrink
from fastbert.compression.movement import Movement, MovementPruning
from fastbert.compression.scores import SCORES
from fastbert.layers.modules import part
from fastbert.tasks.examples import Examples

KEYS, NUMBERS, VALUES = 12, 12, 6
WORDS = 10
# [PAD], [CLS] and [SEP], then keys, then numbers, then a word per key and value
FIRST_KEY, FIRST_NUMBER, FIRST_WORD = 3, 3 + KEYS, 3 + KEYS + NUMBERS
CONFIG = {
    "vocab_size": FIRST_WORD + KEYS * VALUES,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
    "num_labels": VALUES,
}
STEPS, BATCH, LEARNING_RATE = 3000, 128, 1e-3
# Training ends at this accuracy of the last steps
LEARNED = 0.995
# Of `--learned`: steps and learning rate of the fine-tuning, and the shares that become zeros
LEARNED_STEPS, LEARNED_RATE = 600, 3e-4
LEARNED_SHARES = (0.0, 0.7, 0.85, 0.95)
SHARES = tuple(i / 10 for i in range(1, 10))
UNITS = ("heads", "neurons")


Texts = Callable[[np.random.Generator, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def table_of(seed: int) -> np.ndarray:
    """(KEYS, NUMBERS) labels."""
    return np.random.default_rng([seed, 3]).integers(0, VALUES, (KEYS, NUMBERS))


def texts(draw: np.random.Generator, table: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids (count, WORDS + 4), labels (count,))."""
    keys = draw.permuted(np.tile(np.arange(KEYS), (count, 1)), axis=1)[:, :WORDS]
    values = draw.integers(0, VALUES, (count, WORDS))
    words = FIRST_WORD + keys * VALUES + values
    numbers, asks = draw.integers(0, NUMBERS, count), draw.random(count) < 0.5
    # The key is that of the first word, which then moves
    ids = np.empty((count, WORDS + 4), np.int64)
    ids[:, 0], ids[:, 1], ids[:, 3] = 1, FIRST_KEY + keys[:, 0], 2
    ids[:, 2] = np.where(asks, FIRST_NUMBER + numbers, 2)
    ids[:, 4:] = draw.permuted(words, axis=1)
    return ids, np.where(asks, table[keys[:, 0], numbers], values[:, 0])


def examples(draw: np.random.Generator, table: np.ndarray, count: int, texts: Texts = texts) -> Examples:
    """Labelled texts, as `fastbert.prune` takes them."""
    ids, labels = texts(draw, table, count)
    flat = ids.ravel()
    none = np.zeros_like(flat)
    starts = np.arange(count + 1) * ids.shape[1]
    return Examples(flat, starts, none, none, none.astype(np.int8), none, labels)


def rise_and_fall(step: int, steps: int) -> float:
    """The factor of the learning rate."""
    return min(1, (step + 1) / 100) * (1 - step / steps)


def trained(
    seed: int, texts: Texts = texts, **config: int
) -> tuple[fastbert.BertForSequenceClassification, int]:
    """(a model that has learned the task, the steps that it took).

    Args:
        seed: of the model, the texts and the table.
        texts: makes texts of the task.
        config: keys that override `CONFIG`.
    """
    torch.manual_seed(seed)
    model = fastbert.BertForSequenceClassification(fastbert.EncoderConfig(**CONFIG | config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    draw, table, right = np.random.default_rng([seed, 0]), table_of(seed), 0.0
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rise_and_fall(step, STEPS)
        ids, labels = map(torch.from_numpy, texts(draw, table, BATCH))
        out = model(input_ids=ids, labels=labels)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        right += 0.02 * ((out.logits.argmax(-1) == labels).float().mean().item() - right)
        if right > LEARNED:
            break
    return model.eval(), step + 1


def accuracy(model: fastbert.BertForSequenceClassification, measured: Examples) -> float:
    return float(Measure.of(model, measured).scores().mean())


def curves(seed: int) -> Iterator[dict[str, Any]]:
    """A row per unit and score: the accuracies of one seed's model, the whole first."""
    model, steps = trained(seed)
    draws = (np.random.default_rng([seed, i]) for i in (1, 2))
    chosen_by, measured = (examples(draw, table_of(seed), 1000) for draw in draws)
    whole = accuracy(model, measured)
    for unit, score in itertools.product(UNITS, SCORES):
        given = {"examples": chosen_by} if score == "taylor" else {}
        how = {"score": score, "multiple": 1, "seed": seed, **given}
        pruned = (fastbert.prune(model, **{unit: share}, **how).model for share in SHARES)
        yield {
            **{"step": "pruning", "name": f"pruning-{unit}-{score}-{seed}", "status": "ok"},
            **{"unit": unit, "score": score, "seed": seed, "trained_steps": steps},
            "shares": [0, *SHARES],
            "accuracy": [whole, *(accuracy(each, measured) for each in pruned)],
        }


def tuned(
    model: fastbert.BertForSequenceClassification, seed: int, share: float, score: str
) -> fastbert.BertForSequenceClassification:
    """The model, fine-tuned to another table while this share of its layers' weights becomes zeros."""
    model = copy.deepcopy(model).train()
    pruning = MovementPruning(model, LEARNED_STEPS, Movement(keep=1 - share))
    layers = model.base_model.layer_list()
    matrices = [part(layer, path).weight for layer in layers for path in shrink.paths(layer.form)]

    @torch.no_grad()
    def by_size() -> None:
        for scores, matrix in zip(pruning.scores, matrices, strict=True):
            scores.copy_(matrix.abs())

    rates = {"weights": LEARNED_RATE, "scores": pruning.options.lr}
    groups = [
        {"params": model.parameters(), "of": "weights"},
        {"params": pruning.scores, "of": "scores", "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, LEARNED_RATE, weight_decay=0.01)
    draw, table = np.random.default_rng([seed, 4]), table_of(seed + 1000)
    for step in range(LEARNED_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates[group["of"]] * rise_and_fall(step, LEARNED_STEPS)
        if score == "magnitude":
            by_size()
        ids, labels = map(torch.from_numpy, texts(draw, table, BATCH))
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        pruning.step()
    if score == "magnitude":
        by_size()
    return pruning.finish().model.eval()


def learned_curves(seed: int) -> Iterator[dict[str, Any]]:
    """A row per way of choosing: the accuracies of one seed's fine-tuned models, the whole first."""
    model, steps = trained(seed)
    measured = examples(np.random.default_rng([seed, 5]), table_of(seed + 1000), 1000)
    for score in ("magnitude", "movement"):
        found = [accuracy(tuned(model, seed, share, score), measured) for share in LEARNED_SHARES]
        yield {
            **{"step": "pruning", "name": f"pruning-weights-{score}-{seed}", "status": "ok"},
            **{"unit": "weights", "score": score, "seed": seed, "trained_steps": steps},
            "shares": [*LEARNED_SHARES],
            "accuracy": found,
        }


def line(row: dict[str, Any]) -> str:
    return f"{row['name']:<28} {' '.join(f'{each:.3f}' for each in row['accuracy'])}"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A chart per unit: the median of seeds, and their range."""
    figure, each_axis = axes(9, 3.4, 2)
    for axis, unit in zip(each_axis, UNITS, strict=True):
        for score, color in zip(SCORES, ("#2266aa", "#cc7722", "#888888"), strict=True):
            own = [row for row in rows if (row["unit"], row["score"]) == (unit, score)]
            percent = 100 * np.array(own[0]["shares"])
            band(axis, percent, [row["accuracy"] for row in own], color, score)
        axis.set(xlabel=f"removed {unit}, %", ylim=(0, 102))
        axis.axhline(100 / VALUES, color="black", linewidth=0.6, linestyle=":")
    each_axis[0].set_ylabel("accuracy, %")
    each_axis[0].legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.18))
    each_axis[1].annotate("guessing", (90, 100 / VALUES + 2), ha="right", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = parser_of("pruning", __doc__)
    parser.add_argument("--learned", action="store_true", help="zeros that are chosen while a model learns")
    args = parser.parse_args()
    if args.learned and args.figure is not None:
        parser.error("--figure: is of heads and neurons; expected none with --learned")
    rows_of = learned_curves if args.learned else curves
    return measure(args, rows_of, line, draw, learned=args.learned)


if __name__ == "__main__":
    sys.exit(main())
