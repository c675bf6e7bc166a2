"""A process of one thread that never rests: `python -P bench/lib/neighbour.py PARENT`.

It prints a line and runs until the process PARENT ends. It needs no torch, so it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import sys


def end_with(parent: int) -> None:
    """Let this process end with its parent, the process `parent`.

    Linux does so however the parent ends, and also while this process is stopped. Elsewhere only a parent
    that has already ended is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    if os.getppid() != parent:
        sys.exit(1)


def main(parent: int) -> None:
    """Run until the parent ends."""
    end_with(parent)
    print(flush=True)
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
