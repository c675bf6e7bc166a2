"""Which processor this is, where a choice depends on it."""

from __future__ import annotations

import platform
import re
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def amd_family() -> int | None:
    """The family of an AMD processor (25 is Zen 3 and 4, 26 Zen 5); None for other makes, or if unknown."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    return int(family[1]) if family and "AuthenticAMD" in text else None
