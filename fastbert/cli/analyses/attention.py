"""`fastbert analyze attention`, `patterns` and `effective`: where heads look."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.analysis import effective as analysis
from fastbert.analysis import pictures
from fastbert.analysis.annotations import PUBLISHED_F1, Classifier, check_labels, fit, read_patterns
from fastbert.analysis.attention import (
    PATTERNS,
    THRESHOLDS,
    AttentionStatistics,
    attention_statistics,
    commonest_of,
    shares_of,
)
from fastbert.analysis.intervals import estimate
from fastbert.cli.analyses.found import TO, Found, as_numbers
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import KINDS, SEPARATOR, Examples


def attention(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """Entropy, and what is looked at."""
    found = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    return of_attention(args, found)


def of_attention(args: argparse.Namespace, found: AttentionStatistics) -> Found:
    """Numbers, arrays and figures of the statistics."""
    to_kinds = dict(zip(TO, found.to_kind, strict=True))
    single = {
        name: getattr(found, name)
        for name in ("entropy", "previous", "itself", "following", "own_text", "most_received")
    }
    means = {name: values.mean(0) for name, values in (single | to_kinds).items()}
    figures = {
        "entropy": pictures.heat_maps({"entropy (nats)": means["entropy"]}),
        "looked-at": pictures.heat_maps(
            {name: values.mean(0) for name, values in found.looked_at().items()}, low=0.0, high=1.0
        ),
    }
    per_layer = {name: [round(float(v), 6) for v in values.mean(1)] for name, values in means.items()}
    intervals = found.intervals(seed=args.seed)
    summary = [
        f"mean entropy {intervals['entropy'].text('.3f')} nats; "
        f"of a uniform head {intervals['entropy of a uniform head'].text('.3f')}",
        *(f"attention to {kind}: {intervals[f'to {kind}'].text('.1%')}" for kind in KINDS),
    ]
    for name in ("previous", "next"):
        over = intervals[f"heads over half on the {name} token"].text(".0f")
        summary.append(f"heads with over half of their attention on the {name} token: {over}")
    of_layers = found.to_kind.mean((1, 3))
    numbers = {
        "per_layer": per_layer,
        "intervals": as_numbers(intervals),
        # shown layers count from 1
        "layers over half on separators": [str(i + 1) for i in np.flatnonzero(of_layers[SEPARATOR] > 0.5)],
        "layer with most to": {kind: str(of_layers[i].argmax() + 1) for i, kind in enumerate(KINDS)},
        "summary": summary,
    }
    return numbers, single | to_kinds, figures


def patterns(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """The five patterns, by thresholds or by the user's labels."""
    labels = None
    if args.annotations is not None:
        limits = {"example": len(examples), "layer": len(model.base_model.layer_list())}
        limits["head"] = model.config.num_attention_heads
        labels = read_patterns(args.annotations, PATTERNS, limits)
        check_labels(labels)
    found = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    fitted = None if labels is None else fit(found, labels, seed=args.seed)
    return of_patterns(args, found, fitted)


def of_patterns(
    args: argparse.Namespace, found: AttentionStatistics, fitted: Classifier | None = None
) -> Found:
    """Shares of the patterns, and each head's commonest pattern."""
    arrays: dict[str, np.ndarray] = found.features()
    numbers: dict[str, Any] = {}
    summary = []
    if fitted is None:
        kinds = found.patterns()
        numbers["thresholds"] = THRESHOLDS._asdict()
    else:
        kinds = fitted.patterns(found)
        numbers["annotations"] = {
            "file": str(args.annotations),
            "counts": fitted.counts,
            "folds": fitted.folds,
            "macro_f1": fitted.macro_f1,
            "published_f1": PUBLISHED_F1,
        }
        arrays |= {"classes": fitted.classes, "weights": fitted.weights, "bias": fitted.bias}
        labelled = sum(fitted.counts.values())
        summary.append(
            f"macro-F1 {fitted.macro_f1:.2f} over {fitted.folds} folds of {labelled} labelled maps; "
            f"published for a network on maps of its own: {PUBLISHED_F1}"
        )
    shares, commonest = shares_of(kinds), commonest_of(kinds)
    intervals = {name: estimate(kinds == i, seed=args.seed) for i, name in enumerate(PATTERNS)}
    figures = {
        "shares": pictures.stacked_bars({Path(args.input).stem: shares}, "patterns of attention"),
        "commonest": pictures.classes(commonest, PATTERNS, "each head's commonest pattern"),
    }
    numbers |= {
        "shares": shares,
        "intervals": as_numbers(intervals),
        "heads": {name: int((commonest == i).sum()) for i, name in enumerate(PATTERNS)},
        "summary": [*summary, *(f"{name}: {share.text('.1%')}" for name, share in intervals.items())],
    }
    return numbers, arrays | {"patterns": kinds, "commonest": commonest}, figures


def effective(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """The part of attention that reaches the output."""
    found = analysis.effective_attention(model, examples, batch_tokens=args.batch_tokens)
    plain = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    return of_effective(args, found, plain)


def of_effective(
    args: argparse.Namespace, found: analysis.EffectiveAttention, plain: AttentionStatistics
) -> Found:
    """Numbers, arrays and figures of effective attention beside all attention."""
    figures = {
        "correlation": pictures.heat_maps({"correlation with attention": found.means()}, high=1.0),
        "lengths": pictures.curves(
            {"all heads": found.by_length()}, "tokens", "Pearson's r", "attention and effective attention"
        ),
    }
    intervals, before = found.intervals(seed=args.seed), plain.intervals(seed=args.seed)
    summary = [
        f"mean correlation of attention and effective attention {intervals['correlation'].text('.4f')}, "
        f"of {found.known()[1].mean():.1%} of examples and heads; the rest do not vary"
    ]
    for to_kind in (f"to {kind}" for kind in KINDS):
        one, other = (each[to_kind].text(".1%") for each in (before, intervals))
        summary.append(f"{to_kind}: attention {one}, effective attention {other}")
    numbers = {
        "intervals": as_numbers(intervals),
        "attention": as_numbers({f"to {kind}": before[f"to {kind}"] for kind in KINDS}),
        "summary": summary,
    }
    arrays = {"correlation": found.correlation, "rank": found.rank, "lengths": found.lengths}
    return numbers, arrays | dict(zip(TO, found.to_kind, strict=True)), figures
