"""How a kernel is configured: a committed table for each GPU, looked up; never timed at run time.

`kernels/tuned/<gpu>.json`, the GPU's name in lower case with dashes, is

    {"device": "NVIDIA H200", "linear": {"bfloat16 768x3072 gelu": {"7": {…}, "14": {…}}}}

op -> what is computed -> bucket of rows -> the fields of the kernel's config. A bucket is the exponent of the
next power of two, so that a run over many lengths meets few of them and compiles little. A GPU without a
file, or a file without the entry, gets the kernel's own heuristic.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

TUNED = Path(__file__).resolve().parent / "tuned"


class Device(NamedTuple):
    """What a heuristic asks about a device."""

    name: str
    capability: tuple[int, int]  # (0, 0): no GPU, Triton's interpreter
    multiprocessors: int


@cache
def device_of(device: torch.device) -> Device:
    """The facts of `device`; those of a very small one for the interpreter."""
    if device.type != "cuda":
        return Device(device.type, (0, 0), 2)
    facts = torch.cuda.get_device_properties(device)
    return Device(facts.name, (facts.major, facts.minor), facts.multi_processor_count)


def bucket(rows: int) -> int:
    """The exponent of the smallest power of two that is at least `rows`."""
    return max(0, rows - 1).bit_length()


def file_of(name: str) -> Path:
    """The table of the GPU of that name; the file need not exist."""
    return TUNED / ("-".join(re.findall(r"[a-z0-9]+", name.lower())) + ".json")


@cache
def _table(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def tuned(device: Device, op: str, key: str, rows_bucket: int) -> dict | None:
    """The fields of the config at the bucket nearest to `rows_bucket`; None where it is not tuned."""
    buckets = _table(file_of(device.name)).get(op, {}).get(key)
    if not buckets:
        return None
    nearest = min(buckets, key=lambda b: (abs(int(b) - rows_bucket), int(b)))  # of two the smaller
    return buckets[nearest]
