"""The arguments of the commands that make a model smaller: `fastbert prune`."""

from __future__ import annotations

from typing import Any

# fastbert.compression.scores has them; its import loads models
SCORES = ("taylor", "magnitude", "random")


def add_prune(commands: Any) -> None:
    """The prune command."""
    command = commands.add_parser(
        "prune",
        help="remove heads, neurons or layers of a model",
        description="Write a physically smaller model, which is faster. The least important heads and "
        "neurons of all layers go; each layer keeps a multiple of --multiple neurons. Prints parameters, "
        "size, operations per token and measured tokens per second before and after. Fine-tune the new model "
        "to recover what it lost.",
        epilog="Example:\n  fastbert prune --model DIR --heads 0.3 --neurons 0.5 --input labelled.jsonl "
        "--labels label --output smaller",
    )
    add = command.add_argument
    add("--model", required=True, metavar="DIR", help="a HuggingFace or sentence-transformers directory")
    add("--output", required=True, metavar="DIR", help="a new directory")
    units = "share of all {0} to remove, below 1; or a .json file: {{layer: [{0}]}} (default none)"
    add("--heads", metavar="X", help=units.format("heads"))
    add("--neurons", metavar="X", help=units.format("neurons"))
    add("--layers", metavar="N,…", help="layers to keep, from 0 (default all)")
    add(
        "--vocabulary",
        metavar="FILE",
        help="text, one per line: word pieces that it does not use go, but no special token or character "
        "(default: all stay)",
    )
    add(
        "--weights",
        type=float,
        metavar="X",
        help="share of the weights of all layers' linear maps to set to 0, the smallest of all, below 1: the "
        "file compresses better, the time stays (default: none)",
    )
    add(
        "--embedding-rank",
        type=int,
        metavar="N",
        help="rank of the table of words, which becomes a product of two matrices (default: as it is)",
    )
    add("--score", choices=SCORES, default="taylor", help="what chooses heads and neurons (default taylor)")
    add(
        "--input",
        metavar="FILE",
        help="examples, for --score taylor and to measure the score: .txt or .tsv, one per line; or .jsonl "
        'with "text" (default none)',
    )
    add("--labels", metavar="KEY", help="key of the labels in a .jsonl file (default none)")
    add(
        "--pairs",
        action="store_true",
        help='pairs of texts, with a tab between or as "pair"; an encoder without a head reads each alone',
    )
    add("--max-examples", type=int, default=1000, metavar="N", help="most examples (default 1000)")
    add(
        "--on-long",
        choices=("truncate", "error"),
        default="error",
        help="what to do with a text that is longer than the model reads (default error)",
    )
    add("--batch-tokens", type=int, default=4096, metavar="N", help="most tokens at a time (default 4096)")
    add("--multiple", type=int, default=64, metavar="N", help="of neurons that a layer keeps (default 64)")
    add("--seed", type=int, default=0, metavar="N", help="seed of masks and of --score random (default 0)")
    add(
        "--dense",
        action="store_true",
        help="save with zeros in place of heads and neurons: no smaller, but transformers loads it",
    )
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
