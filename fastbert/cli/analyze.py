"""`fastbert analyze`: what the heads of a model do on a text, as numbers, arrays and pictures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from fastbert.analysis import annotations, change, effective, fixed, geometry, heads, pictures, results, syntax
from fastbert.analysis.attention import (
    PATTERNS,
    THRESHOLDS,
    AttentionStatistics,
    attention_statistics,
    commonest_of,
    shares_of,
)
from fastbert.analysis.examples import KINDS, Examples, masked, paired, read, spans_of, tokenized
from fastbert.analysis.targets import LabelledText, read_edges
from fastbert.analysis.treebank import Sentence, as_examples, fitting, read_conllu
from fastbert.cli.analyses.probe import probe
from fastbert.cli.usage import UsageError, device_of
from fastbert.models.auto import AutoModel
from fastbert.models.base import PreTrainedModel, class_of
from fastbert.models.config import EncoderConfig
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.question_answering import BertForQuestionAnswering
from fastbert.models.heads.task_model import TaskModel
from fastbert.sentences.settings import sentence_settings
from fastbert.sentences.tokenizer import load_tokenizer

RANDOM_ORDERS = 5
# most relations that are printed and drawn
_RELATIONS = 12
# analyses that measure a loss
_MEASURED = ("heads", "importance", "fixed")
# options of one analysis -> which
_OWN = {"assignment": "fixed", "annotations": "patterns"}
# names of arrays: attention to the tokens of each kind
_TO = tuple("to_" + kind.removeprefix("the ").replace(" ", "_") for kind in KINDS)
# options that name a file to analyze -> what is in it
_FILES = {
    "input": "a file of examples",
    "conllu": "a treebank in the CoNLL-U format",
    "edges": "a file of labelled spans",
}


def run(args: argparse.Namespace) -> int:
    """Compute, save and print; returns the exit status."""
    output = results.check_free(args.output)
    file = file_of(args)
    for option, kind in _OWN.items():
        if getattr(args, option) is not None and args.kind != kind:
            raise UsageError(f"--{option}: {args.kind} takes none")
    model = model_of(args.model, args.device)
    options = {"kind": args.kind, "seed": args.seed, file: str(getattr(args, file))}
    if args.kind in _OF_WORDS:
        texts, examples, options["left_out"] = load_words(args, model)
        numbers, arrays, figures = _OF_WORDS[args.kind](args, model, texts, examples)
    else:
        examples = load_examples(args, model)
        numbers, arrays, figures = _ANALYSES[args.kind](args, model, examples)
    numbers = results.facts(model, examples, **options) | numbers
    results.save(output, args.kind, numbers, arrays, figures)
    print(f"{output}: {args.kind} of {len(examples):,} examples, {examples.starts[-1]:,} tokens")
    if options.get("left_out"):
        print(f"  sentences left out, too long or with a word of no token: {options['left_out']:,}")
    for line in numbers["summary"]:
        print(f"  {line}")
    return 0


def file_of(args: argparse.Namespace) -> str:
    """The option, of `_FILES`, that names what the analysis reads.

    Raises:
        UsageError: it is missing, or another one is there.
    """
    readable = _READS.get(args.kind, ("input",))
    given = [name for name in _FILES if getattr(args, name) is not None]
    expected = " or ".join(f"--{name}" for name in readable)
    if not set(given) & set(readable):
        what = " or ".join(_FILES[name] for name in readable)
        raise UsageError(f"{expected.replace(' or ', ', ')}: {args.kind} needs {what}")
    for name in given:
        if name not in readable:
            raise UsageError(f"--{name}: {args.kind} does not read it; expected {expected} alone")
    if len(given) > 1:
        raise UsageError(f"--{given[1]}: {args.kind} reads one file; expected {expected} alone")
    return given[0]


def model_of(directory: str, device: str | None) -> PreTrainedModel:
    """The model of a directory, with the head that its config names, else the encoder; in eval mode."""
    config = EncoderConfig.from_pretrained(directory)
    named = (config.get("architectures") or [""])[0]
    cls = class_of(config.family, named.removeprefix(config.family.class_prefix))
    options: dict[str, Any] = {}
    if cls is None or not issubclass(cls, TaskModel):
        # no analysis reads the pooler, and a sentence encoder's directory may have none
        cls, options = AutoModel, {"add_pooling_layer": False}
    return cls.from_pretrained(directory, dtype="auto", device=device_of(device), **options).eval()


def load_examples(args: argparse.Namespace, model: PreTrainedModel) -> Examples:
    """The examples of the input file, with labels where the analysis needs them."""
    measured, name = args.kind in _MEASURED, type(model).__name__
    of_words, of_answers = (
        measured and isinstance(model, head) for head in (BertForMaskedLM, BertForQuestionAnswering)
    )
    of_vectors = measured and not isinstance(model, TaskModel)
    if of_vectors and not args.pairs:
        raise UsageError(
            f"--model {args.model}: {args.kind} of {name}, which has no head, measures the cosine of two "
            "texts; expected --pairs"
        )
    if measured and not (of_words or of_answers or of_vectors) and args.labels is None:
        raise UsageError(f"--labels: {args.kind} of {name} needs the key of the labels in {args.input}")
    if args.labels is not None and not measured:
        raise UsageError(f"--labels: {args.kind} needs none")
    _check_most(args)
    labels = None if of_words else (args.labels or "answers") if of_answers else args.labels
    found = read(args.input, pairs=args.pairs or of_answers, labels=labels)
    found = {name: values[: args.max_examples] for name, values in found.items()}
    if of_answers:
        found["answers"] = spans_of(found.pop("labels"), found["pairs"])
    tokenizer = load_tokenizer(args.model)
    max_length = model.config.max_tokens if args.on_long == "truncate" else None
    if of_vectors:
        return _pairs(args, tokenizer, found, max_length)
    examples = tokenized(tokenizer, **found, max_length=max_length)
    return masked(examples, _mask_id(tokenizer, args.model), seed=args.seed) if of_words else examples


def _pairs(
    args: argparse.Namespace, tokenizer: Tokenizer, found: dict[str, list], max_length: int | None
) -> Examples:
    """Pairs for an encoder without a head, as a directory of sentence-transformers wants its texts."""
    settings = sentence_settings(args.model)
    for name in ("texts", "pairs"):
        texts = [(settings.prompt + text).strip() for text in found[name]]
        found[name] = [text.lower() for text in texts] if settings.lower_case else texts
    most = settings.max_length
    if max_length is not None and most is not None:
        max_length = min(max_length, most)
    examples = paired(tokenizer, **found, max_length=max_length)
    if most is not None and examples.lengths.max() > most:
        number = int(np.argmax(examples.lengths > most))
        raise UsageError(
            f"examples[{number}]: {examples.lengths[number]} tokens; the encoder reads at most {most}"
        )
    return examples


def _pooling(args: argparse.Namespace, model: PreTrainedModel) -> str | None:
    """How an encoder without a head makes its vectors; None for one with a head."""
    return None if isinstance(model, TaskModel) else sentence_settings(args.model).pooling


def load_words(
    args: argparse.Namespace, model: PreTrainedModel
) -> tuple[list[Sentence] | list[LabelledText], Examples, int]:
    """(sentences of the treebank or texts with labelled spans, their examples, how many are left out).

    Left out is a sentence that is longer than the model reads, or has a word of which the tokenizer leaves
    nothing; under `--on-long error` it is an error.
    """
    for name in ("pairs", "labels"):
        if getattr(args, name):
            raise UsageError(f"--{name}: {args.kind} needs none")
    if args.on_long == "truncate":
        raise UsageError("--on-long: a tree is not cut; expected error, or none to leave long sentences out")
    _check_most(args)
    of_trees = args.conllu is not None
    file = args.conllu if of_trees else args.edges
    read = (read_conllu if of_trees else read_edges)(file, args.max_examples)
    tokenizer, max_length = load_tokenizer(args.model), model.config.max_tokens
    kept = read if args.on_long == "error" else fitting(tokenizer, read, max_length)
    if not kept:
        raise UsageError(
            f"--{'conllu' if of_trees else 'edges'} {file}: each of its {len(read):,} sentences is longer "
            f"than {max_length} tokens, or has a word of which the tokenizer leaves nothing"
        )
    return kept, as_examples(tokenizer, kept, max_length), len(read) - len(kept)


def _check_most(args: argparse.Namespace) -> None:
    if args.max_examples < 1:
        raise UsageError(f"--max-examples: expected an integer >= 1, got {args.max_examples}")


def _mask_id(tokenizer: Tokenizer, directory: str) -> int:
    for token in ("[MASK]", "<mask>"):
        found = tokenizer.token_to_id(token)
        if found is not None:
            return found
    raise UsageError(f"--model {directory}: its tokenizer has no mask token")


def _attention(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
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
    summary = [
        f"mean entropy {found.entropy.mean():.3f} nats; of a uniform head {np.log(found.lengths).mean():.3f}",
        *(f"attention to {kind}: {found.to_kind[i].mean():.1%}" for i, kind in enumerate(KINDS)),
    ]
    for name, values in (("previous", found.previous), ("next", found.following)):
        heads_over = int((values.mean(0) > 0.5).sum())
        summary.append(f"heads with over half of their attention on the {name} token: {heads_over}")
    return {"per_layer": per_layer, "summary": summary}, single | to_kinds, figures


def _patterns(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    labels = None
    if args.annotations is not None:
        shape = len(examples), len(model.base_model.layers()), model.config.num_attention_heads
        limits = dict(zip(("example", "layer", "head"), shape, strict=True))
        labels = annotations.read_patterns(args.annotations, PATTERNS, limits)
        annotations.check_labels(labels)
    found: AttentionStatistics = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    arrays = found.features()
    numbers: dict[str, Any] = {}
    if labels is None:
        kinds, summary = found.patterns(), []
        numbers["thresholds"] = THRESHOLDS._asdict()
    else:
        fitted = annotations.fit(found, labels, seed=args.seed)
        kinds = fitted.patterns(found)
        numbers["annotations"] = {
            "file": str(args.annotations),
            "counts": fitted.counts,
            "folds": fitted.folds,
            "macro_f1": fitted.macro_f1,
            "published_f1": annotations.PUBLISHED_F1,
        }
        arrays |= {"classes": fitted.classes, "weights": fitted.weights, "bias": fitted.bias}
        labelled = sum(fitted.counts.values())
        summary = [
            f"macro-F1 {fitted.macro_f1:.2f} over {fitted.folds} folds of {labelled} labelled maps; "
            f"published for a network on maps of its own: {annotations.PUBLISHED_F1}"
        ]
    shares, commonest = shares_of(kinds), commonest_of(kinds)
    figures = {
        "shares": pictures.stacked_bars({Path(args.input).stem: shares}, "patterns of attention"),
        "commonest": pictures.classes(commonest, PATTERNS, "each head's commonest pattern"),
    }
    summary += [f"{name}: {share:.1%}" for name, share in shares.items()]
    numbers |= {"shares": shares, "summary": summary}
    arrays |= {"patterns": kinds, "commonest": commonest}
    return numbers, arrays, figures


def _heads(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    pooling = _pooling(args, model)
    found = heads.ablate(
        model, examples, unit=args.unit, mode=args.mode, pooling=pooling, batch_tokens=args.batch_tokens
    )
    title = f"{found.score_name} without {'all but the' if args.unit == 'all-but-one' else 'the'} "
    title += "layer" if args.unit == "layer" else "head"
    figures = {
        "score": pictures.heat_maps({f"change of {title}": found.score_change()}, diverging=True),
        "loss": pictures.heat_maps({"change of the loss": -found.loss_change()}, diverging=True),
    }
    change = found.score_change()
    worst = np.argsort(found.loss_change(), axis=None)[::-1][:5]
    summary = [f"{found.score_name} of the whole model {found.base_score.mean():.4f}"]
    for index in worst:
        layer, unit = np.unravel_index(index, change.shape)
        summary.append(
            f"without {layer + 1}-{unit + 1}: {found.score_name} {change[layer, unit]:+.4f}, "
            f"loss {found.loss_change()[layer, unit]:+.4f}"
        )
    numbers: dict[str, Any] = {
        "unit": args.unit,
        "mode": args.mode,
        "pooling": pooling,
        "cases": len(found.base_score),
        "score": found.score_name,
        "base_score": float(found.base_score.mean()),
        "base_loss": float(found.base_loss.mean()),
        "summary": summary,
    }
    arrays = {name: getattr(found, name) for name in ("base_loss", "base_score", "loss", "score")}
    if len(found.base_score) > 1:
        arrays["p"] = found.p_values(seed=args.seed)
        numbers["significant"] = int((arrays["p"] < 0.01).sum())
    return numbers, arrays, figures


def _importance(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    how = {"pooling": _pooling(args, model), "batch_tokens": args.batch_tokens}
    found = heads.importance(model, examples, **how)
    values = found.values()
    count = values.size
    draw = np.random.default_rng(args.seed)
    orders = {"by importance": found.order()}
    orders |= {f"random {i + 1}": draw.permutation(count) for i in range(RANDOM_ORDERS)}
    made = {name: heads.pruning_curve(model, examples, order, **how) for name, order in orders.items()}
    lines = {name: (curve.removed / count, curve.score.mean(1)) for name, curve in made.items()}
    score_name = made["by importance"].score_name
    figures = {
        "importance": pictures.heat_maps(
            {"importance": values, "within its layer": found.values(normalized=True)}
        ),
        "pruning": pictures.curves(lines, "share of heads taken out", score_name, "heads taken out"),
    }
    layer, head = np.unravel_index(values.argmax(), values.shape)
    summary = [f"most important: {layer + 1}-{head + 1}, {values.max():.4g}"]
    numbers: dict[str, Any] = {"score": score_name, "summary": summary}
    numbers |= {"pooling": how["pooling"], "cases": len(found.derivatives)}
    if len(found.derivatives) > 1:
        removable = made["by importance"].removable(seed=args.seed)
        numbers["removable"] = removable
        summary.append(f"{removable} of {count} heads can go before the {score_name} drops (p < 0.01)")
    arrays = {"derivatives": found.derivatives, "importance": values}
    arrays |= {f"order, {name}": curve.order for name, curve in made.items()}
    arrays |= {f"score, {name}": curve.score for name, curve in made.items()}
    arrays["removed"] = made["by importance"].removed
    return numbers, arrays, figures


def _fixed(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    assignment = None
    if args.assignment is not None:
        shape = len(model.base_model.layers()), model.config.num_attention_heads
        limits = dict(zip(("layer", "head"), shape, strict=True))
        named = annotations.read_patterns(args.assignment, fixed.NAMES, limits)
        assignment = np.zeros(shape, np.int8)
        assignment[named["layer"], named["head"]] = named["pattern"]
    pooling = _pooling(args, model)
    found = fixed.fixed_heads(model, examples, assignment, pooling=pooling, batch_tokens=args.batch_tokens)
    title = f"{found.count} of {found.assignment.size} heads"
    counts = found.counts()
    given = ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != "learned")
    summary = [
        f"{title} attend by a pattern{': ' + given if given else ''}",
        f"{found.score_name} of the whole model {found.base_score.mean():.4f}",
    ]
    numbers: dict[str, Any] = {
        "pooling": pooling,
        "cases": len(found.base_score),
        "score": found.score_name,
        "base_score": float(found.base_score.mean()),
        "base_loss": float(found.base_loss.mean()),
        "counts": counts,
        "names": list(fixed.NAMES),
        "summary": summary,
    }
    shown = {}
    for key, name in (("patterns", "with the patterns"), ("zero", "with those heads at 0")):
        zero = key == "zero"
        score, loss = found.score_change(zero=zero), found.loss_change(zero=zero)
        numbers[key] = {"score_change": score, "loss_change": loss}
        line, shown[name] = f"{name}: {found.score_name} {score:+.4f}", (score, score, score)
        if len(found.score) > 1:
            interval = found.interval(zero=zero, seed=args.seed)
            shown[name] = interval[:3]
            numbers[key] |= {"interval": interval[1:3], "p": found.p_value(zero=zero, seed=args.seed)}
            line += f" (95%: {interval.low:+.4f} to {interval.high:+.4f})"
        summary.append(f"{line}, loss {loss:+.4f}")
    figures = {
        "assignment": pictures.classes(
            found.assignment, fixed.NAMES, "each head's pattern", pictures.MORE_COLORS
        ),
        "change": pictures.intervals(shown, f"change of {found.score_name}", f"{title} fixed"),
    }
    arrays = {name: value for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    return numbers, arrays, figures


def _change(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    if args.against is None:
        raise UsageError("--against: change needs the directory of a second model")
    against = model_of(args.against, args.device)
    found = change.change(model, against, examples, batch_tokens=args.batch_tokens)
    attention, hidden = found.attention.mean(0), found.hidden.mean(0)
    depth = np.arange(len(hidden))
    lines = {"hidden states": (depth, hidden), "attention": (depth[1:], attention.mean(1))}
    figures = {
        "attention": pictures.heat_maps({"cosine of attention maps": attention}, high=1.0),
        "layers": pictures.curves(lines, "layer (0: embeddings)", "mean cosine", "how alike the models are"),
    }
    layer = int(attention.mean(1).argmin())
    least = f"least in layer {layer + 1}, {attention[layer].mean():.4f}"
    summary = [
        f"attention: mean cosine {attention.mean():.4f}; {least}",
        f"hidden states of the last layer: mean cosine {hidden[-1]:.4f}",
        f"weights: relative change of a layer {found.weights.min():.4g} to {found.weights.max():.4g}",
    ]
    numbers = {"against": str(args.against), "weights": found.weights.tolist(), "summary": summary}
    return numbers, {"attention": found.attention, "hidden": found.hidden, "weights": found.weights}, figures


def _effective(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = effective.effective_attention(model, examples, batch_tokens=args.batch_tokens)
    plain = attention_statistics(model, examples, batch_tokens=args.batch_tokens)
    # heads whose attention does not vary have no correlation
    known = np.isfinite(found.correlation)
    filled = np.where(known, found.correlation, 0.0)
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
    summary = [
        f"mean correlation of attention and effective attention {each.sum() / max(known.sum(), 1):.4f}, "
        f"of {known.mean():.1%} of examples and heads; the others do not vary"
    ]
    for i, kind in enumerate(KINDS):
        before, after = plain.to_kind[i].mean(), found.to_kind[i].mean()
        summary.append(f"to {kind}: attention {before:.1%}, effective attention {after:.1%}")
    arrays = {"correlation": found.correlation, "rank": found.rank, "lengths": found.lengths}
    return {"summary": summary}, arrays | dict(zip(_TO, found.to_kind, strict=True)), figures


def _geometry(args: argparse.Namespace, model: PreTrainedModel, examples: Examples) -> tuple[dict, ...]:
    found = geometry.geometry(model, examples, seed=args.seed, batch_tokens=args.batch_tokens)
    depth = np.arange(len(found.anisotropy))
    lines = {name: (depth, values) for name, values in found.adjusted().items()}
    lines["anisotropy (random words)"] = depth, found.anisotropy
    figures = {
        "layers": pictures.curves(
            lines, "layer (0: embeddings)", "cosine, or share", "words in context, minus random words"
        )
    }
    summary = [f"{len(found.token_ids)} words in {found.counts.sum():,} contexts"]
    summary += [
        f"{name}: {values[0]:.3f} in the embeddings, {values[-1]:.3f} in the last layer"
        for name, (_, values) in lines.items()
    ]
    arrays = {name: value for name, value in vars(found).items() if isinstance(value, np.ndarray)}
    return {"words": len(found.token_ids), "summary": summary}, arrays, figures


def _syntax(
    args: argparse.Namespace, model: PreTrainedModel, sentences: list[Sentence], examples: Examples
) -> tuple[dict, ...]:
    labels = syntax.attention_by_label(model, examples, sentences, batch_tokens=args.batch_tokens)
    parsing = syntax.parse(model, examples, sentences, batch_tokens=args.batch_tokens)
    best = parsing.best(seed=args.seed)
    counts, scores = labels.counts(), labels.scores()
    to_label, share = labels.to_label.mean(1), labels.share.mean(1)
    accuracy = np.moveaxis(parsing.accuracy(), -1, 0)
    found = [i for i, count in enumerate(counts) if count]
    groups, intervals = {}, {}
    for each in best:
        groups[each.relation] = {"best head": each.accuracy.mean, "fixed offset": each.baseline}
        intervals[each.relation] = each.accuracy.low, each.accuracy.high
        if each.relation in syntax.PUBLISHED:
            published = syntax.PUBLISHED[each.relation]
            groups[each.relation]["head, Clark et al."] = published.accuracy
            if published.offset is not None:
                groups[each.relation]["offset, Clark et al."] = published.offset
    figures = {
        "labels": pictures.heat_maps(
            {f"to {syntax.LABELS[i]} ({share[i]:.0%} of tokens)": to_label[i] for i in found}
        ),
        "scores": pictures.heat_maps({f"score of {syntax.LABELS[i]}": scores[i] for i in found}),
        "heads": pictures.heat_maps(
            {f"{name} (all arcs)": accuracy[i] for i, name in enumerate(syntax.DIRECTIONS)},
            low=0.0,
            high=float(accuracy.max()),
        ),
    }
    if best:
        figures["relations"] = pictures.bars(
            dict(list(groups.items())[:_RELATIONS]),
            intervals,
            "share of arcs",
            "the best head for a relation",
        )
    numbers = {
        "labels": {
            name: {
                "n": int(counts[i]),
                "share_of_tokens": float(share[i]),
                "share_of_attention": float(to_label[i].mean()),
                "largest_score": float(scores[i].max()) if counts[i] else None,
            }
            for i, name in enumerate(syntax.LABELS)
        },
        "arcs": len(parsing.sentence),
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


def _as_numbers(best: syntax.Best) -> dict[str, Any]:
    published = syntax.PUBLISHED.get(best.relation)
    return {
        **best._asdict(),
        "accuracy": best.accuracy._asdict(),
        "direction": syntax.DIRECTIONS[best.direction],
        "published": None if published is None else published._asdict(),
    }


def _lines(labels: syntax.AttentionByLabel, best: list[syntax.Best]) -> list[str]:
    """What is printed of attention by label, and of the heads for the most frequent relations."""
    found = []
    for i, (name, n) in enumerate(zip(syntax.LABELS, labels.counts(), strict=True)):
        line = f"{name}: in {n:,} sentences"
        if n:
            scores = labels.scores()[i]
            layer, head = np.unravel_index(scores.argmax(), scores.shape)
            line += f"; {labels.share[i].mean():.1%} of tokens, {labels.to_label[i].mean():.1%} of attention"
            line += f"; largest score {scores.max():.3f} at {layer + 1}-{head + 1}"
        found.append(line)
    for each in best[:_RELATIONS]:
        accuracy = each.accuracy
        line = f"{each.relation}: {each.layer + 1}-{each.head + 1} finds {accuracy.mean:.1%} "
        line += f"({accuracy.low:.1%} to {accuracy.high:.1%}) of {each.arcs:,} arcs, "
        line += f"{syntax.DIRECTIONS[each.direction]}; offset {each.offset:+d} finds {each.baseline:.1%}"
        published = syntax.PUBLISHED.get(each.relation)
        if published is not None:
            line += f"; published: {published.relation} {published.head} {published.accuracy:.1%}"
            line += "" if published.offset is None else f" (offset {published.offset:.1%})"
        found.append(line)
    if best:
        n, seed = best[0].accuracy.n, best[0].accuracy.seed
        found.append(f"heads chosen on one half of the sentences, scored on the other {n:,}; seed {seed}")
        found.append(
            "published: Clark et al. 2019, bert-base-uncased on the Wall Street Journal with Stanford "
            "dependencies; the labels here are others, though of the same meaning"
        )
    else:
        found.append("heads for relations: too few arcs in each half of the sentences")
    return found


_ANALYSES = {
    "attention": _attention,
    "patterns": _patterns,
    "heads": _heads,
    "importance": _importance,
    "fixed": _fixed,
    "change": _change,
    "effective": _effective,
    "geometry": _geometry,
}
# of files that come in words: they get those too
_OF_WORDS = {"syntax": _syntax, "probe": probe}
# which files they read; all others read examples
_READS = {"syntax": ("conllu",), "probe": ("conllu", "edges")}
