"""The arguments of `fastbert train-tokenizer`, `prepare` and `pretrain`."""

from __future__ import annotations

from typing import Any

from fastbert.cli.usage import DEVICE, PROGRESS, adder


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
        add = adder(command)
        add(
            "text TEXT",
            "files: .txt (a sentence per line, an empty line "
            'between documents), .jsonl (objects with a "text") or .parquet (a column "text")',
            nargs="+",
        )
        add("--output DIR", "a new directory", required=True)
        add(
            "--format",
            "format of all files; default: by their suffixes",
            choices=("text", "jsonl", "parquet"),
        )
        add("--overwrite", "replace what is in --output")
        add("--[no-]progress", "show progress on stderr; default: if stderr is a terminal")
    add = adder(train)
    add("--vocab-size N", "most tokens (default 30528, 64 x 477)", default=30_528)
    add("--cased", "keep case and accents")
    add("--min-frequency N", "fewest times a pair occurs", 2)
    add("--alphabet N", "most characters", 1000)
    add = adder(prepare)
    add("--tokenizer DIR", "a directory with a tokenizer", required=True)
    add("--workers N", "threads of the tokenizer; default: one per CPU")
    add("--shard-tokens N", "tokens per file, a multiple of 8 (default 268435456)", default=1 << 28)
    add(
        "--spans FILE",
        "mark phrases and entities, which some masking rules mask as a whole: a file of lines "
        '{"text": …, "kind": "entity" or "phrase"}, or "pmi" for phrases found in the text; may be repeated, '
        "the first has priority; default: none are marked",
        action="append",
    )
    add("--min-pmi BITS", "with --spans pmi: least pointwise mutual information of a phrase (default 6)")
    add("--min-count N", "with --spans pmi: fewest occurrences of a phrase (default 10)")


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
    add = adder(command)
    add("--data DIR", "a corpus of fastbert prepare", required=True)
    add("--model CONFIG", "a config.json, or a HuggingFace directory", required=True)
    add("--recipe NAME", "such as bert, roberta or electra-small; or a .json", required=True)
    add("--output DIR", "directory of the run: checkpoints, log.jsonl, speed.jsonl, curves.png; no default")
    add("--print-config", "print what the result depends on, and end")
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
        add(f"--{name} N", f"{text}; default: the recipe's", type=kind)
    add(
        "--word-budget", "what masking whole words counts; default: the recipe's", choices=("tokens", "words")
    )
    add("--random-specials", "a random token may be a special one")
    add("--pack", "pack sequences of whole sentences of one document")
    add("--set FIELD=VALUE", "a field of the recipe: masking.share=0.3; default: none", action="append")
    add("--seed N", "seed of all that is random", 0)
    add("--dtype", "bf16, fp16: autocast", "fp32", choices=("fp32", "bf16", "fp16"))
    add(*DEVICE)
    add("--parallel", "default: ddp for several processes", choices=("none", "ddp", "fsdp"))
    add("--grow LAYERS:STEP,…", "add layers during the run: 3:50000,6:70000,12:*; default: none")
    add("--grow-freeze", "train only new layers, except in the last stage")
    add("--grow-moments", "also copy the optimizer's moments")
    add("--workers N", "processes that make batches", 1)
    add("--save-every N", "steps between checkpoints", 1000)
    add("--keep N", "checkpoints that remain", 2)
    add("--log-every N", "steps between lines of the log", 10)
    add("--[no-]graphs", "CUDA graphs, on one GPU", default=True)
    add("--[no-]verify", "check the corpus's SHA-256", default=True)
    add("--[no-]tensorboard", "default: if it is installed")
    add(*PROGRESS)
    add("--json", "print one JSON object at the end")
