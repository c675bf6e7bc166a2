"""`fastbert analyze change` and `geometry`: what differs between models, and how contextual words are."""

from __future__ import annotations

import argparse

import numpy as np

from fastbert.analysis import change as changes
from fastbert.analysis import geometry as words_in_space
from fastbert.analysis import pictures
from fastbert.cli.analyses.found import Found, as_numbers
from fastbert.cli.analyses.loading import analysed
from fastbert.cli.usage import UsageError
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples


def change(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """How a second model differs."""
    if args.against is None:
        raise UsageError("--against: change needs the directory of a second model")
    against = analysed(args.against, args.device)
    found = changes.change(model, against, examples, batch_tokens=args.batch_tokens)
    return of_change(args, found)


def of_change(args: argparse.Namespace, found: changes.Change) -> Found:
    """Numbers, arrays and figures of a change."""
    attention, hidden = found.attention.mean(0), found.hidden.mean(0)
    depth = np.arange(len(hidden))
    lines = {"hidden states": (depth, hidden), "attention": (depth[1:], attention.mean(1))}
    figures = {
        "attention": pictures.heat_maps({"cosine of attention maps": attention}, high=1.0),
        "layers": pictures.curves(lines, "layer (0: embeddings)", "mean cosine", "how alike the models are"),
    }
    intervals = found.intervals(seed=args.seed)
    order = np.argsort(attention.mean(1), kind="stable")
    least = f"least in layer {order[0] + 1}, {attention[order[0]].mean():.4f}"
    summary = [
        f"attention: mean cosine {intervals['attention'].text('.4f')}; {least}",
        f"hidden states of the last layer: mean cosine {intervals['last hidden states'].text('.4f')}",
        f"weights: relative change of a layer {found.weights.min():.4g} to {found.weights.max():.4g}",
    ]
    numbers = {
        "against": str(args.against),
        "intervals": as_numbers(intervals),
        "weights": found.weights.tolist(),
        # shown layers count from 1
        "layers changed most": [str(i + 1) for i in sorted(order[:2])],
        "summary": summary,
    }
    return numbers, {"attention": found.attention, "hidden": found.hidden, "weights": found.weights}, figures


def geometry(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """How contextual words are."""
    found = words_in_space.geometry(model, examples, seed=args.seed, batch_tokens=args.batch_tokens)
    return of_geometry(args, found)


def of_geometry(args: argparse.Namespace, found: words_in_space.Geometry) -> Found:
    """Numbers, arrays and figures of the geometry."""
    depth = np.arange(len(found.anisotropy))
    lines = {name: (depth, values) for name, values in found.adjusted().items()}
    lines["anisotropy (random words)"] = depth, found.anisotropy
    figures = {
        "layers": pictures.curves(
            lines, "layer (0: embeddings)", "cosine, or share", "words in context, minus random words"
        )
    }
    words, contexts = len(found.token_ids), int(found.counts.sum())
    intervals = found.intervals(seed=args.seed)
    summary = [f"{words} words in {contexts:,} contexts"]
    summary += [
        f"{name}: {values[0].text('.3f')} in the embeddings, {values[-1].text('.3f')} in the last layer"
        for name, values in intervals.items()
    ]
    first, last = found.anisotropy[[0, -1]]
    summary.append(f"anisotropy (random words): {first:.3f} in the embeddings, {last:.3f} in the last layer")
    layers = {name: [each._asdict() for each in values] for name, values in intervals.items()}
    numbers = {
        "words": words,
        "contexts": contexts,
        "layers": layers | {"anisotropy": found.anisotropy.tolist()},
        "summary": summary,
    }
    arrays = {name: value for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    return numbers, arrays, figures
