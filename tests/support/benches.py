"""What the tests of the benchmarks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.lib import engines, roofs, workloads

ROOT = Path(__file__).resolve().parents[2]
TINY = workloads.TINY
LENGTHS = (9, 2, 14)
ROOFS = roofs.Roofs({"fp32": 100.0, "bf16": 200.0, "fp16": 100.0, "int8": 400.0}, 20.0)


def suite(*options: object, **environment: str) -> subprocess.CompletedProcess:
    """Run the suite with these files and options in a process of its own, on tiny models."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--smoke", *map(str, options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=600)


def has(package: str) -> bool:
    try:
        engines.needed(package)
    except RuntimeError:
        return False
    return True
