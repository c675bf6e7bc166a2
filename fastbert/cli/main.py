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

from fastbert.cli.analyze_arguments import add_analyze
from fastbert.cli.compress_arguments import add_distill, add_prune, add_quantize
from fastbert.cli.finetune_arguments import add_finetune, add_predict
from fastbert.cli.pretrain_arguments import add_pretrain, add_pretraining
from fastbert.cli.usage import DEVICE, DTYPES, INT8, UsageError, adder, say
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
    add = adder(encode)
    add("--model DIR", "HuggingFace or sentence-transformers directory", required=True)
    add("--input FILE", "text, one sentence per line; - for stdin", required=True)
    add("--output FILE", "kind by ending: .npy, .safetensors or .jsonl", required=True)
    add("--overwrite", "replace the output file if it exists")
    add("--pooling", "default: the directory's, else mean", choices=POOLINGS)
    add("--[no-]normalize", "scale to length 1; default: the directory's setting")
    add("--prompt TEXT", "text before each line; default: the directory's")
    add("--batch-tokens N", "most tokens in one batch (default 8192)")
    add(
        "--max-length N",
        "most tokens of one line, special ones included; default: the directory's, else the model's "
        "number of positions",
    )
    add(
        "--on-long",
        "what to do with a line over --max-length: truncate (default) or fail",
        choices=("truncate", "error"),
        default="truncate",
    )
    add(
        "--dtype",
        "dtype of the weights; auto (default): as stored; int8: quantised, on a CPU",
        choices=("auto", *DTYPES, INT8),
        default="auto",
    )
    add(*DEVICE)
    add(
        "--threads N",
        "CPU threads of the model and the tokenizer; default: PyTorch's number, one per core or "
        "OMP_NUM_THREADS",
    )
    add("--chunk-lines N", "most lines held in memory at a time", 32_768)
    add("--[no-]progress", "show progress on stderr; default: if stderr is a terminal")

    add_finetune(commands)
    add_predict(commands)
    add_prune(commands)
    add_distill(commands)
    add_quantize(commands)

    env = commands.add_parser(
        "env", help="versions, devices, and the backend of each op", epilog="Example:\n  fastbert env"
    )
    add = adder(env)
    add("--json", "print one JSON object instead of tables")

    verify = commands.add_parser(
        "verify",
        help="compare each op and backend with eager PyTorch",
        epilog="Example, in seconds:\n  fastbert verify --quick",
    )
    add = adder(verify)
    add("--json", "print one JSON object instead of a table")
    add("--op", "may be repeated; default: all", action="append", choices=dispatch.OPS)
    add("--backend", "may be repeated; default: all", action="append", choices=dispatch.BACKENDS)
    add("--dtype", "may be repeated; default: all", action="append", choices=tuple(DTYPES))
    add(*DEVICE)
    add("--quick", "only the few small cases of each op: seconds")
    add("--all", "print every check, not the worst of each group")

    warm = commands.add_parser(
        "warmup",
        help="check the GPU kernels now, and keep the verdicts",
        description="A GPU kernel serves on a device only if it is proven there: by fastbert's table of some "
        "GPUs, or by a self-check, which runs now or at the kernel's first use. Verdicts are kept in "
        "$FASTBERT_CACHE (~/.cache/fastbert). A kernel that failed, crashed or hung is checked again only "
        "after a change of something that it depends on, or with --again.",
        epilog="Example:\n  fastbert warmup",
    )
    add = adder(warm)
    add(*DEVICE)
    add("--op", "may be repeated; default: all", action="append", choices=dispatch.OPS)
    add("--dtype", "may be repeated; default: all", action="append", choices=tuple(DTYPES))
    add("--again", "also check proven kernels")
    add("--timeout S", "most seconds for one check (default 300)")
    add("--json", "print one JSON object instead of a table")

    add_pretraining(commands)
    add_pretrain(commands)
    add_analyze(commands)

    bench = commands.add_parser(
        "bench",
        help="list or run the benchmarks of a source checkout",
        epilog="Example, which lists them:\n  fastbert bench",
    )
    add = adder(bench)
    add("name", "such as encoder, or all; none: list them", nargs="?")
    add("arguments", "arguments of the benchmark", nargs=argparse.REMAINDER)
    return parser


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
