"""`fastbert analyze syntax`: attention to words by their label, and attention heads as parsers."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from fastbert.analysis import pictures
from fastbert.analysis import syntax as analysis
from fastbert.analysis.sections import head_name
from fastbert.analysis.treebank import Sentence
from fastbert.cli.analyses.found import Found
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

# most relations that are printed and drawn
RELATIONS = 12


def syntax(
    args: argparse.Namespace, model: PreTrainedModel, sentences: list[Sentence], examples: Examples
) -> Found:
    """Attention by label, and heads as parsers, on a treebank."""
    analysis.check_halves(len(sentences))
    labels, parsing = on_trees(args, model, sentences, examples)
    return of_syntax(labels, parsing, parsing.best(seed=args.seed))


def on_trees(
    args: argparse.Namespace, model: PreTrainedModel, sentences: list[Sentence], examples: Examples
) -> tuple[analysis.AttentionByLabel, analysis.Parsing]:
    """Attention by label, and heads as parsers."""
    analysis.check_maps(model, examples, args.max_bytes)
    labels = analysis.attention_by_label(model, examples, sentences, batch_tokens=args.batch_tokens)
    options = {"batch_tokens": args.batch_tokens, "max_bytes": args.max_bytes}
    return labels, analysis.parse(model, examples, sentences, **options)


def of_syntax(
    labels: analysis.AttentionByLabel, parsing: analysis.Parsing, best: list[analysis.Best]
) -> Found:
    """Numbers, arrays and figures of what `on_trees` returns; `best` are the best heads of `parsing`."""
    counts, scores = labels.counts(), labels.scores()
    to_label, share = labels.to_label.mean(1), labels.share.mean(1)
    accuracy = np.moveaxis(parsing.accuracy(), -1, 0)
    found = [i for i, count in enumerate(counts) if count]
    groups, intervals = {}, {}
    for each in best:
        groups[each.relation] = {"best head": each.accuracy.mean, "fixed offset": each.baseline}
        intervals[each.relation] = each.accuracy.ends
        if each.relation in analysis.PUBLISHED:
            published = analysis.PUBLISHED[each.relation]
            groups[each.relation]["head, Clark et al."] = published.accuracy
            if published.offset is not None:
                groups[each.relation]["offset, Clark et al."] = published.offset
    figures = {
        "labels": pictures.heat_maps(
            {f"to {analysis.LABELS[i]} ({share[i]:.0%} of tokens)": to_label[i] for i in found}
        ),
        "scores": pictures.heat_maps({f"score of {analysis.LABELS[i]}": scores[i] for i in found}),
        "heads": pictures.heat_maps(
            {f"{name} (all arcs)": accuracy[i] for i, name in enumerate(analysis.DIRECTIONS)},
            low=0.0,
            high=float(accuracy.max()),
        ),
    }
    if best:
        figures["relations"] = pictures.bars(
            dict(list(groups.items())[:RELATIONS]), intervals, "share of arcs", "the best head for a relation"
        )
    numbers = {
        "labels": {
            name: {
                "n": int(counts[i]),
                "share_of_tokens": float(share[i]),
                "share_of_attention": float(to_label[i].mean()),
                "largest_score": float(scores[i].max()) if counts[i] else None,
            }
            for i, name in enumerate(analysis.LABELS)
        },
        "arcs": len(parsing.sentence),
        "sentences": parsing.sentences,
        "best": [_as_numbers(each) for each in best],
        "summary": _lines(labels, best),
    }
    arrays = {
        "to_label": labels.to_label,
        "share": labels.share,
        "score": labels.score,
        "sentence": parsing.sentence,
        "relation": parsing.relation,
        "relations": np.array(parsing.relations),
        "offset": parsing.offset,
        "right": parsing.right,
    }
    return numbers, arrays, figures


def _as_numbers(best: analysis.Best) -> dict[str, Any]:
    published = analysis.PUBLISHED.get(best.relation)
    return {
        **best._asdict(),
        "name": head_name(best.layer, best.head),
        "accuracy": best.accuracy._asdict(),
        "direction": analysis.DIRECTIONS[best.direction],
        "published": None if published is None else published._asdict(),
    }


def _lines(labels: analysis.AttentionByLabel, best: list[analysis.Best]) -> list[str]:
    """Lines about attention by label, and about the heads for the most frequent relations."""
    found = []
    for i, (name, n) in enumerate(zip(analysis.LABELS, labels.counts(), strict=True)):
        line = f"{name}: in {n:,} sentences"
        if n:
            scores = labels.scores()[i]
            layer, head = np.unravel_index(scores.argmax(), scores.shape)
            line += f"; {labels.share[i].mean():.1%} of tokens, {labels.to_label[i].mean():.1%} of attention"
            line += f"; largest score {scores.max():.3f} at {layer + 1}-{head + 1}"
        found.append(line)
    for each in best[:RELATIONS]:
        accuracy = each.accuracy
        line = f"{each.relation}: {each.layer + 1}-{each.head + 1} finds {accuracy.text('.1%')} "
        line += f"of {each.arcs:,} arcs, "
        line += f"{analysis.DIRECTIONS[each.direction]}; offset {each.offset:+d} finds {each.baseline:.1%}"
        published = analysis.PUBLISHED.get(each.relation)
        if published is not None:
            line += f"; published: {published.relation} {published.head} {published.accuracy:.1%}"
            line += "" if published.offset is None else f" (offset {published.offset:.1%})"
        found.append(line)
    if best:
        n, seed = best[0].accuracy.n, best[0].accuracy.seed
        found.append(f"heads chosen on one half of the sentences, scored on the other {n:,}; seed {seed}")
        found.append(
            "published: Clark et al. 2019, bert-base-uncased on the Wall Street Journal with Stanford "
            "dependencies; the labels here differ, but have the same meaning"
        )
    else:
        found.append("heads for relations: too few arcs in each half of the sentences")
    return found
