"""Run a benchmark in a process of its own."""

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


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, str(ROOT / "bench" / script), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "2"}  # only --threads makes it 1
    done = subprocess.run(command, text=True, capture_output=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def has(package: str) -> bool:
    try:
        engines.needed(package)
    except RuntimeError:
        return False
    return True
