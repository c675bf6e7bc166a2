"""The resident memory of this process, now and at most."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def status_mib(key: str) -> float:
    """VmRSS (resident now) or VmHWM (most so far) of this process."""
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(f"{key}:"):
            return int(text.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget_peak() -> bool:
    """Reset VmHWM to what is resident now; returns False if the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return status_mib("VmHWM") - status_mib("VmRSS") < 8.0


def return_freed() -> None:
    """Return freed memory to the system, or a call would reuse what loading has freed, uncounted."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
