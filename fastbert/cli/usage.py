"""Shared by all commands: errors for the user, messages on stderr, devices and dtypes by name."""

from __future__ import annotations

import sys

import torch

INT8 = "int8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UsageError(Exception):
    """The call or its input is wrong; the message is the only line that the user sees."""


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
