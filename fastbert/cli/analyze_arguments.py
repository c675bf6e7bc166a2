"""The arguments of `fastbert analyze`."""

from __future__ import annotations

from typing import Any

from fastbert.cli.usage import DEVICE, adder


def add_analyze(commands: Any) -> None:
    """The analyze command."""
    command = commands.add_parser(
        "analyze",
        help="see what the heads and layers of a model do on a text",
        description="attention: entropy, and what is looked at. patterns: the five classes of Kovaleva et "
        "al. heads: loss and score without each head or layer. importance: how much the loss depends on each "
        "head, and how many can be removed. fixed: loss and score with heads that attend by fixed patterns. "
        "change: how a second model differs. effective: the part of attention that reaches the output. "
        "geometry: how contextual words are. report: all of these on one page, report.html. syntax: on a "
        "treebank, attention by part of speech and relation, and which heads find the heads of words. probe: "
        "how well each layer shows labels or trees. links: how much each head attends between words that a "
        "file links. starts: what a task gains from pre-training. The output directory has numbers (.json), "
        "arrays (.npz) and pictures (.svg, .png). It appears whole at the end, or not at all.",
        epilog="Example:\n  fastbert analyze attention --model DIR --input texts.txt --output attention",
    )
    add = adder(command)
    kinds = ("attention", "patterns", "heads", "importance", "fixed", "change", "effective", "geometry")
    add("kind", "what to compute", choices=(*kinds, "report", "syntax", "probe", "links", "starts"))
    add("--model DIR", "a HuggingFace directory", required=True)
    add(
        "--input FILE",
        'examples: .txt or .tsv, one per line; or .jsonl, objects with a "text", or with SQuAD\'s '
        '"question" and "context"; default: none, which only syntax, probe and links accept',
    )
    add("--conllu FILE", "syntax, probe, report: a treebank in the CoNLL-U format; default: none")
    add(
        "--edges FILE",
        'probe, links: labelled spans, .jsonl with "text" and "targets" as jiant has them; default: none',
    )
    add(
        "--probe",
        "probe: labels, by F1, description length or beside a control task; or trees (default edge)",
        choices=("edge", "mdl", "control", "structural"),
    )
    add(
        "--label",
        "probe: what is predicted for each word of a treebank (default upos)",
        choices=("upos", "relation"),
    )
    add("--output DIR", "a new directory", required=True)
    add("--against DIR", "change, report: a second model, such as the fine-tuned one; default: none")
    add(
        "--pairs",
        'pairs of texts, with a tab between or as "pair"; an encoder without a head reads each alone',
    )
    add(
        "--labels KEY",
        "heads, importance, fixed, report, starts: key of the labels in a .jsonl file. A label is a "
        "class; for an encoder without a head the cosine of a pair (default none); for question answering "
        "SQuAD's answers (default answers)",
    )
    add("--unit", "heads: what is removed (default head)", choices=("head", "all-but-one", "layer"))
    add(
        "--mode",
        "heads, report: a removed head's output is 0, or that of looking at all tokens alike, or a "
        "layer is skipped (default zero)",
        choices=("zero", "uniform", "skip"),
    )
    add(
        "--annotations FILE",
        'patterns: your labels, JSON lines {"example": 0, "layer": 0, "head": 3, "pattern": "block"}, '
        "to which a classifier is fitted; default: thresholds",
    )
    add(
        "--assignment FILE",
        'fixed: JSON lines {"layer": 0, "head": 3, "pattern": "previous"}; default: the pattern '
        "nearest to each head",
    )
    add("--epochs N", "starts: number of times each example is seen (default 3)")
    add("--batch-size N", "starts: examples per step (default 32)")
    add("--lr X", "starts: the largest learning rate (default 2e-5)")
    add("--max-examples N", "most examples", 1000)
    add(
        "--on-long",
        "what to do with a text that is longer than the model reads (default error; in a treebank such "
        "sentences are left out)",
        choices=("truncate", "error"),
    )
    add("--batch-tokens N", "most tokens at a time", 4096)
    add("--max-bytes N", "report, syntax: most memory of the attention maps of a layer (default 256 MiB)")
    add("--seed N", "seed of masks, random orders, resamples", 0)
    add(*DEVICE)
