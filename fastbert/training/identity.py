"""What a run's bits depend on: the versions of the libraries, and the values that may not change."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastbert.runtime.version import VERSION


def versions() -> dict[str, str]:
    """Library -> version, for all that compute."""
    return {
        "fastbert": VERSION,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def difference(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> str | None:
    """The first field in which a run's config differs from that of its directory, or None."""
    for key in sorted({*old, *new}):
        was, now = old.get(key), new.get(key)
        if was != now:
            name, was, now = _innermost(key, was, now)
            return (
                f"{name}: the run in {path.parent} has {was!r}, got {now!r}; "
                "resume with its own value, or use another directory"
            )
    return None


def _innermost(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """(dotted name, old value, new value) of the first difference within two JSON values."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = (dict(enumerate(value)) for value in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                return _innermost(f"{name}.{key}", old.get(key), new.get(key))
    return name, old, new
