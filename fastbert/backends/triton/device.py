"""Where Triton runs, and how its kernels are imported: at the first launch, not with `fastbert`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from functools import cache
from types import ModuleType

import torch

# The oldest that the tests run.
OLDEST_TRITON = (3, 6)
# The first with bfloat16 arithmetic.
OLDEST_CAPABILITY = (8, 0)
# The dtypes that the kernels store.
STORED = (torch.float32, torch.bfloat16, torch.float16)


def available(device_type: str) -> str | None:
    """None where the kernels run on tensors of `device_type` now, else the reason."""
    missing = _triton_missing()
    if missing is not None:
        return missing
    if device_type == "cuda":
        if not torch.cuda.is_available():
            return "no CUDA device"
        if torch.version.hip is not None:
            return "ROCm devices are not supported"
        capability = torch.cuda.get_device_capability()
        if capability < OLDEST_CAPABILITY:
            return f"compute capability {capability[0]}.{capability[1]} is below 8.0"
        return None
    if device_type == "cpu":
        interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
        return None if interpreted else "CPU tensors need Triton's interpreter (TRITON_INTERPRET=1)"
    return f"device type {device_type} is not supported"


@cache
def _triton_missing() -> str | None:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {version} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


@cache
def kernels(op: str) -> ModuleType:
    """`fastbert.kernels.<op>`, which imports Triton."""
    return importlib.import_module(f"fastbert.kernels.{op}")
