"""`fastbert analyze`: what the heads of a model do on a text, as numbers, arrays and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.analysis import change, effective, geometry, heads, pictures, report, results, sections
from fastbert.analysis.attention import PATTERNS, THRESHOLDS, AttentionStatistics, attention_statistics
from fastbert.analysis.examples import KINDS, SEPARATOR, Examples, masked, read, tokenized
from fastbert.analysis.intervals import Interval
from fastbert.analysis.maps import ExampleMap, example_maps
from fastbert.analysis.measures import Measure
from fastbert.cli.usage import UsageError, device_of
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.task_model import TaskModel
from fastbert.sentences.tokenizer import load_tokenizer

RANDOM_ORDERS = 5
# names of arrays: attention to the tokens of each kind
_TO = tuple("to_" + kind.removeprefix("the ").replace(" ", "_") for kind in KINDS)


def run(args: argparse.Namespace) -> int:
    """Compute, save and print; returns the exit status."""
    output = results.check_free(args.output)
    model = load_model(args)
    examples = load_examples(args, model)
    options = {"kind": args.kind, "seed": args.seed, "input": str(args.input)}
    facts = results.facts(model, examples, **options)
    if args.kind == "report":
        numbers, arrays, page = _report(args, model, examples, facts)
        results.save(output, args.kind, numbers, arrays, {}, page)
    else:
        numbers, arrays, figures = _ANALYSES[args.kind](args, model, examples)
        numbers = facts | numbers
        results.save(output, args.kind, numbers, arrays, figures)
    print(f"{output}: {args.kind} of {len(examples):,} examples, {examples.starts[-1]:,} tokens")
    for line in numbers["summary"]:
        print(f"  {line}")
    if len(examples) > 1:
        print(f"  in brackets: 95% bootstrap intervals over {len(examples):,} examples, seed {args.seed}")
    else:
        print("  one example: intervals over examples need two")
    return 0


def load_model(args: argparse.Namespace) -> PreTrainedModel:
    """The model of --model.

    Raises:
        UsageError: the analysis needs a head, and it has none.
    """
    model = model_of(args.model, args.device)
    if args.kind in ("heads", "importance") and not isinstance(model, TaskModel):
        raise UsageError(
            f"--model {args.model}: {args.kind} needs a model with a head, whose loss it measures; "
            f"config.json names {type(model).__name__}"
        )
    return model


def model_of(directory: str, device: str | None) -> PreTrainedModel:
    """The model of a directory, with the head that its config names, else the encoder; in eval mode."""
    config = EncoderConfig.from_pretrained(directory)
    named = (config.get("architectures") or [""])[0]
    cls = class_of(config.family, named.removeprefix(config.family.class_prefix)) or AutoModel
    return cls.from_pretrained(directory, dtype="auto", device=device_of(device)).eval()


def load_examples(args: argparse.Namespace, model: PreTrainedModel) -> Examples:
    """The examples of the input file, with labels where the analysis needs them."""
    needs_labels = args.kind in ("heads", "importance")
    of_words = needs_labels and isinstance(model, BertForMaskedLM)
    if needs_labels and not of_words and args.labels is None:
        raise UsageError(
            f"--labels: {args.kind} of {type(model).__name__} needs the key of the labels in {args.input}"
        )
    if args.labels is not None and not needs_labels:
        if args.kind != "report":
            raise UsageError(f"--labels: {args.kind} needs none")
        if isinstance(model, BertForMaskedLM) or not isinstance(model, TaskModel):
            raise UsageError(f"--labels: the report of {type(model).__name__} needs none")
    if args.max_examples < 1:
        raise UsageError(f"--max-examples: expected an integer >= 1, got {args.max_examples}")
    found = read(args.input, pairs=args.pairs, labels=None if of_words else args.labels)
    found = {name: values[: args.max_examples] for name, values in found.items()}
    tokenizer = load_tokenizer(args.model)
    max_length = model.config.max_tokens if args.on_long == "truncate" else None
    examples = tokenized(tokenizer, **found, max_length=max_length)
    return masked(examples, _mask_id(tokenizer, args.model), seed=args.seed) if of_words else examples


def _mask_id(tokenizer: Tokenizer, directory: str) -> int:
    for token in ("[MASK]", "<mask>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    raise UsageError(f"--model {directory}: its tokenizer has no mask token")


def _attention(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    return _of_attention(args, found)


def _of_attention(args: argparse.Namespace, found: AttentionStatistics) -> tuple[dict, ...]:
    to_kinds = dict(zip(_TO, found.to_kind, strict=True))
    single = {
        name: getattr(found, name)
        for name in ("entropy", "previous", "itself", "following", "own_text", "most_received")
    }
    means = {name: values.mean(0) for name, values in (single | to_kinds).items()}
    shares = {f"to {kind}": means[key] for kind, key in zip(KINDS, _TO, strict=True)}
    shares |= {
        f"to the {name} token": means[key]
        for name, key in (("previous", "previous"), ("same", "itself"), ("next", "following"))
    }
    figures = {
        "entropy": pictures.heat_maps({"entropy (nats)": means["entropy"]}),
        "looked-at": pictures.heat_maps(shares, low=0.0, high=1.0),
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
        "intervals": _as_numbers(intervals),
        # layers from 1, as they are shown
        "layers over half on separators": [str(i + 1) for i in np.flatnonzero(of_layers[SEPARATOR] > 0.5)],
        "layer with most to": {kind: str(of_layers[i].argmax() + 1) for i, kind in enumerate(KINDS)},
        "summary": summary,
    }
    return numbers, single | to_kinds, figures


def _as_numbers(intervals: dict[str, Interval]) -> dict[str, dict]:
    return {name: interval._asdict() for name, interval in intervals.items()}


def _patterns(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    return _of_patterns(args, found)


def _of_patterns(args: argparse.Namespace, found: AttentionStatistics) -> tuple[dict, ...]:
    shares, intervals = found.shares(), found.share_intervals(seed=args.seed)
    figures = {
        "shares": pictures.stacked_bars({Path(args.input).stem: shares}, "patterns of attention"),
        "commonest": pictures.classes(found.commonest(), PATTERNS, "each head's commonest pattern"),
    }
    numbers = {
        "shares": shares,
        "intervals": _as_numbers(intervals),
        "heads": {name: int((found.commonest() == i).sum()) for i, name in enumerate(PATTERNS)},
        "thresholds": THRESHOLDS._asdict(),
        "summary": [f"{name}: {share.text('.1%')}" for name, share in intervals.items()],
    }
    arrays = {"patterns": found.patterns(), "commonest": found.commonest(), **found.features()}
    return numbers, arrays, figures


def _heads(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = heads.ablate(model, examples, unit=args.unit, mode=args.mode, batch_tokens=args.batch_tokens)
    return _of_heads(args, found)


def _of_heads(args: argparse.Namespace, found: heads.Ablation) -> tuple[dict, ...]:
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
        "score": found.score_name,
        "base_score": float(found.base_score.mean()),
        "base_loss": float(found.base_loss.mean()),
        "intervals": _as_numbers(base),
        "worst": [
            {key: value._asdict() if isinstance(value, Interval) else value for key, value in each.items()}
            for each in worst
        ],
        "count": of_loss.size,
        "loss falls without": int((of_loss < 0).sum()),
        "summary": summary,
    }
    arrays = {name: getattr(found, name) for name in ("base_loss", "base_score", "loss", "score")}
    if len(found.base_loss) > 1:
        arrays["p"] = found.p_values(seed=args.seed)
        numbers["significant"] = int((arrays["p"] < 0.01).sum())
    return numbers, arrays, figures


def _importance(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = heads.importance(model, examples, batch_tokens=args.batch_tokens)
    return _of_importance(args, found, _pruned(args, model, examples, found))


def _pruned(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples, found: heads.Importance
) -> dict[str, heads.PruningCurve]:
    """The score while heads go, by importance and in random orders."""
    count = found.values().size
    draw = np.random.default_rng(args.seed)
    orders = {"by importance": found.order()}
    orders |= {f"random {i + 1}": draw.permutation(count) for i in range(RANDOM_ORDERS)}
    return {
        name: heads.pruning_curve(model, examples, order, batch_tokens=args.batch_tokens)
        for name, order in orders.items()
    }


def _of_importance(
    args: argparse.Namespace, found: heads.Importance, made: dict[str, heads.PruningCurve]
) -> tuple[dict, ...]:
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
        "summary": summary,
    }
    if len(found.derivatives) > 1:
        removable = made["by importance"].removable(seed=args.seed)
        numbers |= {"removable": removable, "removable share": removable / count}
        summary.append(f"{removable} of {count} heads can go before the {score_name} drops (p < 0.01)")
    arrays = {"derivatives": found.derivatives, "importance": values}
    arrays |= {f"order, {name}": curve.order for name, curve in made.items()}
    arrays |= {f"score, {name}": curve.score for name, curve in made.items()}
    arrays["removed"] = made["by importance"].removed
    return numbers, arrays, figures


def _change(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    if args.against is None:
        raise UsageError("--against: change needs the directory of a second model")
    against = model_of(args.against, args.device)
    found = change.change(model, against, examples, batch_tokens=args.batch_tokens)
    return _of_change(args, found)


def _of_change(args: argparse.Namespace, found: change.Change) -> tuple[dict, ...]:
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
        "intervals": _as_numbers(intervals),
        "weights": found.weights.tolist(),
        # from 1, as they are shown
        "layers changed most": [str(i + 1) for i in sorted(order[:2])],
        "summary": summary,
    }
    return numbers, {"attention": found.attention, "hidden": found.hidden, "weights": found.weights}, figures


def _effective(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = effective.effective_attention(model, examples, batch_tokens=args.batch_tokens)
    plain = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    return _of_effective(args, found, plain)


def _of_effective(
    args: argparse.Namespace, found: effective.EffectiveAttention, plain: AttentionStatistics
) -> tuple[dict, ...]:
    # heads whose attention does not vary have no correlation
    filled, known = found.known()
    mean = filled.sum(0) / np.maximum(known.sum(0), 1)
    each, of_each = filled.sum((1, 2)), known.sum((1, 2))
    lengths = np.unique(found.lengths[of_each > 0])
    by_length = [each[found.lengths == n].sum() / of_each[found.lengths == n].sum() for n in lengths]
    figures = {
        "correlation": pictures.heat_maps({"correlation with attention": mean}, high=1.0),
        "lengths": pictures.curves(
            {"all heads": (lengths, np.array(by_length))},
            "tokens",
            "Pearson's r",
            "attention and effective attention",
        ),
    }
    intervals, before = found.intervals(seed=args.seed), plain.intervals(seed=args.seed)
    summary = [
        f"mean correlation of attention and effective attention {intervals['correlation'].text('.4f')}, "
        f"of {known.mean():.1%} of examples and heads; the others do not vary"
    ]
    for to_kind in (f"to {kind}" for kind in KINDS):
        one, other = (each[to_kind].text(".1%") for each in (before, intervals))
        summary.append(f"{to_kind}: attention {one}, effective attention {other}")
    numbers = {
        "intervals": _as_numbers(intervals),
        "attention": _as_numbers({f"to {kind}": before[f"to {kind}"] for kind in KINDS}),
        "summary": summary,
    }
    arrays = {"correlation": found.correlation, "rank": found.rank, "lengths": found.lengths}
    return numbers, arrays | dict(zip(_TO, found.to_kind, strict=True)), figures


def _geometry(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = geometry.geometry(model, examples, seed=args.seed, batch_tokens=args.batch_tokens)
    return _of_geometry(args, found)


def _of_geometry(args: argparse.Namespace, found: geometry.Geometry) -> tuple[dict, ...]:
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


_ANALYSES = {
    "attention": _attention,
    "patterns": _patterns,
    "heads": _heads,
    "importance": _importance,
    "change": _change,
    "effective": _effective,
    "geometry": _geometry,
}


def _report(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples, facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """(numbers, arrays, page) of all analyses; those that share a result run the model for it once."""
    if args.unit != "head":
        raise UsageError(f"--unit {args.unit}: the report takes out one head at a time")
    options, seed = {"batch_tokens": args.batch_tokens}, args.seed
    scored, no_loss = _scored(args, model, examples)
    against = None if args.against is None else model_of(args.against, args.device)
    shown: list[report.Section] = []
    numbers: dict[str, dict] = {}
    arrays: dict[str, np.ndarray] = {}

    def add(section: report.Section, found: tuple[dict, ...] = ({}, {})) -> None:
        shown.append(section)
        numbers[section.name] = found[0] | section.numbers()
        arrays.update({f"{section.name}/{name}": array for name, array in found[1].items()})

    add(sections.model(), _of_model(args, model, examples))
    plain = attention_statistics(model, examples, **options)
    add(sections.attention(plain, seed=seed), _of_attention(args, plain))
    add(sections.patterns(plain), _of_patterns(args, plain))
    maps = example_maps(model, examples, plain, max_bytes=args.max_bytes)
    tokens = _tokens(args, examples, maps)
    without = None if scored is None else heads.ablate(model, scored, mode=args.mode, **options)
    add(sections.maps(maps, tokens, no_loss=no_loss), _of_maps(maps, tokens, without, seed=seed))
    if without is None:
        add(sections.missing("heads", no_loss))
        add(sections.missing("importance", no_loss))
    else:
        add(sections.ablation(without, _loss_of(model), seed=seed), _of_heads(args, without))
        found = heads.importance(model, scored, **options)
        curves = _pruned(args, model, scored, found)
        add(sections.importance(found, curves, seed=seed), _of_importance(args, found, curves))
    if against is not None:
        found = change.change(model, against, examples, **options)
        add(sections.change(found, seed=seed), _of_change(args, found))
    found = effective.effective_attention(model, examples, **options)
    of_effective, more, _ = _of_effective(args, found, plain)
    of_effective["head width"] = model.base_model.layers()[0].form.head_dim
    add(sections.effective(found), (of_effective, more))
    if len(geometry.words_in(examples, geometry.LEAST)):
        found = geometry.geometry(model, examples, seed=seed, **options)
        add(sections.geometry(found, seed=seed), _of_geometry(args, found))
    else:
        reason = f"no word is in {geometry.LEAST} places of these texts; more text is needed"
        add(sections.missing("geometry", reason))
    summary = [f"{name}: {each['summary'][0]}" for name, each in numbers.items() if "summary" in each]
    numbers = facts | {"sections": numbers, "summary": summary}
    title = f"What the heads of {Path(args.model).resolve().name} do"
    return numbers, arrays, report.page(title, numbers, shown)


def _scored(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples
) -> tuple[Examples | None, str]:
    """(the examples with what a loss needs, ""), or (None, why there is no loss)."""
    name = type(model).__name__
    if not isinstance(model, TaskModel):
        return None, f"the model has no head ({name}), so there is no loss that could change."
    if isinstance(model, BertForMaskedLM):
        examples = masked(examples, _mask_id(load_tokenizer(args.model), args.model), seed=args.seed)
    try:
        Measure.of(model, examples)
    except TypeError:
        return None, f"the loss of {name} is not one that this program measures per example."
    except ValueError:
        if args.labels is None:
            return None, f"the loss of {name} needs labels, which were not given (--labels)."
        raise
    return examples, ""


def _loss_of(model: PreTrainedModel) -> str:
    """What the loss of a report's ablation is."""
    if isinstance(model, BertForMaskedLM):
        return "15% of each text's tokens are masked, and it is the cross-entropy of guessing them, in nats"
    return "it is that of the model's own head, with the labels of the file"


def _of_model(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    lengths = examples.lengths
    numbers = {
        "directory": Path(args.model).resolve().name,
        "family": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": len(model.base_model.layers()),
        "heads": model.config.num_attention_heads,
        "count": len(model.base_model.layers()) * model.config.num_attention_heads,
        "hidden size": model.config.hidden_size,
        "texts": Path(args.input).name + (", pairs of texts" if args.pairs else ""),
        "lengths": {
            "least": int(lengths.min()),
            "median": float(np.median(lengths)),
            "most": int(lengths.max()),
        },
    }
    return numbers, {"lengths": lengths}


def _tokens(args: argparse.Namespace, examples: Examples, maps: list[ExampleMap]) -> list[list[str]]:
    """The names of the tokens of each map's example."""
    tokenizer = load_tokenizer(args.model)
    of_each = (examples.ids[examples.rows(np.array([map_.example]))] for map_ in maps)
    return [[tokenizer.id_to_token(int(i)) or "?" for i in ids] for ids in of_each]


def _of_maps(
    maps: list[ExampleMap], tokens: list[list[str]], without: heads.Ablation | None, *, seed: int
) -> tuple[dict, ...]:
    numbers = {}
    for map_, names in zip(maps, tokens, strict=True):
        place = map_.layer, map_.head
        numbers[map_.name] = {
            "name": sections.head_name(*place),
            "layer": map_.layer,
            "head": map_.head,
            "example": map_.example,
            # as it is shown
            "number": map_.example + 1,
            "share": map_.share,
            "tokens": names,
        }
        if without is not None:
            here = without.loss[(map_.example, *place)] - without.base_loss[map_.example]
            numbers[map_.name] |= {
                "loss": without.loss_interval(*place, seed=seed)._asdict(),
                "loss here": float(here),
            }
    return {"maps": numbers}, {map_.name: map_.probabilities for map_ in maps}
