"""The arguments of the commands that make a model smaller: `fastbert prune`, `distill`, `quantize`."""

from __future__ import annotations

import argparse
from typing import Any

# fastbert.compression.scores has them; its import loads models
SCORES = ("taylor", "magnitude", "random")
# fastbert.compression.distillation.recipes has them
RECIPES = (
    "kd",
    "bilstm",
    "pkd",
    "tinybert-task",
    "theseus",
    "distilbert",
    "tinybert",
    "minilm",
    "minilmv2",
    "sentences",
)


def add_prune(commands: Any) -> None:
    """The prune command."""
    command = commands.add_parser(
        "prune",
        help="remove heads, neurons, layers or tokens of a model",
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
    add(
        "--tokens",
        type=float,
        metavar="X",
        help="drop tokens between layers, so that the layers of --input take at most this share of their "
        "operations: searches the schedule with the best score (default: all tokens stay)",
    )
    add("--rounds", type=int, metavar="N", help="of --tokens, 60 schedules each (default 30)")
    add("--score", choices=SCORES, default="taylor", help="what chooses heads and neurons (default taylor)")
    add(
        "--input",
        metavar="FILE",
        help="examples, for --score taylor, for --tokens and to measure the score: .txt or .tsv, one per "
        'line; or .jsonl with "text" (default none)',
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
    text = "seed of masks, of --score random and of --tokens (default 0)"
    add("--seed", type=int, default=0, metavar="N", help=text)
    add(
        "--dense",
        action="store_true",
        help="save with zeros in place of heads and neurons: no smaller, but transformers loads it",
    )
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")


def add_distill(commands: Any) -> None:
    """The distill command."""
    command = commands.add_parser(
        "distill",
        help="train a small model to compute what a large one computes",
        description="Train a student on the outputs of a teacher. kd, bilstm, pkd, tinybert-task and theseus "
        "read labelled examples, and the teacher is fine-tuned for their task. distilbert, tinybert, "
        "minilm and minilmv2 read text. sentences reads texts without labels, and the teacher is a sentence "
        "encoder. Prints parameters, size, operations per token, measured tokens per "
        "second and scores of teacher and student, and the papers' rows. Rerun to resume; results are "
        "bit-identical.",
        epilog="Example:\n  fastbert distill --teacher trained --layers 0,2,4 --recipe kd --data texts.jsonl "
        "--output small",
    )
    add = command.add_argument
    add("--teacher", required=True, metavar="DIR", help="a HuggingFace directory, or a name on the hub")
    student = command.add_mutually_exclusive_group(required=True)
    student.add_argument(
        "--student", metavar="DIR", help="a directory; a config.json, for a new model; or bilstm; no default"
    )
    student.add_argument(
        "--layers",
        metavar="N,…",
        help="the student begins with these layers of the teacher, from 0; no default",
    )
    add(
        "--student-family",
        choices=("bert", "distilbert"),
        help="of a student of --layers; distilbert has no token types (default: the teacher's)",
    )
    add("--recipe", choices=RECIPES, help="what the student learns by (default kd; of bilstm, bilstm)")
    add(
        "--data",
        required=True,
        metavar="FILE",
        help='labelled examples: .jsonl with "text", maybe "pair" and maybe "label"; .txt without labels; or '
        "a directory of --task. Text: .txt, .jsonl or .parquet, or a corpus of fastbert prepare. Sentences: "
        ".txt; or .tsv or .jsonl with pairs, of which the teacher reads the first",
    )
    add(
        "--task",
        metavar="TASK",
        help="of a directory of labelled examples: csv, a task of GLUE, ner, squad or squad2 (default csv)",
    )
    add("--output", required=True, metavar="DIR", help="the student, results.json and the run")
    add("--cache", metavar="DIR", help="compute the teacher's outputs once and keep them here; default: none")
    add(
        "--layer-map",
        metavar="N,…",
        help="the teacher's layer, from 1, for each layer of the student that is compared (default: in equal "
        "steps)",
    )
    add(
        "--weights",
        metavar="LOSS=X,…",
        help="weights of losses, such as kd=0.9,task=0.1; default: the recipe's",
    )
    for name, kind, text in (
        ("lr", _numbers, "the largest learning rate, one or one per phase; default: the recipe's"),
        ("epochs", _numbers, "passes over the data, one number or one per phase; default: the recipe's"),
        ("temperature", float, "of the softmax of logits; default: the recipe's"),
        ("batch-size", int, "examples per step; default: the recipe's"),
        ("max-length", int, "most tokens of a sequence; default: the recipe's"),
        ("relation-heads", int, "heads of MiniLMv2's relations (default 48)"),
        ("cache-words", int, "words per token whose scores a cache has, for distilbert (default 32)"),
        ("seed", int, "of all that is random (default 0)"),
        ("save-every", int, "steps between checkpoints (default 1000)"),
        ("workers", int, "processes that make batches (default 0)"),
    ):
        add(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=text)
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="bf16, fp16: autocast (default fp32)")
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")


def _numbers(text: str) -> float | list[float]:
    """One number, or several with commas between."""
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, got {text!r}") from None
    return numbers[0] if len(numbers) == 1 else numbers


def add_quantize(commands: Any) -> None:
    """The quantize command."""
    command = commands.add_parser(
        "quantize",
        help="store a model in 8 or 4 bits",
        description="Write a model of integers, or of 8-bit floats for a GPU, for inference. Prints "
        "parameters, size, operations per token and measured tokens per second before and after, and the "
        "cosines of the vectors of --input. A directory of a sentence encoder stays one. Only fastbert reads "
        "the files.",
        epilog="Example:\n  fastbert quantize --model DIR --embeddings int8 --input texts.txt --output small",
    )
    add = command.add_argument
    add("--model", required=True, metavar="DIR", help="a HuggingFace or sentence-transformers directory")
    add("--output", required=True, metavar="DIR", help="a new directory")
    add(
        "--weights",
        choices=("int8", "int4", "fp8", "float"),
        default="int8",
        help="the layers' linear maps; int4: files of 4 bits that run as int8; fp8: 8-bit floats, the rest "
        "bfloat16, which a GPU of compute capability 9.0 reads (default int8)",
    )
    add(
        "--embeddings",
        choices=("int8", "int4", "float"),
        default="float",
        help="the table of words, and a decoder that is tied to it (default float)",
    )
    add(
        "--smooth",
        type=float,
        metavar="X",
        help="from 0 to 1, such as 0.5: how much of the range of inputs moves into the weights (SmoothQuant) "
        "(default none)",
    )
    add("--calibrate", metavar="FILE", help="typical texts for --smooth, one per line (default none)")
    add("--input", metavar="FILE", help="texts, one per line, that compare the vectors (default none)")
    add(
        "--report",
        action="store_true",
        help="also print, per weight, the signal-to-noise ratio of weights and outputs and the outliers of "
        "inputs; outputs and inputs need --input",
    )
