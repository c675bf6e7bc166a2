"""How fast a run is: the line of speed.jsonl."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastbert.training.module import Losses
from fastbert.training.stream import Batch


class Clock:
    """The times of a run since its last line in the log."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._restart()

    def _restart(self) -> None:
        self._begin = time.perf_counter()
        self._waited = self._work = 0.0
        self._tokens = self._sequences = self._steps = 0

    def waiting(self, batches: Iterator[Batch], count: int) -> list[Batch]:
        """The next batches; their time counts as waiting for data."""
        begin = time.perf_counter()
        found = list(itertools.islice(batches, count))
        self._waited += time.perf_counter() - begin
        return found

    def count(self, module: Losses, micro: Sequence[Batch], counts: Mapping[str, int]) -> None:
        """Count a finished step."""
        self._steps += 1
        self._tokens += counts["tokens"]
        self._sequences += counts["sequences"]
        self._work += sum(module.work(batch) for batch in micro)

    @property
    def tokens_per_second(self) -> float:
        """The rate of the last line; since the beginning if there is no line yet."""
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        return self._tokens / seconds if self._rate is None else self._rate

    def speed(self, roof: float, peak: float | None) -> dict[str, Any]:
        """The line of speed.jsonl. Starts the times anew. Work, roof and peak are those of this process."""
        seconds = max(time.perf_counter() - self._begin, 1e-9)
        found = {
            "step_ms": seconds / self._steps * 1e3,
            "sequences_per_s": self._sequences / seconds,
            "tokens_per_s": self._tokens / seconds,
            "data_wait": self._waited / seconds,
        }
        if self._work:
            found["gflops"] = self._work / seconds / 1e9
            found["of_roof"] = self._work / seconds / roof
            if peak is not None:
                found["mfu"] = self._work / seconds / peak
        self._rate = found["tokens_per_s"]
        self._restart()
        return found
