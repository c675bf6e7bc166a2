"""The arguments of `fastbert finetune` and `fastbert predict`."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Callable
from typing import Any

from fastbert.cli.usage import UsageError

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


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, got {text!r}") from None


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
    add = command.add_argument
    add(
        "task",
        choices=(*TASKS, "glue"),
        metavar="TASK",
        help="csv, ner, ner-features, squad, squad2, swag, race, one of GLUE's (cola, sst2, mrpc, stsb, "
        "qqp, mnli, qnli, rte, wnli), or glue for eight of them, one after the other",
    )
    add(
        "--model",
        metavar="DIR",
        help="a HuggingFace directory, or a name on the hub; default: none, as --predict-only accepts",
    )
    add("--data", required=True, metavar="DIR", help="the folder of the task's official files")
    add("--output", required=True, metavar="DIR", help="the folder of the trained model; glue: one per task")
    add("--lr", type=_rates, metavar="X,…", help="learning rates, one run each; default: the task's")
    for name, kind, text in (
        ("epochs", float, "passes over the training examples; default: the task's"),
        ("batch-size", int, "examples per step; default: the task's"),
        ("max-length", int, "most tokens of a sequence; default: the task's"),
        ("restarts", int, "runs per learning rate, each with its own seed (default 1)"),
        ("seed", int, "seed of the first restart: new head, dropout, order (default 0)"),
        ("layer-decay", float, "factor of the learning rate per layer below the head (default 1)"),
        ("reinit", int, "top layers that begin anew, with the pooler (default 0)"),
    ):
        add(f"--{name}", type=kind, metavar="X" if kind is float else "N", help=text)
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="bf16, fp16: autocast (default fp32)")
    add("--freeze", action="store_true", default=None, help="train the head and the pooler alone")
    text = "round in training as int8 or int4 will; the files keep floats (default: no rounding)"
    add("--qat", choices=("int8", "int4"), help=text)
    add("--random-init", action="store_true", default=None, help="begin with random weights")
    add("--intermediate", metavar="DIR", help="data to train on before; default: none")
    add(
        "--intermediate-task",
        choices=TASKS,
        metavar="TASK",
        help="the task of --intermediate (default: TASK), such as mnli for rte",
    )
    add("--head-mix", action="store_true", default=None, help="the head reads a learned mix of all layers")
    add("--head-layers", type=int, metavar="N", help="new layers on top of the model (default 0)")
    add("--head-bilstm", action="store_true", default=None, help="a BiLSTM between the model and the head")
    add(
        "--beside",
        metavar="DIR",
        help="a second model that the head reads and that learns too; default: none",
    )
    add("--workers", type=int, default=0, metavar="N", help="processes that make batches (default 0)")
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")
    add(
        "--predict-only",
        action="store_true",
        help="train nothing: write the prediction files of --output's model again and score them",
    )
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add = command.add_argument_group("steadier and better").add_argument
    add("--stable", action="store_true", default=None, help="20 epochs, batch 16, lr 2e-5, eps 1e-6")
    add(
        "--optimizer",
        choices=("adamw", "adamw-google"),
        help="-google: without correction of bias (default adamw)",
    )
    add("--weight-decay", type=float, metavar="X", help="of AdamW (default 0.01)")
    text = "weights decay to the checkpoint's, not to 0"
    add("--decay-to-start", action="store_true", default=None, help=text)
    text = "the probability that a layer is skipped in a micro-batch (default 0)"
    add("--layerdrop", type=float, metavar="P", help=text)
    text = "in place of dropout: the probability of a checkpoint's weight, such as 0.7 (default 0)"
    add("--mixout", type=float, metavar="P", help=text)
    add("--mixout-mask", choices=("column", "element"), help="draws per input or per weight (default column)")
    for kind, values, text in (
        ("FreeLB", "K,LR,INIT,BALL", "adversarial training in K passes per step (default 3,0.1,1,null)"),
        (
            "Smart",
            "WEIGHT,LR,NOISE,MOMENTUM",
            "smoothness beside the loss, in three forwards per step (default 1,1e-3,1e-5,0)",
        ),
    ):
        add(f"--{kind.lower()}", nargs="?", const=True, type=_numbers(kind), metavar=values, help=text)
    add = command.add_argument_group("smaller: movement pruning").add_argument
    add(
        "--movement",
        choices=("hard", "soft"),
        help="also learn what the model can do without; lr, epochs and batch are then 3e-5, 10 and 16 "
        "(default: no pruning)",
    )
    add(
        "--movement-units",
        choices=("weights", "blocks"),
        help="blocks: heads and neurons, which are removed; weights become zeros, which saves no time "
        "(default weights)",
    )
    for name, text in (
        ("keep", "hard: share that is kept (default 0.15)"),
        ("threshold", "soft: what is below it at the end goes (default 0.1)"),
        ("penalty", "soft: weight of the mean score in the loss (default 400)"),
        ("lr", "learning rate of scores (default 0.01)"),
    ):
        add(f"--movement-{name}", type=float, metavar="X", help=text)
    add = command.add_argument_group("faster: fewer tokens").add_argument
    add(
        "--length-drop",
        type=float,
        metavar="P",
        help="train for fewer tokens, such as 0.2: sub-models, whose layers each drop up to this share of "
        "the tokens, learn from the model in each step; then use fastbert prune --tokens (default: none)",
    )
    add("--length-drop-models", type=int, metavar="N", help="sampled sub-models per step (default 2)")
    add(
        "--token-search",
        type=float,
        metavar="WEIGHT",
        help="learn how many tokens each layer needs, at this price, such as 5e-4; then fine-tune the "
        "output again (default: none)",
    )
    add = command.add_argument_group("options of some tasks").add_argument
    add("--wnli", action="store_true", help="glue: also WNLI, which the paper leaves out")
    add("--text", metavar="NAME", help="csv: the column of texts (default text)")
    add("--pair", metavar="NAME", help="csv: the column of second texts; default: there is none")
    add("--label", metavar="NAME", help="csv: the column of labels (default label)")
    add("--regression", action="store_true", default=None, help="csv: labels are numbers, not classes")
    add("--strict", action="store_true", default=None, help="ner: score IOB2's entities, not conlleval's")
    add(
        "--layers",
        metavar="NAME",
        help="ner-features: last4-concat (default), embeddings, second-to-last, last, last4-sum or all-sum",
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
    add = command.add_argument
    add("task", choices=TASKS, metavar="TASK", help="the task of the training; csv for any texts")
    add("--model", required=True, metavar="DIR", help="the output of fastbert finetune")
    add(
        "--input",
        required=True,
        metavar="FILE",
        help="csv and GLUE: .txt (a text per line; of a pair a tab between), .csv or .tsv with a header, or "
        ".jsonl. squad, squad2: .jsonl with question and context, or SQuAD's .json. ner: .txt, a sentence "
        "per line with spaces between words. swag: the official .csv. race: the folder of a split. -: stdin",
    )
    add(
        "--input-format",
        choices=("txt", "csv", "tsv", "jsonl", "json"),
        help="of an input whose name does not end so; default for stdin: txt, of squad and squad2 jsonl",
    )
    add("--output", metavar="FILE", help="appears whole at the end, or not at all; default: stdout")
    add("--overwrite", action="store_true", help="replace the output file if it exists")
    add("--batch-tokens", type=int, default=8192, metavar="N", help="most tokens at a time (default 8192)")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of a sequence; default: that of the training",
    )
    add(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="bf16, fp16: autocast (default fp32)",
    )
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    add("--progress", action=argparse.BooleanOptionalAction, help="default: if stderr is a terminal")
    add = command.add_argument_group("options of some tasks").add_argument
    add(
        "--text",
        metavar="NAME",
        help="csv, GLUE: the column or key of texts; default: as trained, GLUE's, or text",
    )
    add(
        "--pair", metavar="NAME", help="csv, GLUE: that of second texts; default: as trained, GLUE's, or none"
    )
    add("--columns", action="store_true", default=None, help="ner: the input has CoNLL's columns")
    _add_shared(add)


def _add_shared(add: Any) -> None:
    """Options of tasks that train and predict alike."""
    add(
        "--doc-stride",
        type=int,
        metavar="N",
        help="squad, squad2: context tokens between the starts of two windows; default: 128, or as trained",
    )
    add(
        "--null-threshold",
        type=_threshold,
        metavar="X",
        help='squad2: "" is the answer where no answer scores so much more than the best text; default: '
        "auto, the threshold of the best F1 on the dev file",
    )
    add(
        "--context",
        type=int,
        metavar="N",
        help="ner: tokens of the document on each side; default: 64, or as trained",
    )
