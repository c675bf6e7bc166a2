"""`fastbert distill`: a teacher and data to a student, what it costs and how it scores."""

from __future__ import annotations

import argparse
from typing import Any

from fastbert.cli.costs import costs
from fastbert.cli.usage import UsageError, device_of, say
from fastbert.compression.distillation.recipes import RECIPES
from fastbert.compression.distillation.run import Result, distill
from fastbert.sentences.encoder import SentenceEncoder
from fastbert.training.loop import DTYPES, Interrupted
from fastbert.training.parallel import Parallel

# Options that are passed on as they are, if they are given
_SAME = (
    "recipe",
    "student_family",
    "cache",
    "cache_words",
    "lr",
    "epochs",
    "temperature",
    "batch_size",
    "max_length",
)
_SAME += ("layer_map", "relation_heads", "seed", "save_every", "workers", "dtype")


def run(args: argparse.Namespace) -> int:
    """Distil and print; returns the exit status."""
    options: dict[str, Any] = {name: value for name in _SAME if (value := getattr(args, name)) is not None}
    if args.weights is not None:
        options["weights"] = _weights(args.weights)
    parallel = Parallel(None, device_of(args.device), DTYPES[args.dtype or "fp32"])
    try:
        found = distill(
            args.teacher,
            args.layers or args.student,
            args.data,
            args.output,
            task=args.task,
            parallel=parallel,
            progress=args.progress,
            say=say,
            **options,
        )
    except Interrupted as stopped:
        if parallel.is_first:
            say(f"{stopped}; rerun the command to resume")
        return 128 + stopped.number
    finally:
        parallel.close()
    if parallel.is_first:
        for line in (f"{found.output}: {found.recipe}", *_lines(found)):
            print(line)
    return 0


def _lines(found: Result) -> list[str]:
    """What the result costs, scores and is beside the papers'."""
    sides = [
        side.model if isinstance(side, SentenceEncoder) else side for side in (found.teacher, found.student)
    ]
    lines = [f"  {line}" for line in costs(*sides)]
    for split, scores in found.scores.get("teacher", {}).items():
        for name, value in scores.items():
            after = found.scores["student"][split][name]
            lines.append(f"  {f'{name} on {split}':<28} {value:>14.4f} -> {after:>14.4f}")
    lines += [f"  {name:<28} {value:.4g}" for name, value in found.last.items() if name.endswith("_loss")]
    return lines + [f"  published: {row}" for row in RECIPES[found.recipe].published]


def _weights(given: str) -> dict[str, float]:
    try:
        return {name: float(weight) for name, weight in (part.split("=") for part in given.split(","))}
    except ValueError:
        raise UsageError(f"--weights {given}: expected LOSS=X, with commas between") from None
