"""`reference`: plain PyTorch, slow and careful. Closes every list of the dispatch table.

Computes in float64 for float64 tensors and in float32 otherwise, and rounds once, at the end.
"""

from __future__ import annotations

from fastbert.backends import gather

DTYPES = gather("reference")


def available(device_type: str) -> str | None:
    """None: PyTorch's operations run on every device of PyTorch."""
    return None
