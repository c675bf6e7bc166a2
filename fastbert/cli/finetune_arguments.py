"""The arguments of `fastbert finetune` and `fastbert predict`."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

from fastbert.cli.usage import DEVICE, PROGRESS, UsageError, adder, numbers

GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli")
TASKS = (*GLUE, "squad", "squad2", "swag", "race", "ner", "ner-features", "csv")
SETTINGS = (
    *("lr", "epochs", "batch_size", "max_length", "restarts", "seed", "dtype"),
    *("optimizer", "weight_decay", "layer_decay", "reinit", "freeze", "random_init"),
    *("stable", "decay_to_start", "layerdrop", "mixout", "mixout_mask", "freelb", "smart", "qat"),
    *("head_mix", "head_layers", "head_bilstm", "beside"),
)
# Fields of `fastbert.compression.movement.Movement`, after "movement_"
MOVEMENT = ("units", "keep", "threshold", "penalty", "lr")
# Command -> task -> the options of the task
_OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "finetune": {
        "csv": ("text", "pair", "label", "regression"),
        "squad": ("doc_stride",),
        "squad2": ("doc_stride", "null_threshold"),
        "ner": ("context", "strict"),
        "ner-features": ("context", "strict", "layers"),
    },
    "predict": {
        **dict.fromkeys((*GLUE, "csv"), ("text", "pair")),
        "squad": ("doc_stride",),
        "squad2": ("doc_stride", "null_threshold"),
        **dict.fromkeys(("ner", "ner-features"), ("context", "columns")),
    },
}


def option(name: str) -> str:
    """The option of an argument's name."""
    return "--" + name.replace("_", "-")


def task_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the task that are given.

    Raises:
        UsageError: the task does not take one of them.
    """
    of_tasks = _OPTIONS[args.command]
    given = {
        name: getattr(args, name)
        for name in dict.fromkeys(name for names in of_tasks.values() for name in names)
        if getattr(args, name) is not None
    }
    taken = of_tasks.get(args.task, ())
    wrong = next((name for name in given if name not in taken), None)
    if wrong is not None:
        own = ", ".join(map(option, taken)) or "it has none"
        raise UsageError(f"{option(wrong)}: {args.task} does not take it; its options: {own}")
    return given


def _numbers(kind: str) -> Callable[[str], Any]:
    """Reads the fields of FreeLB or Smart, numbers with commas between, as many as are given."""

    def read(text: str) -> Any:
        settings = importlib.import_module("fastbert.finetuning.settings")  # only if the option is used
        try:
            return getattr(settings, kind)(*map(json.loads, text.split(",")))
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _threshold(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected auto or a number, got {text!r}") from None


def add_finetune(commands: Any) -> None:
    """The finetune command."""
    command = commands.add_parser(
        "finetune",
        help="train a model on GLUE, SQuAD, entities or your table",
        description="Train a model on a task's own files and keep the best model of all runs, by its score "
        "on the dev file. Each learning rate is a run, and each restart another. The output is a HuggingFace "
        "directory with the official prediction files. Rerun the command to resume; results are "
        "bit-identical. Several processes: torchrun --nproc-per-node N -m fastbert finetune …",
        epilog="Example, for train.csv and dev.csv with the columns text and label:\n"
        "  fastbert finetune csv --model bert-base-uncased --data reviews --output trained",
    )
    add = adder(command)
    add(
        "task TASK",
        "csv, ner, ner-features, squad, squad2, swag, race, one of GLUE's (cola, sst2, mrpc, stsb, "
        "qqp, mnli, qnli, rte, wnli), or glue for eight of them, one after the other",
        choices=(*TASKS, "glue"),
    )
    add(
        "--model DIR",
        "a HuggingFace directory, or a name on the hub; default: none, as --predict-only accepts",
    )
    add("--data DIR", "the folder of the task's official files", required=True)
    add("--output DIR", "the folder of the trained model; glue: one per task", required=True)
    add("--lr X,…", "learning rates, one run each; default: the task's", type=numbers)
    add("--epochs X", "passes over the training examples; default: the task's")
    add("--batch-size N", "examples per step; default: the task's")
    add("--max-length N", "most tokens of a sequence; default: the task's")
    add("--restarts N", "runs per learning rate, each with its own seed (default 1)")
    add("--seed N", "seed of the first restart: new head, dropout, order (default 0)")
    add("--layer-decay X", "factor of the learning rate per layer below the head (default 1)")
    add("--reinit N", "top layers that begin anew, with the pooler (default 0)")
    add("--dtype", "bf16, fp16: autocast (default fp32)", choices=("fp32", "bf16", "fp16"))
    add("--freeze", "train the head and the pooler alone", default=None)
    text = "round in training as int8 or int4 will; the files keep floats (default: no rounding)"
    add("--qat", text, choices=("int8", "int4"))
    add("--random-init", "begin with random weights", default=None)
    add("--intermediate DIR", "data to train on before; default: none")
    add(
        "--intermediate-task TASK",
        "the task of --intermediate (default: TASK), such as mnli for rte",
        choices=TASKS,
    )
    add("--head-mix", "the head reads a learned mix of all layers", default=None)
    add("--head-layers N", "new layers on top of the model (default 0)")
    add("--head-bilstm", "a BiLSTM between the model and the head", default=None)
    add("--beside DIR", "a second model that the head reads and that learns too; default: none")
    add("--workers N", "processes that make batches", 0)
    add(*DEVICE)
    add(*PROGRESS)
    add(
        "--predict-only", "train nothing: write the prediction files of --output's model again and score them"
    )
    add("--json", "print one JSON object instead of the table")
    add = adder(command.add_argument_group("steadier and better"))
    add("--stable", "20 epochs, batch 16, lr 2e-5, eps 1e-6", default=None)
    add(
        "--optimizer",
        "-google: without correction of bias (default adamw)",
        choices=("adamw", "adamw-google"),
    )
    add("--weight-decay X", "of AdamW (default 0.01)")
    add("--decay-to-start", "weights decay to the checkpoint's, not to 0", default=None)
    add("--layerdrop P", "the probability that a layer is skipped in a micro-batch (default 0)")
    add(
        "--mixout P", "in place of dropout: the probability of a checkpoint's weight, such as 0.7 (default 0)"
    )
    add("--mixout-mask", "draws per input or per weight (default column)", choices=("column", "element"))
    text = "adversarial training in K passes per step (default 3,0.1,1,null)"
    add("--freelb K,LR,INIT,BALL", text, nargs="?", const=True, type=_numbers("FreeLB"))
    text = "smoothness beside the loss, in three forwards per step (default 1,1e-3,1e-5,0)"
    add("--smart WEIGHT,LR,NOISE,MOMENTUM", text, nargs="?", const=True, type=_numbers("Smart"))
    add = adder(command.add_argument_group("smaller: movement pruning"))
    add(
        "--movement",
        "also learn what the model can do without; lr, epochs and batch are then 3e-5, 10 and 16 "
        "(default: no pruning)",
        choices=("hard", "soft"),
    )
    add(
        "--movement-units",
        "blocks: heads and neurons, which are removed; weights become zeros, which saves no time "
        "(default weights)",
        choices=("weights", "blocks"),
    )
    add("--movement-keep X", "hard: share that is kept (default 0.15)")
    add("--movement-threshold X", "soft: what is below it at the end goes (default 0.1)")
    add("--movement-penalty X", "soft: weight of the mean score in the loss (default 400)")
    add("--movement-lr X", "learning rate of scores (default 0.01)")
    add = adder(command.add_argument_group("faster: fewer tokens"))
    add(
        "--length-drop P",
        "train for fewer tokens, such as 0.2: sub-models, whose layers each drop up to this share of "
        "the tokens, learn from the model in each step; then use fastbert prune --tokens (default: none)",
    )
    add("--length-drop-models N", "sampled sub-models per step (default 2)")
    add(
        "--token-search WEIGHT",
        "learn how many tokens each layer needs, at this price, such as 5e-4; then fine-tune the "
        "output again (default: none)",
    )
    add = adder(command.add_argument_group("options of some tasks"))
    add("--wnli", "glue: also WNLI, which the paper leaves out")
    add("--text NAME", "csv: the column of texts (default text)")
    add("--pair NAME", "csv: the column of second texts; default: there is none")
    add("--label NAME", "csv: the column of labels (default label)")
    add("--regression", "csv: labels are numbers, not classes", default=None)
    add("--strict", "ner: score IOB2's entities, not conlleval's", default=None)
    add(
        "--layers NAME",
        "ner-features: last4-concat (default), embeddings, second-to-last, last, last4-sum or all-sum",
    )
    _add_shared(add)


def add_predict(commands: Any) -> None:
    """The predict command."""
    command = commands.add_parser(
        "predict",
        help="answers of a fine-tuned model, as JSON lines",
        description="Print one JSON object per example, in the order of the input. Classes: label and score, "
        "its probability. Regression: value. squad, squad2: answer and score. ner: words, tags, and entities "
        "with their first word and the word after the last. swag, race: choice, text and score.",
        epilog="Example:\n  fastbert predict csv --model trained --input texts.txt",
    )
    add = adder(command)
    add("task TASK", "the task of the training; csv for any texts", choices=TASKS)
    add("--model DIR", "the output of fastbert finetune", required=True)
    add(
        "--input FILE",
        "csv and GLUE: .txt (a text per line; of a pair a tab between), .csv or .tsv with a header, or "
        ".jsonl. squad, squad2: .jsonl with question and context, or SQuAD's .json. ner: .txt, a sentence "
        "per line with spaces between words. swag: the official .csv. race: the folder of a split. -: stdin",
        required=True,
    )
    add(
        "--input-format",
        "of an input whose name does not end so; default for stdin: txt, of squad and squad2 jsonl",
        choices=("txt", "csv", "tsv", "jsonl", "json"),
    )
    add("--output FILE", "appears whole at the end, or not at all; default: stdout")
    add("--overwrite", "replace the output file if it exists")
    add("--batch-tokens N", "most tokens at a time", 8192)
    add("--max-length N", "most tokens of a sequence; default: that of the training")
    add("--dtype", "bf16, fp16: autocast", "fp32", choices=("fp32", "bf16", "fp16"))
    add(*DEVICE)
    add(*PROGRESS)
    add = adder(command.add_argument_group("options of some tasks"))
    add("--text NAME", "csv, GLUE: the column or key of texts; default: as trained, GLUE's, or text")
    add("--pair NAME", "csv, GLUE: that of second texts; default: as trained, GLUE's, or none")
    add("--columns", "ner: the input has CoNLL's columns", default=None)
    _add_shared(add)


def _add_shared(add: Any) -> None:
    """Options of tasks that train and predict alike."""
    add(
        "--doc-stride N",
        "squad, squad2: context tokens between the starts of two windows; default: 128, or as trained",
    )
    add(
        "--null-threshold X",
        'squad2: "" is the answer where no answer scores so much more than the best text; default: '
        "auto, the threshold of the best F1 on the dev file",
        type=_threshold,
    )
    add("--context N", "ner: tokens of the document on each side; default: 64, or as trained")
