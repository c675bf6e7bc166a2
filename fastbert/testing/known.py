"""What is known of a GPU kernel: by this process, by its disk, or by the shipped table of proofs.

`proven/<gpu>.json` has the verdicts of runs on our GPUs, each with its date, commit and times, under a key of
all that it depends on (`verdict_keys.proof_key_of`). A kernel that is in the table is not checked again. A
verdict on the user's own disk overrides the table; `fastbert warmup --again` makes one.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import torch

from fastbert.testing import verdict_keys, verdicts
from fastbert.testing.verdict_keys import Key, Unit
from fastbert.testing.verdicts import Verdict

FOLDER = Path(__file__).with_name("proven")

# Verdicts of this process's checks, and those from elsewhere that it has used.
found: dict[tuple[Unit, torch.device], Verdict] = {}


def file_of(device_name: str) -> Path:
    """The table of a GPU, such as "NVIDIA H200"."""
    return FOLDER / f"{re.sub('[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def verdict(unit: Unit, device: torch.device) -> Verdict | None:
    """What is known of a kernel; None where nothing has been found, neither here nor elsewhere."""
    if (unit, device) in found:
        return found[unit, device]
    kept = verdicts.load(verdict_keys.key_of(unit.op, unit.backend, device, unit.dtype))
    return kept or shipped(unit, device)


def shipped(unit: Unit, device: torch.device) -> Verdict | None:
    """The verdict in the shipped table."""
    key = verdict_keys.proof_key_of(unit.op, unit.backend, device, unit.dtype)
    return None if key is None else _table(file_of(key["device"])).get(_text(key))


@cache
def _table(path: Path) -> dict[str, Verdict]:
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["proofs"]
    both = ((_text(row["key"]), verdicts.verdict_of(row)) for row in rows)
    return {key: each for key, each in both if each is not None}


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
