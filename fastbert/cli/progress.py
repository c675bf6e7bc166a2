"""Progress of a command that reads files: counts, rates, the share of the input."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fastbert.runtime.progress import Progress


class Counts(Progress):
    """Counts what has been read and made.

    Args:
        files: paths or descriptors of the input; the sum of their sizes is 100%.
        units: what is counted, such as "tokens".
        shown: whether to show progress; None: if stderr is a terminal.
    """

    def __init__(self, files: Iterable[str | int], *units: str, shown: bool | None = None) -> None:
        super().__init__(shown)
        self._total = sum(os.path.getsize(file) for file in files if os.path.exists(file))
        self._units = units
        self._read, self._made = 0.0, [0] * len(units)
        self._current = False

    def __call__(self, read: float, *made: int) -> None:
        """Count `read` more bytes of the input, and `made` more of each unit."""
        self._read += read
        self._made = [before + more for before, more in zip(self._made, made, strict=True)]
        self._current = self._print(last=False)

    def close(self) -> None:
        """Print the last numbers, once."""
        if self._made[0] and (self.in_place or not self._current):
            self._print(last=True)
        self.shown = False

    def _print(self, last: bool) -> bool:
        counted = zip(self._made, self._units, strict=True)
        rates = ", ".join(f"{made / self.seconds:,.0f} {unit}/s" for made, unit in counted)
        done = min(self._read / self._total, 1.0) if self._total else 0.0
        share = f", {done:.0%}" if self._total else ""
        return self.show(f"{self._made[0]:,} {self._units[0]}, {rates}{share}", done, last=last)
