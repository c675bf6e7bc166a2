"""`fastbert analyze links`: how much the heads attend between words that a file links."""

from __future__ import annotations

import argparse

import numpy as np

from fastbert.analysis import links as analysis
from fastbert.analysis import pictures
from fastbert.analysis.sections import head_name
from fastbert.analysis.targets import LabelledText, of_texts
from fastbert.cli.analyses.found import Found
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples


def links(
    args: argparse.Namespace, model: PreTrainedModel, texts: list[LabelledText], examples: Examples
) -> Found:
    """Numbers, arrays and figures of the links of a file of labelled spans."""
    targets = of_texts(texts, examples)
    analysis.check_halves(len(np.unique(targets.example)))
    found = analysis.links(model, examples, targets, batch_tokens=args.batch_tokens, seed=args.seed)
    best, scores, moved = found.best(), found.scores(), found.scores(moved=True)
    maps = {"links": scores}
    if found.has_room.any():
        maps["the same links at another place"] = moved
    layer, head = np.unravel_index(scores.argmax(), scores.shape)
    name = head_name(best.layer, best.head)
    summary = [
        f"{found.links.sum():,} links in {len(found.example):,} examples; those of "
        f"{int(found.has_room.sum()):,} could also be moved to another place",
        f"largest score {scores.max():.3f} at {head_name(int(layer), int(head))}",
        f"chosen on one half, {name} has {best.score.text('.3f')} on the other {best.score.n:,}"
        + ("" if best.moved is None else f"; of moved links {best.moved.text('.3f')}"),
        f"in brackets: 95% bootstrap intervals over these examples; seed {found.seed}",
        "published: "
        + ", ".join(f"{head} {score}" for head, score in analysis.PUBLISHED.items())
        + " (Kovaleva et al. 2019, bert-base-uncased, 473 sentences of FrameNet)",
    ]
    numbers = {
        "examples_with_links": len(found.example),
        "links": int(found.links.sum()),
        "best": {
            "name": name,
            "layer": best.layer,
            "head": best.head,
            "score": best.score._asdict(),
            "moved": None if best.moved is None else best.moved._asdict(),
        },
        "published": analysis.PUBLISHED,
        "summary": summary,
    }
    arrays = {"example": found.example, "links": found.links, "score": found.score, "moved": found.moved}
    return numbers, arrays, {"scores": pictures.heat_maps(maps, low=0.0, high=float(scores.max()))}
