"""The `fastbert` command: encode, pretrain, analyze, … Only the chosen command's file is imported.

Exit status: 0 done; 1 a check failed; 2 the call or its input is wrong, with an error of one line
(FASTBERT_LOG=debug adds the traceback); 128 + n stopped by signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from fastbert.cli.compress_arguments import add_distill, add_prune, add_quantize
from fastbert.cli.finetune_arguments import add_finetune, add_predict
from fastbert.cli.usage import DTYPES, INT8, UsageError, say
from fastbert.ops.pooling import MODES as POOLINGS
from fastbert.runtime import dispatch
from fastbert.runtime.version import VERSION


class _Stopped(BaseException):
    """A signal asked the process to end. A BaseException, so that no handler of exceptions swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Help(argparse.HelpFormatter):
    """Fills paragraphs, but not a command, which is the indented last line."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        text, newline, command = text.partition("\n")
        return super()._fill_text(text, width, indent) + newline + command


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; of an option that is not known, name the nearest before argparse misses another."""
        if self._subparsers is None and all(action.nargs != argparse.REMAINDER for action in self._actions):
            known = self._option_string_actions
            for word in args:
                name = word.partition("=")[0]
                if name == "--":
                    break
                # argparse takes a word with a space as a value
                if (
                    name.startswith("--")
                    and " " not in word
                    and not any(option.startswith(name) for option in known)
                ):
                    near = difflib.get_close_matches(name, known, 1)
                    if near:
                        self.error(f"unknown option {name}; did you mean {near[0]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:  # one line instead of the usage
        guess = ""
        if found := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), 1)
            guess = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{message} (see {self.prog} --help){guess}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line, with all commands and options."""
    parser = _Parser(
        prog="fastbert",
        description="BERT encoders: embed text; fine-tune and predict; pre-train from raw text; see what "
        "heads and layers do. Every command has its own --help, with an example.",
        epilog="Example, for a text with one sentence per line:\n"
        "  fastbert encode --model sentence-transformers/all-MiniLM-L6-v2 --input texts.txt "
        "--output rows.npy",
    )
    parser.add_argument("--version", action="version", version=f"fastbert {VERSION}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")

    encode = commands.add_parser(
        "encode",
        help="embed the lines of a text file",
        description="Embed each line of a UTF-8 text file. Row i of the output belongs to line i; an empty "
        "line is encoded as the empty sentence. The output appears whole at the end, or not at all.",
        epilog="Example:\n  fastbert encode --model DIR --input texts.txt --output rows.npy",
    )
    encode.add_argument(
        "--model", required=True, metavar="DIR", help="HuggingFace or sentence-transformers directory"
    )
    encode.add_argument(
        "--input", required=True, metavar="FILE", help="text, one sentence per line; - for stdin"
    )
    encode.add_argument(
        "--output", required=True, metavar="FILE", help="kind by ending: .npy, .safetensors or .jsonl"
    )
    encode.add_argument("--overwrite", action="store_true", help="replace the output file if it exists")
    encode.add_argument("--pooling", choices=POOLINGS, help="default: the directory's, else mean")
    encode.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale to length 1; default: the directory's setting",
    )
    encode.add_argument("--prompt", metavar="TEXT", help="text before each line; default: the directory's")
    encode.add_argument(
        "--batch-tokens", type=int, metavar="N", help="most tokens in one batch (default 8192)"
    )
    encode.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of one line, special ones included; default: the directory's, else the model's "
        "number of positions",
    )
    encode.add_argument(
        "--on-long",
        choices=("truncate", "error"),
        default="truncate",
        help="what to do with a line over --max-length: truncate (default) or fail",
    )
    encode.add_argument(
        "--dtype",
        choices=("auto", *DTYPES, INT8),
        default="auto",
        help="dtype of the weights; auto (default): as stored; int8: quantised, on a CPU",
    )
    encode.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    encode.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="CPU threads of the model and the tokenizer; default: PyTorch's number, one per core or "
        "OMP_NUM_THREADS",
    )
    encode.add_argument(
        "--chunk-lines",
        type=int,
        default=32_768,
        metavar="N",
        help="most lines held in memory at a time (default 32768)",
    )
    encode.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="show progress on stderr; default: if stderr is a terminal",
    )

    add_finetune(commands)
    add_predict(commands)
    add_prune(commands)
    add_distill(commands)
    add_quantize(commands)

    env = commands.add_parser(
        "env",
        help="versions, devices, and the backend of each op",
        epilog="Example:\n  fastbert env",
    )
    env.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    verify = commands.add_parser(
        "verify",
        help="compare each op and backend with eager PyTorch",
        epilog="Example, in seconds:\n  fastbert verify --quick",
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    verify.add_argument("--op", action="append", choices=dispatch.OPS, help="may be repeated; default: all")
    verify.add_argument(
        "--backend", action="append", choices=dispatch.BACKENDS, help="may be repeated; default: all"
    )
    verify.add_argument(
        "--dtype", action="append", choices=tuple(DTYPES), help="may be repeated; default: all"
    )
    verify.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    verify.add_argument("--quick", action="store_true", help="only the few small cases of each op: seconds")
    verify.add_argument("--all", action="store_true", help="print every check, not the worst of each group")

    warm = commands.add_parser(
        "warmup",
        help="check the GPU kernels now, and keep the verdicts",
        description="A GPU kernel serves on a device only if it is proven there: by fastbert's table of some "
        "GPUs, or by a self-check, which runs now or at the kernel's first use. Verdicts are kept in "
        "$FASTBERT_CACHE (~/.cache/fastbert). A kernel that failed, crashed or hung is checked again only "
        "after a change of something that it depends on, or with --again.",
        epilog="Example:\n  fastbert warmup",
    )
    warm.add_argument("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")
    warm.add_argument("--op", action="append", choices=dispatch.OPS, help="may be repeated; default: all")
    warm.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="may be repeated; default: all")
    warm.add_argument("--again", action="store_true", help="also check proven kernels")
    warm.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="most seconds for one check (default 300)",
    )
    warm.add_argument("--json", action="store_true", help="print one JSON object instead of a table")

    _add_pretraining(commands)
    _add_pretrain(commands)
    _add_analyze(commands)

    bench = commands.add_parser(
        "bench",
        help="list or run the benchmarks of a source checkout",
        epilog="Example, which lists them:\n  fastbert bench",
    )
    bench.add_argument("name", nargs="?", help="such as encoder, or all; none: list them")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark")
    return parser


def _add_pretraining(commands: Any) -> None:
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


def _add_pretrain(commands: Any) -> None:
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


def _add_analyze(commands: Any) -> None:
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
    add = command.add_argument
    kinds = ("attention", "patterns", "heads", "importance", "fixed", "change", "effective", "geometry")
    add("kind", choices=(*kinds, "report", "syntax", "probe", "links", "starts"), help="what to compute")
    add("--model", required=True, metavar="DIR", help="a HuggingFace directory")
    add(
        "--input",
        metavar="FILE",
        help='examples: .txt or .tsv, one per line; or .jsonl, objects with a "text", or with SQuAD\'s '
        '"question" and "context"; default: none, which only syntax, probe and links accept',
    )
    add(
        "--conllu",
        metavar="FILE",
        help="syntax, probe, report: a treebank in the CoNLL-U format; default: none",
    )
    add(
        "--edges",
        metavar="FILE",
        help='probe, links: labelled spans, .jsonl with "text" and "targets" as jiant has them; default: '
        "none",
    )
    add(
        "--probe",
        choices=("edge", "mdl", "control", "structural"),
        help="probe: labels, by F1, description length or beside a control task; or trees (default edge)",
    )
    add(
        "--label",
        choices=("upos", "relation"),
        help="probe: what is predicted for each word of a treebank (default upos)",
    )
    add("--output", required=True, metavar="DIR", help="a new directory")
    add(
        "--against",
        metavar="DIR",
        help="change, report: a second model, such as the fine-tuned one; default: none",
    )
    add(
        "--pairs",
        action="store_true",
        help='pairs of texts, with a tab between or as "pair"; an encoder without a head reads each alone',
    )
    add(
        "--labels",
        metavar="KEY",
        help="heads, importance, fixed, report, starts: key of the labels in a .jsonl file. A label is a "
        "class; for an encoder without a head the cosine of a pair (default none); for question answering "
        "SQuAD's answers (default answers)",
    )
    add(
        "--unit",
        choices=("head", "all-but-one", "layer"),
        help="heads: what is removed (default head)",
    )
    add(
        "--mode",
        choices=("zero", "uniform", "skip"),
        help="heads, report: a removed head's output is 0, or that of looking at all tokens alike, or a "
        "layer is skipped (default zero)",
    )
    add(
        "--annotations",
        metavar="FILE",
        help='patterns: your labels, JSON lines {"example": 0, "layer": 0, "head": 3, "pattern": "block"}, '
        "to which a classifier is fitted; default: thresholds",
    )
    add(
        "--assignment",
        metavar="FILE",
        help='fixed: JSON lines {"layer": 0, "head": 3, "pattern": "previous"}; default: the pattern '
        "nearest to each head",
    )
    add("--epochs", type=int, metavar="N", help="starts: number of times each example is seen (default 3)")
    add("--batch-size", type=int, metavar="N", help="starts: examples per step (default 32)")
    add("--lr", type=float, metavar="X", help="starts: the largest learning rate (default 2e-5)")
    add("--max-examples", type=int, default=1000, metavar="N", help="most examples (default 1000)")
    add(
        "--on-long",
        choices=("truncate", "error"),
        help="what to do with a text that is longer than the model reads (default error; in a treebank such "
        "sentences are left out)",
    )
    add("--batch-tokens", type=int, default=4096, metavar="N", help="most tokens at a time (default 4096)")
    add(
        "--max-bytes",
        type=int,
        metavar="N",
        help="report, syntax: most memory of the attention maps of a layer (default 256 MiB)",
    )
    add(
        "--seed", type=int, default=0, metavar="N", help="seed of masks, random orders, resamples (default 0)"
    )
    add("--device", metavar="DEV", help="cpu, cuda or cuda:N; default: a GPU if there is one")


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Turn signals that end a process into an exception, so that unfinished files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # further signals must not interrupt the clean-up
        raise _Stopped(number)

    before: dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # keep nohup's
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Commands that resume a run when they are called again
_RESUMED = ("distill", "finetune", "pretrain")
_USER_ERRORS = (
    UsageError,
    ValueError,
    TypeError,
    OSError,
    ImportError,
    dispatch.BackendError,
    torch.OutOfMemoryError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. `argv` has no program name; default: sys.argv[1:]."""
    level = os.environ.get("FASTBERT_LOG", "warning")
    debug = level.lower() == "debug"
    try:
        if level.lower() not in ("debug", "info", "warning", "error"):
            raise UsageError(f"FASTBERT_LOG={level}: expected debug, info, warning or error")
        logging.basicConfig(level=level.upper(), format="%(name)s: %(levelname)s: %(message)s")
        args = build_parser().parse_args(argv)
        # Imported before our handlers are set: an import could swallow the exceptions that they raise
        command = importlib.import_module(f"fastbert.cli.{args.command.replace('-', '_')}")
        with _signals():
            return command.run(args)
    except _Stopped as stopped:
        resumes = "; rerun the command to resume" if args.command in _RESUMED else ""
        say(f"stopped by {signal.Signals(stopped.number).name}{resumes}")
        return 128 + stopped.number
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + 13
    except _USER_ERRORS as error:
        if debug:
            traceback.print_exc()
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"fastbert: error: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
