"""Shared by all commands: errors for the user, messages on stderr, devices and dtypes by name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

INT8 = "int8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

DEVICE = "--device DEV", "cpu, cuda or cuda:N; default: a GPU if there is one"
PROGRESS = "--[no-]progress", "default: if stderr is a terminal"
_ABSENT: Any = object()
_TYPES = {"N": int, **dict.fromkeys(("BITS", "P", "S", "WEIGHT", "X"), float)}


class UsageError(Exception):
    """The call or its input is wrong; the message is the only line that the user sees."""


def adder(parser: Any) -> Callable[..., None]:
    """A function that adds arguments to a parser or to a group of one.

    Its arguments are the option with its metavar, the help, the default, and more of `add_argument`'s. The
    default is added to a help that does not state it. The metavar says whether a value is an integer or a
    number. An option without a metavar and choices is a switch; "--[no-]name" has an opposite.
    """

    def add(option: str, text: str, default: Any = _ABSENT, **more: Any) -> None:
        name, _, metavar = option.partition(" ")
        if name.startswith("--[no-]"):
            name, more["action"] = name.replace("[no-]", ""), argparse.BooleanOptionalAction
        elif metavar:
            more = {"metavar": metavar, "type": _TYPES.get(metavar)} | more
        elif name.startswith("--") and "choices" not in more:
            more["action"] = "store_true"
        if default is not _ABSENT:
            more["default"] = default
            if type(default) in (int, str) and "default" not in text:
                text += f" (default {default})"
        parser.add_argument(name, help=text, **more)

    return add


def numbers(text: str, kind: type = float) -> list[Any]:
    """The value of an option that takes several numbers, each of this kind."""
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers with commas between, got {text!r}") from None


def say(text: str) -> None:
    """Print a message on stderr, after the program's name."""
    print(f"fastbert: {text}", file=sys.stderr)


def device_of(name: str | None) -> torch.device:
    """The device that --device names; without a name a GPU if there is one, else the CPU.

    Raises:
        UsageError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: expected cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine shows torch {torch.cuda.device_count()} GPUs")
    return device
