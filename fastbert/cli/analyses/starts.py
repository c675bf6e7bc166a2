"""`fastbert analyze starts`: what pre-training is worth for a task."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fastbert.analysis import pictures
from fastbert.analysis import starts as analysis
from fastbert.analysis.intervals import finite
from fastbert.cli.analyses.found import Found, as_numbers
from fastbert.cli.usage import UsageError
from fastbert.models.auto import AutoModelForSequenceClassification
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.sequence_classification import BertForSequenceClassification
from fastbert.tasks.examples import Examples


def starts(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """The same training from frozen, random and pre-trained weights."""
    labels, names = _numbered(args, examples.needed_labels)
    recipe = analysis.Recipe(args.epochs, args.batch_size, args.lr)
    model = _with_head(args, model, 1 if names is None else len(names))
    examples = replace(examples, labels=labels)
    options = {"recipe": recipe, "seed": args.seed, "batch_tokens": args.batch_tokens}
    found = analysis.starts(model, examples, **options)
    intervals = found.intervals(seed=args.seed)
    shown = {name: (each.mean, *each.ends) for name, each in intervals.items()}
    title = "the same training from three starts"
    figures = {"starts": pictures.intervals(shown, found.score_name, title)}
    summary = [f"{name}: {found.score_name} {each.text('.4f')}" for name, each in intervals.items()]
    held_out = found.score.shape[1]
    learned = f"learned from {found.learned_from:,} examples in {found.steps:,} steps"
    summary.append(f"{learned}, scored on {held_out:,} others")
    published = "; ".join(
        f"{each.task} {' / '.join(f'{score:.1f}' for score in each.scores)}" for each in analysis.PUBLISHED
    )
    summary.append(f"published, bert-base-uncased, in the same order: {published}; Kovaleva et al. 2019")
    numbers: dict[str, Any] = {
        "score": found.score_name,
        "intervals": as_numbers(intervals),
        "labels": names,
        "learned_from": found.learned_from,
        "cases": held_out,
        "steps": found.steps,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "published": [each._asdict() for each in analysis.PUBLISHED],
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


def _with_head(
    args: argparse.Namespace, model: PreTrainedModel, classes: int
) -> BertForSequenceClassification:
    """The model with a head for `classes` classes; for a number if `classes` is 1."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        torch.manual_seed(args.seed)  # for a pooler that the directory lacks
        # a fresh head is intended
        warnings.filterwarnings("ignore", ".*: has (no weights for|weights of other shapes)", UserWarning)
        return AutoModelForSequenceClassification.from_pretrained(
            args.model,
            dtype="auto",
            device=model.device,
            num_labels=classes,
            problem_type=None,
            ignore_mismatched_sizes=True,
        ).eval()
