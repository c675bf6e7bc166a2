"""`fastbert analyze report`: all analyses of a model and a text on one page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.analysis import (
    change,
    effective,
    fixed,
    geometry,
    heads,
    report,
    sections,
    sections_of_loss,
    sections_of_trees,
    structure,
)
from fastbert.analysis.attention import attention_statistics
from fastbert.analysis.maps import ExampleMap, check_example_maps, example_maps
from fastbert.analysis.measures import Measure
from fastbert.analysis.syntax import check_maps
from fastbert.analysis.targets import of_treebank
from fastbert.analysis.treebank import Sentence
from fastbert.cli.analyses import probe, syntax
from fastbert.cli.analyses.attention import of_attention, of_effective, of_patterns
from fastbert.cli.analyses.heads import of_fixed, of_heads, of_importance, pruned
from fastbert.cli.analyses.layers import of_change, of_geometry
from fastbert.cli.analyses.loading import analysed, mask_id, pooling_of, transformer_of, words_of
from fastbert.models.base import PreTrainedModel
from fastbert.models.heads.masked_lm import BertForMaskedLM
from fastbert.models.heads.task_model import TaskModel
from fastbert.sentences.tokenizer import load_tokenizer
from fastbert.tasks.examples import Examples, masked

# fewest sentences of a treebank: a split for probes needs ten
SENTENCES = 10


def whole(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples, facts: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray], str]:
    """(numbers, arrays, page) of all analyses; the model runs once for a result that several share."""
    options: dict[str, Any] = {"batch_tokens": args.batch_tokens}
    seed = args.seed
    # errors are raised before the work begins
    heads.check("head", args.mode)
    check_example_maps(model, examples.lengths, args.max_bytes)
    scored, no_loss = _scored(args, model, examples)
    against = None if args.against is None else analysed(args.against, args.device)
    if against is not None:
        change.check(model, against, examples)
    of_words = None if args.conllu is None else words_of(args, model)
    if of_words is not None:
        structure.check()
        check_maps(model, of_words[1], args.max_bytes)
    shown: list[report.Section] = []
    numbers: dict[str, dict[Any, Any]] = {}
    arrays: dict[str, np.ndarray] = {}

    def add(section: report.Section, found: tuple[dict[Any, Any], ...] = ({}, {})) -> None:
        shown.append(section)
        numbers[section.name] = found[0] | section.numbers()
        arrays.update({f"{section.name}/{name}": array for name, array in found[1].items()})

    add(sections.model(), _of_model(args, model, examples))
    plain = attention_statistics(model, examples, **options)
    add(sections.attention(plain, seed=seed), of_attention(args, plain))
    add(sections.patterns(plain), of_patterns(args, plain))
    maps = example_maps(model, examples, plain, max_bytes=args.max_bytes)
    tokens = _tokens(args, examples, maps)
    measured: dict[str, Any] = options | {"pooling": None if scored is None else pooling_of(args, model)}
    without = None if scored is None else heads.ablate(model, scored, mode=args.mode, **measured)
    of_maps = _of_maps(maps, tokens, without, n=len(examples), seed=seed)
    add(sections.maps(maps, tokens, no_loss=no_loss), of_maps)
    if scored is None or without is None:
        for name in ("heads", "importance", "fixed"):
            add(sections.missing(name, no_loss))
    else:
        loss = _loss_of(args, model)
        add(sections_of_loss.ablation(without, loss, seed=seed), of_heads(args, without))
        found = heads.importance(model, scored, **measured)
        curves = pruned(found, model, scored, seed=seed, **measured)
        add(sections_of_loss.importance(found, curves, seed=seed), of_importance(args, found, curves))
        assignment = fixed.fitting(plain, causal=bool(model.config.is_decoder))
        found = fixed.fixed_heads(model, scored, assignment, **measured)
        add(sections_of_loss.fixed(found, seed=seed), of_fixed(args, found))
    if against is not None:
        found = change.change(model, against, examples, **options)
        add(sections.change(found, seed=seed), of_change(args, found))
    found = effective.effective_attention(model, examples, **options)
    of_all, more, _ = of_effective(args, found, plain)
    of_all["head width"] = model.base_model.layer_list()[0].form.head_dim
    add(sections.effective(found), (of_all, more))
    if len(geometry.words_in(examples, geometry.LEAST)):
        found = geometry.geometry(model, examples, seed=seed, **options)
        add(sections.geometry(found, seed=seed), of_geometry(args, found))
    else:
        reason = f"no word is in {geometry.LEAST} places of these texts; more text is needed"
        add(sections.missing("geometry", reason))
    if of_words is not None:
        try:
            _add_trees(args, model, *of_words, add)
        except ValueError as error:
            # the error names sentences of the treebank
            raise ValueError(f"{args.conllu}: {error}") from error
    summary = [f"{name}: {each['summary'][0]}" for name, each in numbers.items() if "summary" in each]
    numbers = facts | {"sections": numbers, "summary": summary}
    of_model = numbers["sections"]["model"]
    title = f"What the {of_model['count']} heads of {of_model['directory']} do"
    return numbers, arrays, report.page(title, numbers, shown)


def _add_trees(
    args: argparse.Namespace,
    model: PreTrainedModel,
    sentences: list[Sentence],
    examples: Examples,
    left_out: int,
    add: Callable[..., None],
) -> None:
    """The sections of a treebank; `examples` are its sentences."""
    few = f"the treebank has fewer than {SENTENCES} sentences"
    of_two = sum(len(sentence) > 1 for sentence in sentences)
    if len(sentences) < SENTENCES or not of_two:
        what = "that the model can read" if len(sentences) < SENTENCES else "of two words or more"
        for name in ("syntax", "probe"):
            add(sections.missing(name, f"{few} {what}"))
        return
    labels, parsing = syntax.on_trees(args, model, sentences, examples)
    best = parsing.best(seed=args.seed)
    numbers, arrays, _ = syntax.of_syntax(labels, parsing, best)
    numbers["left out"] = left_out
    add(sections_of_trees.of_syntax(labels, parsing, best), (numbers, arrays))
    if of_two < SENTENCES:
        add(sections.missing("probe", f"{few} of two words or more"))
        return
    targets = of_treebank(sentences, examples, "upos")
    found = {
        "edge": (probe.edge(args, model, examples, targets), probe.of_edge),
        "structural": (probe.structural(args, model, sentences, examples), probe.of_structural),
    }
    made = {name: of(args, both) for name, (both, of) in found.items()}
    numbers = {name: each[0] for name, each in made.items()}
    numbers["summary"] = [each["summary"][0] for each in numbers.values()]
    arrays = {f"{name}/{key}": array for name, each in made.items() for key, array in each[1].items()}
    section = sections_of_trees.of_probes(*(both for both, _ in found.values()))
    add(section, (numbers, arrays))


def name_of(directory: str) -> str:
    """A model's name for a report: its name on the hub, or the last two parts of its path."""
    parts = Path(directory).resolve().parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    return "/".join(parts[1:][-2:]) if cached is None else cached.removeprefix("models--").replace("--", "/")


def _scored(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples
) -> tuple[Examples | None, str]:
    """(the examples with what a loss needs, ""), or (None, why there is no loss)."""
    name = type(model).__name__
    if not isinstance(model, TaskModel):
        if args.pairs:
            Measure.of(model, examples, pooling_of(args, model))
            return examples, ""
        return None, f"the model has no head ({name}), and there are no pairs of texts (--pairs)."
    if isinstance(model, BertForMaskedLM):
        examples = masked(
            examples, mask_id(load_tokenizer(transformer_of(args.model)), args.model), seed=args.seed
        )
    try:
        Measure.of(model, examples)
    except TypeError:
        return None, f"this program cannot measure the loss of {name} per example."
    except ValueError:
        if args.labels is None:
            return None, f"the loss of {name} needs labels (--labels)."
        raise
    return examples, ""


def _loss_of(args: argparse.Namespace, model: PreTrainedModel) -> str:
    """The definition of the loss of a report's ablation."""
    if not isinstance(model, TaskModel):
        return "it is the square of the cosine of a pair's vectors minus the cosine in the file"
    if isinstance(model, BertForMaskedLM):
        return "15% of each text's tokens are masked, and it is the cross-entropy of guessing them, in nats"
    return "it is that of the model's own head, with the labels of the file"


def _of_model(
    args: argparse.Namespace, model: PreTrainedModel, examples: Examples
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    lengths = examples.lengths
    numbers = {
        "directory": name_of(args.model),
        "family": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": len(model.base_model.layer_list()),
        "heads": model.config.num_attention_heads,
        "count": len(model.base_model.layer_list()) * model.config.num_attention_heads,
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
    tokenizer = load_tokenizer(transformer_of(args.model))
    of_each = (examples.ids[examples.rows(np.array([map_.example]))] for map_ in maps)
    return [[tokenizer.id_to_token(int(i)) or "?" for i in ids] for ids in of_each]


def _of_maps(
    maps: list[ExampleMap], tokens: list[list[str]], without: heads.Ablation | None, *, n: int, seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The numbers of `sections.maps`, and the maps; n is the number of examples."""
    numbers = {}
    for map_, names in zip(maps, tokens, strict=True):
        place = map_.layer, map_.head
        numbers[map_.name] = {
            "name": sections.head_name(*place),
            "layer": map_.layer,
            "head": map_.head,
            "example": map_.example,
            # shown numbers count from 1
            "number": map_.example + 1,
            "share": map_.share,
            "tokens": names,
        }
        if without is not None:
            # two texts are one case if pairs are compared
            case = map_.example * len(without.base_loss) // n
            here = without.loss[(case, *place)] - without.base_loss[case]
            numbers[map_.name] |= {
                "loss": without.loss_interval(*place, seed=seed)._asdict(),
                "loss here": float(here),
            }
    return {"maps": numbers}, {map_.name: map_.probabilities for map_ in maps}
