"""`fastbert pretrain`: a corpus, a model and a recipe to a checkpoint that transformers loads."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from fastbert.checkpoint.files import CheckpointError, parse_json
from fastbert.cli.usage import UsageError, device_of, say
from fastbert.pretraining import run as pretraining
from fastbert.pretraining.corpus import Corpus
from fastbert.pretraining.growth import parse_growth
from fastbert.pretraining.recipe import Recipe
from fastbert.training import curves
from fastbert.training.loop import DTYPES, Interrupted, Result
from fastbert.training.parallel import Parallel


def run(args: argparse.Namespace) -> int:
    """Train, or print the config; returns the exit status."""
    if not args.output and not args.print_config:
        raise UsageError("--output: expected a directory for the run")
    recipe, growth = recipe_of(args), growth_of(args)
    is_first = os.environ.get("RANK", "0") == "0"
    corpus = Corpus.open(args.data, verify=args.verify and is_first and not args.print_config)
    config, weights = pretraining.model_of(args.model, corpus, recipe)
    if args.print_config:
        described = pretraining.describe(corpus, config, weights, recipe, args.seed, args.dtype, growth)
        pretraining.stages(corpus, config, weights, recipe, args.seed, growth)  # raises if it cannot run
        print(json.dumps(described, indent=1, sort_keys=True))
        return 0
    parallel = Parallel(args.parallel, device_of(args.device), DTYPES[args.dtype])
    try:
        result = pretraining.pretrain(
            corpus,
            args.model,
            recipe,
            args.output,
            seed=args.seed,
            dtype=args.dtype,
            growth=growth,
            parallel=parallel,
            save_every=args.save_every,
            keep=args.keep,
            log_every=args.log_every,
            workers=args.workers,
            graphs=args.graphs,
            tensorboard=args.tensorboard,
            progress=args.progress,
            say=say,
        )
    except Interrupted as stopped:
        if parallel.is_first:
            say(str(stopped))
        return 128 + stopped.number
    finally:
        parallel.close()
    if parallel.is_first:
        report(Path(args.output), recipe, result, args.json)
    return 0


def recipe_of(args: argparse.Namespace) -> Recipe:
    """The recipe, with the fields that options override."""
    recipe = Recipe.load(args.recipe)
    changes: list[tuple[str, Any]] = []
    for name, path in (
        ("batch_size", "phases.batch_size"),
        ("lr", "phases.lr"),
        ("warmup", "phases.warmup"),
        ("micro_batch", "micro_batch"),
        ("dropout", "dropout"),
        ("static", "static"),
        ("word_budget", "masking.word_budget"),
    ):
        value = getattr(args, name)
        if value is not None:
            changes.append((path, value))
    if args.random_specials:
        changes.append(("masking.random_specials", True))
    if args.pack:
        if recipe.format["kind"] == "segment-pairs":
            raise UsageError(f"--pack: {args.recipe} has pairs of sentences, which are not packed further")
        changes.append(("format", {"kind": "doc-sentences"}))
    if args.max_length is not None:
        longest = max(phase.max_length for phase in recipe.phases)
        if args.max_length > longest:
            raise UsageError(
                f"--max-length {args.max_length}: {args.recipe} has sequences of {longest} tokens at most; "
                f"--set phases.max_length={args.max_length} makes all of them longer"
            )
        for number, phase in enumerate(recipe.phases):
            changes.append((f"phases.{number}.max_length", min(phase.max_length, args.max_length)))
    for text in args.set or ():
        path, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected FIELD=VALUE")
        try:
            changes.append((path, parse_json(value, f"--set {path}", object)))
        except CheckpointError as error:
            if not isinstance(error.__cause__, ValueError):  # valid JSON, but nested too deep
                raise
            changes.append((path, value))
    if args.steps is not None:
        recipe = recipe.with_steps(args.steps)
    return recipe.with_changes(changes)


def growth_of(args: argparse.Namespace) -> pretraining.Growth | None:
    """When layers are added."""
    if args.grow is None:
        for name in ("grow_freeze", "grow_moments"):
            if getattr(args, name):
                raise UsageError(f"--{name.replace('_', '-')}: needs --grow")
        return None
    moments = "copied" if args.grow_moments else "fresh"
    return pretraining.Growth(tuple(parse_growth(args.grow)), moments, args.grow_freeze)


def report(output: Path, recipe: Recipe, result: Result, as_json: bool) -> None:
    """Print how the run has ended."""
    picture, last = None, result.last
    try:
        picture = curves.draw(output)
    except ValueError as error:  # the log is damaged, but the run is complete
        say(f"no curves: {error}")
    if as_json:
        print(json.dumps({**last, "step": result.step, "checkpoint": str(result.checkpoint)}))
        return
    print(f"{result.checkpoint / 'model'}: after {result.step:,} steps")
    for name, value in last.items():
        if name.endswith(("loss", "_accuracy")) and value is not None:
            print(f"  {name:24} {value:.4f}")
    if picture is not None:
        print(f"{picture}: the curves")
    lines = pretraining.published(recipe)
    if lines:
        print(
            "For comparison, what papers report of this recipe: models pre-trained on 3.3 billion words or "
            "more, then fine-tuned. Nothing here measures yours:"
        )
        print("\n".join(lines), file=sys.stdout)
