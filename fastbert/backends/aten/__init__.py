"""`aten`: what a good PyTorch program would call. Runs on every device PyTorch runs on."""

from __future__ import annotations

from fastbert.backends import gather

DTYPES = gather("aten")


def available(device_type: str) -> str | None:
    """None: PyTorch's operations run on every device of PyTorch."""
    return None
