"""One line on stderr for commands that read files: how much is done, the rate, the time left."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence


class Progress:
    """Is told what has been read and made; prints at most five times a second.

    Args:
        files: the input; their sizes are the whole.
        unit: what is made, such as "tokens".
        shown: None: if stderr is a terminal.
    """

    def __init__(self, files: Sequence[str], unit: str, shown: bool | None = None) -> None:
        self._in_place = sys.stderr.isatty()
        self._shown = self._in_place if shown is None else shown
        self._total = sum(os.path.getsize(file) for file in files if os.path.exists(file))
        self._unit, self._read, self._made = unit, 0, 0
        self._start = self._last = time.perf_counter()

    def __call__(self, size: int, made: int) -> None:
        """`size` more bytes of input have been read, and `made` more units made."""
        self._read += size
        self._made += made
        if self._shown and time.perf_counter() - self._last > 0.2:
            self._print("\r" if self._in_place else "\n")

    def close(self) -> None:
        """Print the last numbers."""
        if self._shown:
            self._print("\n")
        self._shown = False

    def _print(self, end: str) -> None:
        self._last = now = time.perf_counter()
        seconds = max(now - self._start, 1e-9)
        done = min(self._read / self._total, 1.0) if self._total else 1.0
        left = ""
        if 0 < done < 1:
            remaining = round(seconds * (1 - done) / done)
            left = f", {remaining // 3600}:{remaining // 60 % 60:02d}:{remaining % 60:02d} left"
        line = f"{self._made:,} {self._unit}, {self._made / seconds:,.0f} per second, {done:.0%}{left}"
        print(line.ljust(79) if self._in_place else line, end=end, file=sys.stderr, flush=True)
