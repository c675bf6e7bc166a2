"""How a kernel is configured: a committed table for each GPU, looked up; never timed at run time.

The file is `kernels/tuned/<gpu>.json`, with the GPU's name in lower case with dashes:

    {"device": "NVIDIA H200", "linear": {"bfloat16 768x3072 gelu": {"7": {…}, "14": {…}}}}

kernel -> what is computed -> bucket of rows -> the fields of the kernel's config. A bucket is the exponent of
the next power of two, so that a run over many lengths has few buckets and compiles little. Where the file or
the entry is missing, the kernel's own heuristic chooses. `KERNELS` has the ops whose kernels read a table.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

# Without a table of its own a GPU reads that of one with the same processor and another memory: the kernels
# in the tables are bound by arithmetic.
SAME_PROCESSOR = dict.fromkeys(("nvidia-h200", "nvidia-h800", "nvidia-gh200-480gb"), "nvidia-h100-80gb-hbm3")
TUNED = Path(__file__).resolve().parent / "tuned"
# Op -> the keys of a table that its kernels read, forward and backward.
KERNELS = {
    "attention": ("attention", "attention_bwd"),
    # The first product is `linear`'s.
    "feed_forward": ("linear", "feed_forward_bwd"),
    "layer_norm": ("layer_norm", "layer_norm_bwd"),
    "linear": ("linear", "linear_bwd"),
    # More rows than its kernels take are normalized by `layer_norm`'s.
    "linear_norm": ("layer_norm", "linear_norm"),
}


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


def read_from(name: str) -> Path:
    """The table that the GPU of that name reads: its own, or that of one with the same processor."""
    own = file_of(name)
    other = SAME_PROCESSOR.get(own.stem)
    return own if other is None or own.exists() else TUNED / f"{other}.json"


@cache
def _table(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def tuned(device: Device, kernel: str, key: str, rows_bucket: int, below: bool = True) -> dict | None:
    """The fields of the config at the bucket nearest to `rows_bucket`; None where nothing is tuned.

    Args:
        device, kernel, key, rows_bucket: see above.
        below: whether the smallest bucket serves fewer rows too; not where its tiles may be too high.
    """
    buckets = _table(read_from(device.name)).get(kernel, {}).get(key)
    if not buckets or (not below and rows_bucket < min(map(int, buckets))):
        return None
    # Of two equally near buckets the smaller.
    nearest = min(buckets, key=lambda b: (abs(int(b) - rows_bucket), int(b)))
    return buckets[nearest]


def entries(name: str, op: str, dtype: torch.dtype) -> dict:
    """What the table of the GPU of that name holds for an op in a dtype.

    kernel -> key -> bucket -> config, of the kernels that have any.
    """
    first = str(dtype).removeprefix("torch.")
    table = {kernel: _table(read_from(name)).get(kernel, {}) for kernel in KERNELS.get(op, ())}
    found = {
        kernel: {key: buckets for key, buckets in keys.items() if key.split()[0] == first}
        for kernel, keys in table.items()
    }
    return {kernel: keys for kernel, keys in found.items() if keys}
