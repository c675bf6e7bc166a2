"""How a kernel is configured: a committed table for each GPU, looked up; never timed at run time.

The file is `kernels/tuned/<gpu>.json`, with the GPU's name in lower case with dashes:

    {"device": "NVIDIA H200", "linear": {"bfloat16 768x3072 gelu": {"7": {…}, "14": {…}}}}

op -> what is computed -> bucket of rows -> the fields of the kernel's config. A bucket is the exponent of the
next power of two, so that a run over many lengths has few buckets and compiles little. Where the file or the
entry is missing, the kernel's own heuristic chooses.
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
    """What a heuristic asks about a device. Triton's interpreter has capability (0, 0)."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


@cache
def device_of(device: torch.device) -> Device:
    """The facts of `device`; for the interpreter those of a very small device."""
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
    """The fields of the config at the bucket nearest to `rows_bucket`; None where nothing is tuned."""
    buckets = _table(file_of(device.name)).get(op, {}).get(key)
    if not buckets:
        return None
    # Of two equally near buckets the smaller.
    nearest = min(buckets, key=lambda b: (abs(int(b) - rows_bucket), int(b)))
    return buckets[nearest]


def entries(name: str, op: str, dtype: torch.dtype) -> dict:
    """What the table of the GPU of that name holds for an op in a dtype: key -> bucket -> config."""
    first = str(dtype).removeprefix("torch.")
    table = _table(file_of(name)).get(op, {})
    return {key: buckets for key, buckets in table.items() if key.split()[0] == first}
