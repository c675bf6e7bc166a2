"""A file of JSON lines that grows during a run: each record is on the disk before the next one is made.

A line is one of {"head": {…}} (facts of the run; later ones are merged over earlier ones), {"row": {…}} and
{"step": {…}}. Several processes may append to one file. Only Python's standard library is needed.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path


def plain(value: object) -> object:
    """`value` with NaN and infinities as text: JSON has none."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def append(path: Path, kind: str, value: dict) -> None:
    """Add one line and wait until it is on the disk."""
    data = (json.dumps({kind: plain(value)}, allow_nan=False, default=str) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":  # a writer was killed in the middle of its line
            data = b"\n" + data
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict:
    """The run that the lines describe: the merged head, and `rows` and `steps` in order.

    `torn` counts lines that a killed writer left unfinished; they are left out.
    """
    data: dict = {"rows": [], "steps": [], "torn": 0}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError:
            data["torn"] += 1
            continue
        data |= record.get("head", {})
        data["rows"] += [record["row"]] if "row" in record else []
        data["steps"] += [record["step"]] if "step" in record else []
    return data
