"""Freed memory that a process keeps for its next training step.

Every step allocates and frees the same gradients and activations. glibc returns free memory at the end of its
heap to the system. Each page that is allocated again costs a page fault, which takes longer than writing the
page: a step of BERT-base on a CPU has 110,000 faults (csrc/cpu/NOTES.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator

# <malloc.h>
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# the limits that glibc itself goes up to, and the largest that mallopt accepts
_USUAL = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}
_KEPT = dict.fromkeys(_USUAL, 2**31 - 1)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the environment sets no limits of its own."""
    limits = (f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TOP_PAD", "TRIM_THRESHOLD"))
    own = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in limits)
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" and not own else None


def _limit(library: ctypes.CDLL, limits: dict[int, int]) -> None:
    for option, value in limits.items():
        library.mallopt(option, value)


@contextlib.contextmanager
def kept_memory() -> Iterator[None]:
    """A context in which the process keeps freed memory for reuse; at its end the memory is returned.

    Put it around all training steps on a CPU. The peak memory does not change, but the process holds it
    between steps. Nothing changes if malloc is not glibc's, or if GLIBC_TUNABLES or MALLOC_… set its limits.
    """
    library = _glibc()
    if library is None:
        yield
        return
    _limit(library, _KEPT)
    try:
        yield
    finally:
        _limit(library, _USUAL)
        library.malloc_trim(0)
