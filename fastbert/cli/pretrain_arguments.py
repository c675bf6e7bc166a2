"""The arguments of `fastbert train-tokenizer`, `prepare` and `pretrain`."""

from __future__ import annotations

import argparse
from typing import Any


def add_pretraining(commands: Any) -> None:
    """The commands from raw text to a pre-trained model."""
    train = commands.add_parser(
        "train-tokenizer",
        help="train a WordPiece vocabulary on text",
        description="Train a WordPiece tokenizer. The same text makes the same vocabulary, bit for bit.",
        epilog="Example:\n  fastbert train-tokenizer text.txt --output tokenizer",
    )
    prepare = commands.add_parser(
        "prepare",
        help="tokenize text into a corpus for pre-training",
        description="Tokenize text into memory-mapped files. The result does not depend on --workers.",
        epilog="Example:\n  fastbert prepare text.txt --tokenizer tokenizer --output corpus",
    )
    for command in (train, prepare):
        command.add_argument(
            "text",
            nargs="+",
            metavar="TEXT",
            help="files: .txt (a sentence per line, an empty line "
            'between documents), .jsonl (objects with a "text") or .parquet (a column "text")',
        )
        command.add_argument("--output", required=True, metavar="DIR", help="a new directory")
        command.add_argument(
            "--format",
            choices=("text", "jsonl", "parquet"),
            help="format of all files; default: by their suffixes",
        )
        command.add_argument("--overwrite", action="store_true", help="replace what is in --output")
        command.add_argument(
            "--progress",
            action=argparse.BooleanOptionalAction,
            help="show progress on stderr; default: if stderr is a terminal",
        )
    train.add_argument(
        "--vocab-size", type=int, default=30_528, metavar="N", help="most tokens (default 30528, 64 x 477)"
    )
    train.add_argument("--cased", action="store_true", help="keep case and accents")
    train.add_argument(
        "--min-frequency", type=int, default=2, metavar="N", help="fewest times a pair occurs (default 2)"
    )
    train.add_argument(
        "--alphabet", type=int, default=1000, metavar="N", help="most characters (default 1000)"
    )
    prepare.add_argument("--tokenizer", required=True, metavar="DIR", help="a directory with a tokenizer")
    prepare.add_argument(
        "--workers", type=int, metavar="N", help="threads of the tokenizer; default: one per CPU"
    )
    prepare.add_argument(
        "--shard-tokens",
        type=int,
        default=1 << 28,
        metavar="N",
        help="tokens per file, a multiple of 8 (default 268435456)",
    )
    prepare.add_argument(
        "--spans",
        action="append",
        metavar="FILE",
        help="mark phrases and entities, which some masking rules mask as a whole: a file of lines "
        '{"text": …, "kind": "entity" or "phrase"}, or "pmi" for phrases found in the text; may be repeated, '
        "the first has priority; default: none are marked",
    )
    prepare.add_argument(
        "--min-pmi",
        type=float,
        metavar="BITS",
        help="with --spans pmi: least pointwise mutual information of a phrase (default 6)",
    )
    prepare.add_argument(
        "--min-count",
        type=int,
        metavar="N",
        help="with --spans pmi: fewest occurrences of a phrase (default 10)",
    )


def add_pretrain(commands: Any) -> None:
    """The pretrain command."""
    command = commands.add_parser(
        "pretrain",
        help="pre-train a model on a corpus",
        description="Pre-train a model. Rerun the command to resume; results are bit-identical. "
        "Several processes: torchrun --nproc-per-node N -m fastbert pretrain …",
        epilog="Example:\n"
        "  fastbert pretrain --data corpus --model bert-config.json --recipe bert --output run",
    )
    add = command.add_argument
    add("--data", required=True, metavar="DIR", help="a corpus of fastbert prepare")
    add("--model", required=True, metavar="CONFIG", help="a config.json, or a HuggingFace directory")
    add("--recipe", required=True, metavar="NAME", help="such as bert, roberta or electra-small; or a .json")
    add(
        "--output",
        metavar="DIR",
        help="directory of the run: checkpoints, log.jsonl, speed.jsonl, curves.png; no default",
    )
    add("--print-config", action="store_true", help="print what the result depends on, and end")
    for name, kind, text in (
        ("steps", int, "number of all steps; phases and warm-ups keep their shares"),
        ("batch-size", int, "sequences per step"),
        ("micro-batch", int, "sequences that are computed at a time"),
        ("max-length", int, "most tokens of a sequence"),
        ("lr", float, "the largest learning rate"),
        ("warmup", float, "steps; below 1, a share of the steps"),
        ("dropout", float, "probability"),
        ("static", int, "masks repeat after this number of epochs"),
    ):
        add(f"--{name}", type=kind, metavar="N", help=f"{text}; default: the recipe's")
    add(
        "--word-budget",
        choices=("tokens", "words"),
        help="what masking whole words counts; default: the recipe's",
    )
    add("--random-specials", action="store_true", help="a random token may be a special one")
    add("--pack", action="store_true", help="pack sequences of whole sentences of one document")
    add(
        "--set",
        action="append",
        metavar="FIELD=VALUE",
        help="a field of the recipe: masking.share=0.3; default: none",
    )
    add("--seed", type=int, default=0, metavar="N", help="seed of all that is random (default 0)")
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="bf16, fp16: autocast (default fp32)",
    )
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--parallel", choices=("none", "ddp", "fsdp"), help="default: ddp for several processes")
    add(
        "--grow",
        metavar="LAYERS:STEP,…",
        help="add layers during the run: 3:50000,6:70000,12:*; default: none",
    )
    add("--grow-freeze", action="store_true", help="train only new layers, except in the last stage")
    add("--grow-moments", action="store_true", help="also copy the optimizer's moments")
    add("--workers", type=int, default=1, metavar="N", help="processes that make batches (default 1)")
    add("--save-every", type=int, default=1000, metavar="N", help="steps between checkpoints (default 1000)")
    add("--keep", type=int, default=2, metavar="N", help="checkpoints that remain (default 2)")
    add("--log-every", type=int, default=10, metavar="N", help="steps between lines of the log (default 10)")
    add("--graphs", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs, on one GPU")
    add("--verify", action=argparse.BooleanOptionalAction, default=True, help="check the corpus's SHA-256")
    add("--tensorboard", action=argparse.BooleanOptionalAction, help="default: if it is installed")
    add("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")
    add("--json", action="store_true", help="print one JSON object at the end")
