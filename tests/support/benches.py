"""What the tests of the benchmarks share."""

from __future__ import annotations

from pathlib import Path

from bench.lib import engines, roofs, workloads

ROOT = Path(__file__).resolve().parents[2]
TINY = workloads.TINY
LENGTHS = (9, 2, 14)
ROOFS = roofs.Roofs({"fp32": 100.0, "bf16": 200.0, "fp16": 100.0, "int8": 400.0}, 20.0)


def has(package: str) -> bool:
    try:
        engines.needed(package)
    except RuntimeError:
        return False
    return True
