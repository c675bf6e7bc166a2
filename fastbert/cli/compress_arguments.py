"""The arguments of the commands that make a model smaller: `fastbert prune`, `distill`, `quantize`."""

from __future__ import annotations

from typing import Any

from fastbert.cli.usage import DEVICE, PROGRESS, adder, numbers
from fastbert.compression.distillation.recipes import RECIPES

# fastbert.compression.scores has them; its import loads models
SCORES = ("taylor", "magnitude", "random")


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
    add = adder(command)
    add("--model DIR", "a HuggingFace or sentence-transformers directory", required=True)
    add("--output DIR", "a new directory", required=True)
    units = "share of all {0} to remove, below 1; or a .json file: {{layer: [{0}]}} (default none)"
    add("--heads X", units.format("heads"), type=str)
    add("--neurons X", units.format("neurons"), type=str)
    add("--layers N,…", "layers to keep, from 0 (default all)", type=_integers)
    add(
        "--vocabulary FILE",
        "text, one per line: word pieces that it does not use go, but no special token or character "
        "(default: all stay)",
    )
    add(
        "--weights X",
        "share of the weights of all layers' linear maps to set to 0, the smallest of all, below 1: the "
        "file compresses better, the time stays (default: none)",
    )
    add(
        "--embedding-rank N",
        "rank of the table of words, which becomes a product of two matrices (default: as it is)",
    )
    add(
        "--tokens X",
        "drop tokens between layers, so that the layers of --input take at most this share of their "
        "operations: searches the schedule with the best score (default: all tokens stay)",
    )
    add("--rounds N", "of --tokens, 60 schedules each (default 30)")
    add("--score", "what chooses heads and neurons", "taylor", choices=SCORES)
    add(
        "--input FILE",
        "examples, for --score taylor, for --tokens and to measure the score: .txt or .tsv, one per "
        'line; or .jsonl with "text" (default none)',
    )
    add("--labels KEY", "key of the labels in a .jsonl file (default none)")
    add(
        "--pairs",
        'pairs of texts, with a tab between or as "pair"; an encoder without a head reads each alone',
    )
    add("--max-examples N", "most examples", 1000)
    add(
        "--on-long",
        "what to do with a text that is longer than the model reads",
        "error",
        choices=("truncate", "error"),
    )
    add("--batch-tokens N", "most tokens at a time", 4096)
    add("--multiple N", "of neurons that a layer keeps", 64)
    add("--seed N", "seed of masks, of --score random and of --tokens", 0)
    add("--dense", "save with zeros in place of heads and neurons: no smaller, but transformers loads it")
    add(*DEVICE)


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
    add = adder(command)
    add("--teacher DIR", "a HuggingFace directory, or a name on the hub", required=True)
    student = command.add_mutually_exclusive_group(required=True)
    add = adder(student)
    add("--student DIR", "a directory; a config.json, for a new model; or bilstm; no default")
    add(
        "--layers N,…",
        "the student begins with these layers of the teacher, from 0; no default",
        type=_integers,
    )
    add = adder(command)
    add(
        "--student-family",
        "of a student of --layers; distilbert has no token types (default: the teacher's)",
        choices=("bert", "distilbert"),
    )
    add("--recipe", "what the student learns by (default kd; of bilstm, bilstm)", choices=RECIPES)
    add(
        "--data FILE",
        'labelled examples: .jsonl with "text", maybe "pair" and maybe "label"; .txt without labels; or '
        "a directory of --task. Text: .txt, .jsonl or .parquet, or a corpus of fastbert prepare. Sentences: "
        ".txt; or .tsv or .jsonl with pairs, of which the teacher reads the first",
        required=True,
    )
    add(
        "--task TASK",
        "of a directory of labelled examples: csv, a task of GLUE, ner, squad or squad2 (default csv)",
    )
    add("--output DIR", "the student, results.json and the run", required=True)
    add("--cache DIR", "compute the teacher's outputs once and keep them here; default: none")
    add(
        "--layer-map N,…",
        "the teacher's layer, from 1, for each layer of the student that is compared (default: in equal "
        "steps)",
        type=_integers,
    )
    add("--weights LOSS=X,…", "weights of losses, such as kd=0.9,task=0.1; default: the recipe's")
    add("--lr X", "the largest learning rate, one or one per phase; default: the recipe's", type=_numbers)
    add(
        "--epochs X",
        "passes over the data, one number or one per phase; default: the recipe's",
        type=_numbers,
    )
    add("--temperature X", "of the softmax of logits; default: the recipe's")
    add("--batch-size N", "examples per step; default: the recipe's")
    add("--max-length N", "most tokens of a sequence; default: the recipe's")
    add("--relation-heads N", "heads of MiniLMv2's relations (default 48)")
    add("--cache-words N", "words per token whose scores a cache has, for distilbert (default 32)")
    add("--seed N", "of all that is random (default 0)")
    add("--save-every N", "steps between checkpoints (default 1000)")
    add("--workers N", "processes that make batches (default 0)")
    add("--dtype", "bf16, fp16: autocast (default fp32)", choices=("fp32", "bf16", "fp16"))
    add(*DEVICE)
    add(*PROGRESS)


def _integers(text: str) -> list[int]:
    return numbers(text, int)


def _numbers(text: str) -> float | list[float]:
    """One number, or several with commas between."""
    found = numbers(text)
    return found[0] if len(found) == 1 else found


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
    add = adder(command)
    add("--model DIR", "a HuggingFace or sentence-transformers directory", required=True)
    add("--output DIR", "a new directory", required=True)
    add(
        "--weights",
        "the layers' linear maps; int4: files of 4 bits that run as int8; fp8: 8-bit floats, the rest "
        "bfloat16, which a GPU of compute capability 9.0 reads",
        "int8",
        choices=("int8", "int4", "fp8", "float"),
    )
    add(
        "--embeddings",
        "the table of words, and a decoder that is tied to it",
        "float",
        choices=("int8", "int4", "float"),
    )
    add(
        "--activations",
        "inputs of the layers: in 8 bits with a range per token, or one per layer from --calibrate; or in "
        "floating point",
        "dynamic",
        choices=("dynamic", "static", "float"),
    )
    add(
        "--smooth X",
        "from 0 to 1, such as 0.5: how much of the range of inputs moves into the weights (SmoothQuant) "
        "(default none)",
    )
    add(
        "--calibrate FILE",
        "typical texts for --smooth and --activations static, one per line (default none)",
    )
    add("--input FILE", "texts, one per line, that compare the vectors (default none)")
    add(
        "--report",
        "also print, per weight, the signal-to-noise ratio of weights and outputs and the outliers of "
        "inputs; outputs and inputs need --input",
    )
