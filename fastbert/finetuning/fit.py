"""One run: a model learns a task from its training examples, and is scored after each epoch.

The run's directory has, beside what `training.loop` writes, `best/`: the model of the best score as a
HuggingFace directory. Each checkpoint has `evaluations.json`, the scores so far. So a run that is killed at
any moment resumes to the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.checkpoint.files import read_json
from fastbert.finetuning.encoded import Encoded, Source, outputs
from fastbert.finetuning.losses import Method, TaskLosses, losses_of
from fastbert.finetuning.settings import Settings
from fastbert.finetuning.start import decayed_groups, rounding
from fastbert.finetuning.task import Task
from fastbert.finetuning.trained import save
from fastbert.models.base import PreTrainedModel
from fastbert.training import checkpoints
from fastbert.training.loop import DTYPES, STATE, Trainer
from fastbert.training.optimizers import decay_groups
from fastbert.training.parallel import Parallel
from fastbert.training.schedules import Schedule
from fastbert.training.stages import Stage

EVALUATIONS, BEST = "evaluations.json", "best"
BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Split:
    """The examples of a split, as the task's files have them and as tokens."""

    examples: Any
    encoded: Encoded


def fit(
    task: Task,
    build: Callable[[], PreTrainedModel],
    train: Encoded,
    dev: Mapping[str, Split],
    folder: Path,
    settings: Settings,
    segments: bool,
    config: Mapping[str, Any],
    finish: Callable[[Path], None],
    *,
    parallel: Parallel,
    batch_tokens: int = BATCH_TOKENS,
    method: Method | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train, and score after each epoch; returns {"step", "epoch", and split -> scores} of each.

    A model that cannot be the best yet, as its method is not done, has "counts": False besides.

    Args:
        task: see `Task`.
        build: makes the first model, by torch's generator.
        train: with labels.
        dev: split -> its examples; the main score is that of the first split. Without splits the model is
            trained and not scored.
        folder: the run's directory.
        settings: how the model learns.
        segments: whether the model takes token types.
        config: what the result depends on; a run that is there already must have the same.
        finish: writes a tokenizer's files into a model's directory.
        parallel: the processes; not fsdp, because the first process scores by itself.
        batch_tokens: most tokens of a micro-batch, unless an example is longer.
        method: how the model learns besides, or None.
        options: of `Trainer`.
    """
    size, count = settings.batch_size, len(train)
    steps = max(1, math.ceil(settings.epochs * count / size))
    every = min(steps, math.ceil(count / size)) if dev else steps
    built: list[TaskLosses] = []
    # Read once: a checkpoint that is read is hashed, which takes seconds for a large model
    known: list[list[dict[str, Any]]] = []

    def so_far() -> list[dict[str, Any]]:
        if not known:
            known.append(evaluations(folder))
        return known[0]

    def begin() -> TaskLosses:
        if method is not None:
            method.check(settings)
        given = rounding(build(), settings), settings, task.fields
        built[:] = [losses_of(*given) if method is None else method.losses(*given, steps)]
        return built[0]

    def evaluate(checkpoint: Path) -> None:
        step = read_json(checkpoint / STATE)["step"]
        history = so_far()
        # An interrupted run is saved at any step, also before the first
        if step == steps or (step > 0 and step % every == 0):
            model, dtype = built[0].scored(), DTYPES[settings.dtype]
            scores = {split: _scored(task, model, each, dtype) for split, each in dev.items()}
            entry = {"step": step, "epoch": step * size / count, **scores}
            history.append(entry if built[0].is_final else {**entry, "counts": False})
            if dev and built[0].is_final and best_of(task, history) is history[-1]:
                save(built[0].trained(), folder / BEST)
                finish(folder / BEST)
        (checkpoint / EVALUATIONS).write_text(json.dumps(history, indent=1) + "\n")

    def groups(module: Any, weight_decay: float) -> list[dict[str, Any]]:
        decay = settings.layer_decay
        usual = decay_groups if decay == 1 else decayed_groups(decay)
        return module.grouped(usual(module, weight_decay))

    stage = Stage(
        steps,
        Source(train, segments),
        begin,
        Schedule("linear", settings.lr, steps, warmup=settings.warmup if steps > 1 else 0),
        micro_batches=(parts := micro_batches(train.lengths, size, parallel.world, batch_tokens)),
        sequences=size // parts,
        options={"kind": settings.optimizer, "weight_decay": settings.weight_decay, "eps": settings.eps},
        groups=groups,
    )
    trainer = Trainer(
        [stage],
        folder,
        config,
        seed=settings.seed,
        dtype=settings.dtype,
        parallel=parallel,
        save_every=every,
        keep=1,
        # A graph reads the weights at fixed addresses, and may not check integer products
        graphs=method is None and not (settings.mixout or settings.qat),
        finish=evaluate,
        **options,
    )
    trainer.run()
    # The first process may remove the checkpoint before another one reads it
    return parallel.broadcast(so_far() if parallel.is_first else None)


def micro_batches(lengths: np.ndarray, size: int, world: int, batch_tokens: int = BATCH_TOKENS) -> int:
    """Micro-batches per step of `size` examples, shared by all processes: each of at most `batch_tokens`."""
    longest = int(lengths.max())
    divisors = [n for n in range(1, size + 1) if size % n == 0 and n % world == 0]
    if not divisors:
        raise ValueError(f"batch_size: {size} cannot be shared equally by {world} processes")
    return next((n for n in divisors if size // n * longest <= batch_tokens), divisors[-1])


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The scores so far, from the newest checkpoint that is whole."""
    found, _ = checkpoints.newest(folder)
    return [] if found is None else json.loads((found / EVALUATIONS).read_text())


def best_of(task: Task, history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The evaluation of the best model that counts; of equal ones the first."""
    counted = [entry for entry in history if entry.get("counts", True)]
    return max(counted, key=lambda entry: score_of(task, entry))


def score_of(task: Task, entry: Mapping[str, Any]) -> float:
    """The main score of an evaluation: of the first split."""
    return next(scores[task.metric] for scores in entry.values() if isinstance(scores, dict))


def _scored(task: Task, model: PreTrainedModel, split: Split, dtype: torch.dtype) -> dict[str, float]:
    found = outputs(model, split.encoded, task.fields, batch_tokens=BATCH_TOKENS, dtype=dtype)
    said = task.predictions(split.examples, split.encoded, found)
    task.tune(split.examples, said)
    return task.scores(split.examples, said)
