"""`fastbert analyze starts`: what pre-training is worth for a task."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from fastbert.analysis import pictures
from fastbert.analysis import starts as analysis
from fastbert.analysis.intervals import finite
from fastbert.cli.analyses.found import Found, as_numbers
from fastbert.cli.analyses.loading import transformer_of
from fastbert.cli.usage import UsageError
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples
from fastbert.tasks.glue_tasks import TASKS
from fastbert.tasks.published import OF_STARTS


def starts(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """The same training from frozen, random and pre-trained weights."""
    labels, names = _numbered(args, examples.needed_labels)
    taken = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "seed")}
    found = analysis.starts(
        transformer_of(args.model),
        replace(examples, labels=labels),
        settings=replace(analysis.DEFAULT, **taken),
        device=model.device,
        batch_tokens=args.batch_tokens,
    )
    intervals = found.intervals(seed=args.seed)
    shown = {name: (each.mean, *each.ends) for name, each in intervals.items()}
    title = "the same training from three starts"
    figures = {"starts": pictures.intervals(shown, found.score_name, title)}
    summary = [f"{name}: {found.score_name} {each.text('.4f')}" for name, each in intervals.items()]
    held_out = found.score.shape[1]
    learned = f"learned from {found.learned_from:,} examples in {found.steps:,} steps"
    summary.append(f"{learned}, scored on {held_out:,} others")
    published = [
        {"task": TASKS[task].folder, "metric": metric, "scores": three}
        for task, _, scores in OF_STARTS
        for metric, three in scores.items()
    ]
    rows = "; ".join(
        f"{row['task']} {row['metric']} {' / '.join(f'{score:.1f}' for score in row['scores'])}"
        for row in published
    )
    summary.append(f"published, bert-base-uncased, in the same order: {rows}; Kovaleva et al. 2019")
    summary.append("in that paper the first start is not fine-tuned, and STS-B may be Pearson")
    numbers: dict[str, Any] = {
        "score": found.score_name,
        "intervals": as_numbers(intervals),
        "labels": names,
        "learned_from": found.learned_from,
        "cases": held_out,
        "steps": found.steps,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "lr": args.lr,
        "published": published,
        "summary": summary,
    }
    return numbers, {"loss": found.loss, "score": found.score, "baseline": found.baseline}, figures


def _numbered(args: argparse.Namespace, labels: np.ndarray) -> tuple[np.ndarray, list[Any] | None]:
    """(classes by number, their names), or (numbers, None) for a regression."""
    where = f"--labels {args.labels}"
    if labels.ndim != 1 or labels.dtype.kind not in "iufbU":
        raise UsageError(f"{where}: expected a class or a number per example")
    if labels.dtype.kind == "f":
        return finite("labels", labels).astype(np.float32), None
    names, numbers = np.unique(labels, return_inverse=True)
    if len(names) < 2:
        raise UsageError(f"{where}: expected two classes at least, got {names.tolist()}")
    return numbers.astype(np.int64), names.tolist()
