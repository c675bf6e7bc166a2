"""`fastbert analyze probe`: how well each layer shows labels or trees, beside random weights."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastbert.analysis import pictures, structure
from fastbert.analysis.features import hidden_states, with_random_weights
from fastbert.analysis.intervals import Interval
from fastbert.analysis.probing import EdgeProbe, check_code, control_task, edge_probe, online_code
from fastbert.analysis.structure import Structure, structural_probe
from fastbert.analysis.targets import Targets, of_texts, of_treebank
from fastbert.analysis.treebank import Sentence
from fastbert.cli.analyses.found import Found, known
from fastbert.cli.usage import UsageError
from fastbert.models.base import PreTrainedModel
from fastbert.tasks.examples import Examples

KINDS = ("edge", "mdl", "control", "structural")
# label -> (labels of the same kind, expected layer, centre) of BERT-large; Tenney et al. 2019, fig. 1
TENNEY = {
    "upos": ("parts of speech of the Penn Treebank", 3.39, 11.68),
    "relation": ("dependencies", 5.69, 13.75),
}
# UUAS and Spearman's correlation of the best layer; Hewitt and Manning 2019, table 1
HEWITT = {"BERT-base, layer 7": (0.798, 0.85), "BERT-large, layer 15": (0.825, 0.86)}
# names of the model's line and of the line of random weights
BOTH = ("this model", "with random weights")


# calls a function with (hidden states, device for its probes), once per model
Each = Callable[[Callable[[Tensor, torch.device], Any]], list[Any]]


def probe(args: argparse.Namespace, model: PreTrainedModel, texts: list[Any], examples: Examples) -> Found:
    """(numbers, arrays, figures) of `--probe`; `texts` are `Sentence`s, or `LabelledText`s of `--edges`."""
    of_trees, kind = args.conllu is not None, args.probe or "edge"
    if kind == "structural" and not of_trees:
        raise UsageError("--probe structural: needs trees; expected --conllu")
    if args.label is not None and (kind == "structural" or not of_trees):
        what = "--probe structural" if kind == "structural" else "--edges"
        raise UsageError(f"--label: {what} takes none")
    if kind == "structural":
        structure.check()
        structure.usable_of(texts)
        return of_structural(args, structural(args, model, texts, examples))
    label = args.label or "upos"
    targets = of_treebank(texts, examples, label) if of_trees else of_texts(texts, examples)
    # errors of the targets are raised before the model runs
    if kind == "mdl":
        check_code(targets)
    else:
        targets.split(args.seed)
    if kind == "control":
        targets.check_labels()
    if kind == "edge":
        numbers, arrays, figures = of_edge(args, edge(args, model, examples, targets))
    else:
        states = _each(args, model, examples, targets.rows)
        numbers, arrays, figures = {"mdl": _mdl, "control": _control}[kind](args, states, targets)
    numbers |= {"probe": kind, "labels": list(targets.label_names), "targets": len(targets)}
    if of_trees:
        numbers["label"] = label
    return numbers, arrays, figures


def _each(args: argparse.Namespace, model: PreTrainedModel, examples: Examples, rows: np.ndarray) -> Each:
    """Calls a function with the hidden states of the model, then with those of a model of random weights."""

    def each(compute: Callable[[Tensor, torch.device], Any]) -> list[Any]:
        found = []
        for one in (model, with_random_weights(model, args.seed)):
            with tempfile.TemporaryDirectory() as folder:
                options = {"path": Path(folder, "states"), "batch_tokens": args.batch_tokens}
                found.append(compute(hidden_states(one, examples, rows, **options), model.device))
        return found

    return each


def _lines(values: list[np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {name: (np.arange(len(each)), each) for name, each in zip(BOTH, values, strict=True)}


def _best(
    what: str, values: list[np.ndarray], interval: Callable[[int], Interval], form: str = ".3f"
) -> list[str]:
    """Lines about scores per layer: the model's best, its embeddings', and random weights' best."""
    layer = int(np.nanargmax(values[0]))
    at_random = int(np.nanargmax(values[1]))
    return [
        f"{what}: {interval(layer).text(form)} from layer {layer}, {values[0][0]:{form}} from the embeddings",
        f"with random weights: {values[1][at_random]:{form}} from layer {at_random}",
    ]


def _named(values: np.ndarray, interval: Callable[[int], Interval]) -> dict[str, Any]:
    """The best layer and its score, for a JSON file."""
    layer = int(np.nanargmax(values))
    return {"layer": layer, "score": interval(layer)._asdict()}


def _seeded(n: int, what: str, seed: int) -> str:
    return f"in brackets: 95% bootstrap intervals over {n:,} {what}; seed {seed}"


def edge(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples, targets: Targets
) -> list[EdgeProbe]:
    """Edge probes of the model, and of a model with random weights."""
    each = _each(args, model, examples, targets.rows)
    return each(lambda states, device: edge_probe(states, targets, seed=args.seed, device=device))


def of_edge(args: argparse.Namespace, found: list[EdgeProbe]) -> Found:
    """Numbers, arrays and figures of what `edge` returns."""
    ours = found[0]
    scores = [one.scores() for one in found]
    depth = np.arange(len(scores[0]))
    lines = _lines(scores) | {"mix of layers 0 to l": (depth, ours.scores_up_to())}
    figures = {
        "layers": pictures.curves(lines, "layer (0: embeddings)", "F1", "labels predicted from a layer"),
        "weights": pictures.curves(
            {"mix of all layers": (depth, ours.weights)},
            "layer (0: embeddings)",
            "share",
            "what the probe of all layers reads",
        ),
    }
    where = f"expected layer {ours.expected_layer():.2f}, centre {ours.centre():.2f}"
    summary = [
        *_best("F1", scores, ours.interval),
        f"mix of all layers: F1 {ours.scores_up_to()[-1]:.3f}; {where}",
    ]
    if args.conllu is not None:
        name, expected, centre = TENNEY[args.label or "upos"]
        summary.append(f"published: {expected} and {centre} for {name}, BERT-large; Tenney et al. 2019")
    train, held_out, test = ours.targets
    summary.append(f"{train:,} targets to learn from, {held_out:,} held out, {test:,} tested")
    summary.append(_seeded(ours.counts.shape[1], "examples", args.seed))
    numbers = {
        "f1": scores[0].tolist(),
        "f1_random_weights": scores[1].tolist(),
        "f1_up_to": ours.scores_up_to().tolist(),
        "best": _named(scores[0], ours.interval),
        "random": _named(scores[1], found[1].interval),
        "tested": test,
        "expected_layer": known(ours.expected_layer()),
        "centre": ours.centre(),
        "intervals": [ours.interval(int(i))._asdict() for i in depth],
        "summary": summary,
    }
    arrays = {"counts": ours.counts, "counts_up_to": ours.counts_up_to, "weights": ours.weights}
    return numbers, arrays | {"counts_random_weights": found[1].counts}, figures


def _mdl(args: argparse.Namespace, each: Each, targets: Targets) -> Found:
    found = each(lambda states, device: online_code(states, targets, seed=args.seed, device=device))
    ours = found[0]
    values = [one.compression() for one in found]
    figures = {
        "layers": pictures.curves(
            _lines(values), "layer (0: embeddings)", "compression", "description length of the labels"
        )
    }
    bits = ours.description_length()
    summary = [
        *_best("compression", values, ours.interval, ".2f"),
        f"{len(targets):,} labels take {bits.min():,.0f} bits, {bits.min() / len(targets):.2f} each",
        _seeded(ours.bits.shape[1], "examples", args.seed),
    ]
    numbers = {
        "compression": values[0].tolist(),
        "compression_random_weights": values[1].tolist(),
        "description_length_bits": bits.tolist(),
        "intervals": [ours.interval(layer)._asdict() for layer in range(len(bits))],
        "summary": summary,
    }
    arrays = {"bits": ours.bits, "targets": ours.targets, "blocks": ours.blocks}
    return numbers, arrays | {"bits_random_weights": found[1].bits}, figures


def _control(args: argparse.Namespace, each: Each, targets: Targets) -> Found:
    found = each(lambda states, device: control_task(states, targets, seed=args.seed, device=device))
    ours = found[0]
    depth = np.arange(len(ours.right))
    lines = {
        "accuracy": (depth, ours.accuracy()),
        "accuracy on the control task": (depth, ours.control()),
        "selectivity": (depth, ours.selectivity()),
        "selectivity with random weights": (depth, found[1].selectivity()),
    }
    figures = {"layers": pictures.curves(lines, "layer (0: embeddings)", "share", "a linear probe")}
    values = [one.selectivity() for one in found]
    layer = int(values[0].argmax())
    summary = [
        *_best("selectivity", values, ours.interval),
        f"accuracy there {ours.accuracy()[layer]:.3f}, on the control task {ours.control()[layer]:.3f}",
        _seeded(ours.right.shape[1], "examples", args.seed),
    ]
    numbers = {
        "accuracy": ours.accuracy().tolist(),
        "control": ours.control().tolist(),
        "selectivity": values[0].tolist(),
        "selectivity_random_weights": values[1].tolist(),
        "intervals": [ours.interval(int(i))._asdict() for i in depth],
        "summary": summary,
    }
    arrays = {"right": ours.right, "right_control": ours.right_control, "targets": ours.targets}
    of_random = {"right": found[1].right, "right_control": found[1].right_control}
    arrays |= {f"{name}_random_weights": array for name, array in of_random.items()}
    return numbers, arrays, figures


def structural(
    args: argparse.Namespace, model: PreTrainedModel, sentences: list[Sentence], examples: Examples
) -> list[Structure]:
    """Structural probes of the model, and of a model with random weights."""
    each = _each(args, model, examples, np.flatnonzero(examples.words >= 0))

    def probe(states: Tensor, device: torch.device) -> Structure:
        options = {"seed": args.seed, "device": device, **_rank(states)}
        return structural_probe(states, sentences, examples, **options)

    return each(probe)


def of_structural(args: argparse.Namespace, found: list[Structure]) -> Found:
    """Numbers, arrays and figures of what `structural` returns."""
    ours = found[0]
    values = [one.uuas() for one in found]
    depth = np.arange(len(values[0]))
    chain = np.full(len(depth), ours.linear_uuas())
    correlations = {"of distances": ours.distance_spearman(), "of depths": ours.depth_spearman()}
    figures = {
        "layers": pictures.curves(
            _lines(values) | {"each word beside the next": (depth, chain)},
            "layer (0: embeddings)",
            "UUAS",
            "edges of the tree found",
        ),
        "correlation": pictures.curves(
            {name: (depth, each) for name, each in correlations.items()},
            "layer (0: embeddings)",
            "Spearman's correlation",
            "distances and depths in the tree",
        ),
    }
    layer = int(values[0].argmax())
    summary = [
        *_best("UUAS", values, ours.interval),
        f"each word beside the next: UUAS {ours.linear_uuas():.3f}, correlation {ours.linear_spearman():.2f}",
        f"layer {layer}: correlation of distances {ours.distance_spearman()[layer]:.2f}, of depths "
        f"{ours.depth_spearman()[layer]:.2f}; the root found in {ours.root_accuracy()[layer]:.1%} of trees",
        "published, on the Penn Treebank: "
        + "; ".join(f"{name} UUAS {u:.3f}, correlation {r:.2f}" for name, (u, r) in HEWITT.items())
        + "; Hewitt and Manning 2019",
        _seeded(len(ours.edges), "sentences", args.seed),
    ]
    numbers = {
        "probe": "structural",
        "rank": ours.rank,
        "uuas": values[0].tolist(),
        "uuas_random_weights": values[1].tolist(),
        "uuas_linear": ours.linear_uuas(),
        "best": _named(values[0], ours.interval),
        "random": _named(values[1], found[1].interval),
        "correlation_of_distances": [known(each) for each in ours.distance_spearman()],
        "correlation_of_depths": [known(each) for each in ours.depth_spearman()],
        "root_accuracy": ours.root_accuracy().tolist(),
        "sentences": list(ours.sentences),
        "intervals": [ours.interval(int(i))._asdict() for i in depth],
        "summary": summary,
    }
    arrays = {name: value for name, value in vars(ours).items() if isinstance(value, np.ndarray)}
    return numbers, arrays | {"found_random_weights": found[1].found}, figures


def _rank(states: Tensor) -> dict[str, int]:
    """The probe's rank, which is at most the model's width."""
    return {"rank": min(64, states.shape[-1])}
