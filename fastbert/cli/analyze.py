"""`fastbert analyze`: what the heads and layers of a model do on a text, as numbers, arrays and pictures."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from fastbert.analysis import pictures, results
from fastbert.analysis.identities import MAX_BYTES
from fastbert.analysis.starts import DEFAULT as SETTINGS
from fastbert.cli.analyses.attention import attention, effective, patterns
from fastbert.cli.analyses.heads import fixed, heads, importance
from fastbert.cli.analyses.layers import change, geometry
from fastbert.cli.analyses.links import links
from fastbert.cli.analyses.loading import (
    analysed,
    file_of,
    load_examples,
    load_words,
    naming_lines,
    naming_targets,
    pruned_heads,
)
from fastbert.cli.analyses.probe import probe
from fastbert.cli.analyses.report import whole
from fastbert.cli.analyses.starts import starts
from fastbert.cli.analyses.syntax import syntax
from fastbert.cli.usage import UsageError, say
from fastbert.training.loop import Interrupted

_OF_EXAMPLES = {
    "attention": attention,
    "patterns": patterns,
    "heads": heads,
    "importance": importance,
    "fixed": fixed,
    "change": change,
    "effective": effective,
    "geometry": geometry,
    "starts": starts,
}
# analyses of files that are split into words; they also take the words
_OF_WORDS = {"syntax": syntax, "probe": probe, "links": links}
# option -> the analyses that take it; all analyses take all other options
_OWN = {
    "against": ("change", "report"),
    "assignment": ("fixed",),
    "annotations": ("patterns",),
    "probe": ("probe",),
    "label": ("probe",),
    "unit": ("heads",),
    "mode": ("heads", "report"),
    "max_bytes": ("report", "syntax"),
    "epochs": ("starts",),
    "batch_size": ("starts",),
    "lr": ("starts",),
}
# option -> its default
_DEFAULTS = {
    **{"unit": "head", "mode": "zero", "max_bytes": MAX_BYTES},
    **{name: getattr(SETTINGS, name) for name in ("epochs", "batch_size", "lr")},
}


def run(args: argparse.Namespace) -> int:
    """Compute, save and print; returns the exit status."""
    output = results.check_free(args.output)
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: expected an integer >= 0")
    pictures.check()
    file = file_of(args)
    for option, kinds in _OWN.items():
        if getattr(args, option) is not None and args.kind not in kinds:
            raise UsageError(f"--{option.replace('_', '-')}: {args.kind} takes none")
    for option, default in _DEFAULTS.items():
        if getattr(args, option) is None:
            setattr(args, option, default)
    model = analysed(args.model, args.device)
    options: dict[str, Any] = {"kind": args.kind, "seed": args.seed, file: str(getattr(args, file))}
    if gone := pruned_heads(args.model):
        options["pruned_heads"] = gone
    if args.conllu is not None:
        options["conllu"] = str(args.conllu)
    figures, page = {}, None
    with naming_lines(args, model):
        if args.kind in _OF_WORDS:
            texts, examples, options["left_out"] = load_words(args, model)
            with naming_targets(texts):
                numbers, arrays, figures = _OF_WORDS[args.kind](args, model, texts, examples)
            numbers = results.facts(model, examples, **options) | numbers
        else:
            examples = load_examples(args, model)
            facts = results.facts(model, examples, **options)
            if args.kind == "report":
                numbers, arrays, page = whole(args, model, examples, facts)
            else:
                try:
                    numbers, arrays, figures = _OF_EXAMPLES[args.kind](args, model, examples)
                except Interrupted as stopped:  # raised by training, which handles signals itself
                    say(f"stopped by {signal.Signals(stopped.number).name}")
                    return 128 + stopped.number
                numbers = facts | numbers
    results.save(output, args.kind, numbers, arrays, figures, page)
    print(f"{output}: {args.kind} of {len(examples):,} examples, {examples.starts[-1]:,} tokens")
    if options.get("left_out"):
        print(f"  sentences left out, too long or with a word of no token: {options['left_out']:,}")
    if gone:
        print(f"  pruned heads: {gone:,}; here they have zeros: they see all tokens alike and change nothing")
    for line in numbers["summary"]:
        print(f"  {line}")
    if args.kind not in _OF_WORDS:
        cases = numbers.get("cases", len(examples))
        if cases > 1:
            print(f"  in brackets: 95% bootstrap intervals over {cases:,} examples, seed {args.seed}")
        else:
            print("  one example: intervals over examples need two")
    return 0
