"""The progress line of `encode` on stderr."""

from __future__ import annotations

from collections.abc import Callable

from fastbert.runtime.progress import Progress


def bar(total: int, also: Callable[[int, int], None] | None) -> Callable[[int, int], None]:
    """A callback for batches that shows how many of `total` sentences are done, their rate and the time left.

    Args:
        total: number of sentences in all batches.
        also: called with the same arguments, (sentences, tokens) of a batch; None = nothing.
    """
    line, done = Progress(), 0

    def progress(sentences: int, tokens: int) -> None:
        nonlocal done
        done += sentences
        if also is not None:
            also(sentences, tokens)
        text = f"{done:,} of {total:,} sentences, {done / line.seconds:,.0f}/s"
        line.show(text, done / total, last=done == total)

    return progress
