"""`fastbert analyze heads`, `importance`, `fixed`: what a model loses without heads, or with fixed heads."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from fastbert.analysis import annotations, pictures, sections
from fastbert.analysis import fixed as patterns
from fastbert.analysis import heads as analysis
from fastbert.analysis.intervals import Interval, estimate
from fastbert.analysis.measures import UNRATED
from fastbert.cli.analyses.found import Found, as_numbers
from fastbert.cli.analyses.loading import pooling_of
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

RANDOM_ORDERS = 5
_UNRATED = [
    "the pairs have no labels (--labels): a model that makes all texts alike has the largest cosine, so this "
    "does not show which heads it needs"
]


def _caveat(score_name: str) -> list[str]:
    """A line for the summary if a score rates no model."""
    return _UNRATED if score_name == UNRATED else []


def heads(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """Loss and score without each head or layer."""
    pooling = pooling_of(args, model)
    how = {"pooling": pooling, "batch_tokens": args.batch_tokens}
    found = analysis.ablate(model, examples, unit=args.unit, mode=args.mode, **how)
    numbers, arrays, figures = of_heads(args, found)
    return numbers | {"pooling": pooling}, arrays, figures


def of_heads(args: argparse.Namespace, found: analysis.Ablation) -> Found:
    """Numbers, arrays and figures of an ablation."""
    title = f"{found.score_name} without {'all but the' if args.unit == 'all-but-one' else 'the'} "
    title += "layer" if args.unit == "layer" else "head"
    figures = {
        "score": pictures.heat_maps({f"change of {title}": found.score_change()}, diverging=True),
        "loss": pictures.heat_maps({"change of the loss": found.loss_change()}, diverging=True, worse="high"),
    }
    of_loss, base = found.loss_change(), found.base_intervals(seed=args.seed)
    worst = []
    for index in np.argsort(-of_loss, axis=None, kind="stable")[:5]:
        layer, unit = (int(i) for i in np.unravel_index(index, of_loss.shape))
        worst.append(
            {
                "name": sections.head_name(layer, unit),
                "layer": layer,
                "unit": unit,
                "score": found.interval(layer, unit, seed=args.seed),
                "loss": found.loss_interval(layer, unit, seed=args.seed),
            }
        )
    summary = [f"{found.score_name} of the whole model {base['score'].text('.4f')}"]
    summary += [
        f"without {each['name']}: {found.score_name} {each['score'].text('+.4f')}, "
        f"loss {each['loss'].text('+.4f')}"
        for each in worst
    ]
    numbers: dict[str, Any] = {
        "unit": found.unit,
        "mode": found.mode,
        "cases": len(found.base_score),
        "score": found.score_name,
        "base_score": float(found.base_score.mean()),
        "base_loss": float(found.base_loss.mean()),
        "intervals": as_numbers(base),
        "worst": [
            {key: value._asdict() if isinstance(value, Interval) else value for key, value in each.items()}
            for each in worst
        ],
        "count": of_loss.size,
        "loss falls without": int((of_loss < 0).sum()),
        "summary": summary + _caveat(found.score_name),
    }
    arrays = {name: getattr(found, name) for name in ("base_loss", "base_score", "loss", "score")}
    if len(found.base_loss) > 1:
        arrays["p"] = found.p_values(seed=args.seed)
        numbers["significant"] = int((arrays["p"] < 0.01).sum())
    return numbers, arrays, figures


def importance(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """How much the loss depends on each head, and how many heads can be removed."""
    pooling = pooling_of(args, model)
    how = {"pooling": pooling, "batch_tokens": args.batch_tokens}
    found = analysis.importance(model, examples, **how)
    curves = pruned(found, model, examples, seed=args.seed, **how)
    numbers, arrays, figures = of_importance(args, found, curves)
    return numbers | {"pooling": pooling}, arrays, figures


def pruned(
    found: analysis.Importance, model: PreTrainedModel, examples: Examples, *, seed: int, **how: Any
) -> dict[str, analysis.PruningCurve]:
    """The score while heads are removed, by importance and in random orders; `how` as in `pruning_curve`."""
    count = found.values().size
    draw = np.random.default_rng(seed)
    orders = {"by importance": found.order()}
    orders |= {f"random {i + 1}": draw.permutation(count) for i in range(RANDOM_ORDERS)}
    return {name: analysis.pruning_curve(model, examples, order, **how) for name, order in orders.items()}


def of_importance(
    args: argparse.Namespace, found: analysis.Importance, made: dict[str, analysis.PruningCurve]
) -> Found:
    """Numbers, arrays and figures of importance and pruning."""
    values = found.values()
    count = values.size
    lines = {name: (curve.removed / count, curve.score.mean(1)) for name, curve in made.items()}
    score_name = made["by importance"].score_name
    figures = {
        "importance": pictures.heat_maps(
            {"importance": values, "within its layer": found.values(normalized=True)}
        ),
        "pruning": pictures.curves(lines, "share of heads taken out", score_name, "heads taken out"),
    }
    layer, head = (int(i) for i in np.unravel_index(values.argmax(), values.shape))
    most = found.interval(layer, head, seed=args.seed)
    name = sections.head_name(layer, head)
    summary = [f"most important: {name}, {most.text('.4g')}"]
    points = zip(made["by importance"].removed, made["by importance"].intervals(seed=args.seed), strict=True)
    numbers: dict[str, Any] = {
        "score": score_name,
        "most": {"name": name, "layer": layer, "head": head, "importance": most._asdict()},
        "curve": [{"removed": int(removed), **score._asdict()} for removed, score in points],
        "count": count,
        "cases": len(found.derivatives),
        "summary": summary,
    }
    summary += _caveat(score_name)
    if len(found.derivatives) > 1 and score_name != UNRATED:
        removable = made["by importance"].removable(seed=args.seed)
        numbers |= {"removable": removable, "removable share": removable / count}
        summary.append(f"{removable} of {count} heads can go before the {score_name} drops (p < 0.01)")
    arrays = {"derivatives": found.derivatives, "importance": values}
    arrays |= {f"order, {name}": curve.order for name, curve in made.items()}
    arrays |= {f"score, {name}": curve.score for name, curve in made.items()}
    arrays["removed"] = made["by importance"].removed
    return numbers, arrays, figures


def fixed(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> Found:
    """Loss and score with heads that attend by fixed patterns."""
    assignment = None
    if args.assignment is not None:
        shape = len(model.base_model.layer_list()), model.config.num_attention_heads
        limits = {"layer": shape[0], "head": shape[1]}
        named = annotations.read_patterns(args.assignment, patterns.NAMES, limits)
        assignment = np.zeros(shape, np.int8)
        assignment[named["layer"], named["head"]] = named["pattern"]
    pooling = pooling_of(args, model)
    found = patterns.fixed_heads(model, examples, assignment, pooling=pooling, batch_tokens=args.batch_tokens)
    numbers, arrays, figures = of_fixed(args, found)
    return numbers | {"pooling": pooling}, arrays, figures


def of_fixed(args: argparse.Namespace, found: patterns.FixedHeads) -> Found:
    """Numbers, arrays and figures of fixed heads."""
    title = f"{found.count} of {found.assignment.size} heads"
    counts = found.counts()
    used = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != "learned")
    summary = [
        f"{title} attend by a pattern{': ' + used if used else ''}",
        f"{found.score_name} of the whole model {found.base_score.mean():.4f}",
    ]
    numbers: dict[str, Any] = {
        "cases": len(found.base_score),
        "score": found.score_name,
        "base_score": float(found.base_score.mean()),
        "base_loss": float(found.base_loss.mean()),
        "count": found.count,
        "heads": found.assignment.size,
        "counts": counts,
        "names": list(patterns.NAMES),
        "summary": summary,
    }
    shown = {}
    for key, name in (("patterns", "with the patterns"), ("zero", "with those heads at 0")):
        zero = key == "zero"
        score, loss = found.score_change(zero=zero), found.loss_change(zero=zero)
        numbers[key] = {"score_change": score, "loss_change": loss}
        numbers[key]["intervals"] = as_numbers(
            {
                "score": estimate(found.score_changes(zero=zero), seed=args.seed),
                "loss": estimate(found.loss_changes(zero=zero), seed=args.seed),
            }
        )
        line, shown[name] = f"{name}: {found.score_name} {score:+.4f}", (score, score, score)
        if len(found.score) > 1:
            interval = found.interval(zero=zero, seed=args.seed)
            shown[name] = interval[:3]
            numbers[key] |= {"interval": interval[1:3], "p": found.p_value(zero=zero, seed=args.seed)}
            line = f"{name}: {found.score_name} {interval.text('+.4f')}"
        summary.append(f"{line}, loss {loss:+.4f}")
    summary += _caveat(found.score_name)
    figures = {
        "assignment": pictures.classes(
            found.assignment, patterns.NAMES, "each head's pattern", pictures.MORE_COLORS
        ),
        "change": pictures.intervals(shown, f"change of {found.score_name}", f"{title} fixed"),
    }
    arrays = {name: value for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    return numbers, arrays, figures
