"""Progress lines on stderr; on a terminal each overwrites the last."""

from __future__ import annotations

import math
import sys
import time


class Progress:
    """Prints at most five lines per second; its time begins now.

    Args:
        shown: whether to print; None prints only if stderr is a terminal.
    """

    def __init__(self, shown: bool | None = None) -> None:
        self.in_place = sys.stderr.isatty()
        self.shown = self.in_place if shown is None else shown
        self._begin, self._last = time.perf_counter(), -math.inf

    @property
    def seconds(self) -> float:
        """Seconds since the beginning, above 0."""
        return max(time.perf_counter() - self._begin, 1e-9)

    def show(self, text: str, done: float = 0.0, *, last: bool = False) -> bool:
        """Print a text and the time left; return whether it was time for a line.

        Args:
            text: what is done.
            done: the share of the whole that is done, 0 to 1; 0 also where the whole is not known.
            last: print at any time, and end the line.
        """
        now = time.perf_counter()
        if not self.shown or (now - self._last < 0.2 and not last):
            return False
        self._last = now
        if 0 < done < 1:
            left = round((now - self._begin) * (1 - done) / done)
            text += f", {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
        end = "\r" if self.in_place and not last else "\n"
        print(text.ljust(99) if self.in_place else text, end=end, file=sys.stderr, flush=True)
        return True
