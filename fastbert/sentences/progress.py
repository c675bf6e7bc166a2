"""One line on stderr that says how far `encode` is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def bar(total: int, also: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """A callback for batches that shows how many of `total` sentences are done, their rate and the time left.

    Args:
        total: sentences of all batches.
        also: called with the same arguments, (sentences, tokens) of a batch; None = nothing.
    """
    start, last, done = time.perf_counter(), 0.0, 0

    def progress(sentences: int, tokens: int) -> None:
        nonlocal last, done
        done += sentences
        if also is not None:
            also(sentences, tokens)
        now = time.perf_counter()
        if done == total or now - last > 0.2:
            last, rate = now, done / max(now - start, 1e-9)
            left = round((total - done) / rate)
            line = f"{done:,} of {total:,} sentences, {rate:,.0f}/s, {left // 60:02d}:{left % 60:02d} left"
            print(f"\r{line:<78}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return progress
