"""Device time of a row of calls on a GPU, without the host's share.

The stream spins first, until the host has enqueued all calls. Then the device runs them back to back between
two events. If the device passes the first event before the host has enqueued the last call, it may have
waited for the host: the time is of launches, not of kernels. Such a sample is taken again behind a longer
spin; at the longest spin, with half as many calls. A sample that is still launch-bound after that is marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

# `torch.cuda._sleep` counts cycles of the device's clock, and no GPU's clock is much faster. With a slower
# clock the spin only lasts longer.
CYCLES_PER_MS = 2_000_000
# The device spins for this multiple of the host's time for the calls.
MARGIN = 1.5
LEAST_SPIN_MS, MOST_SPIN_MS = 0.5, 20.0
TRIES = 4


class Sample(NamedTuple):
    """What one row of calls took.

    Attributes:
        ms: the device's time per call.
        host_ms: the host's time per call, to enqueue it.
        count: calls.
        launch_bound: whether the device may have waited for the host, so that `ms` is too long.
    """

    ms: float
    host_ms: float
    count: int
    launch_bound: bool


class DeviceClock:
    """Times rows of calls, and keeps how long the device must spin before the next (`spin_ms`, at least)."""

    def __init__(self) -> None:
        self.spin_ms = LEAST_SPIN_MS

    def sample(self, run: Callable[[int], object], count: int, *, fewer: bool = True) -> Sample:
        """Time `count` calls, or fewer where the host cannot enqueue so many ahead of the device.

        Args:
            run: makes so many calls on the current stream.
            count: at least 1.
            fewer: whether fewer calls will do.
        """
        found = self.once(run, count)
        for _ in range(TRIES - 1):
            if not found.launch_bound:
                return found
            host_ms = found.host_ms * found.count
            if self.spin_ms < MOST_SPIN_MS:
                self.spin_ms = min(MOST_SPIN_MS, max(2 * self.spin_ms, MARGIN * host_ms))
            elif fewer and count > 1:
                count //= 2
            else:
                break
            found = self.once(run, count)
        return found

    def once(self, run: Callable[[int], object], count: int) -> Sample:
        """Time `count` calls behind a spin of `spin_ms`."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(int(self.spin_ms * CYCLES_PER_MS))
        begin.record()
        start = time.perf_counter()
        run(count)
        host_ms = (time.perf_counter() - start) * 1e3
        launch_bound = begin.query()
        end.record()
        end.synchronize()
        return Sample(begin.elapsed_time(end) / count, host_ms / count, count, launch_bound)

    def spin_for(self, host_ms: float) -> None:
        """Spin for the host's time for all calls of a sample, and a margin."""
        self.spin_ms = min(MOST_SPIN_MS, max(LEAST_SPIN_MS, MARGIN * host_ms))
