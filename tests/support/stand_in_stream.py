"""A stream of a GPU in simulated time, for what measures with events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastbert.testing import device_time


class Stream:
    """A host and a device that count milliseconds.

    Args:
        cycles_per_ms: cycles of the device's clock per millisecond.
        room: kernels that the queue holds; the host waits for more.
    """

    def __init__(self, cycles_per_ms: float = 2e6, room: int = 1000):
        self.now = self.free_at = 0.0
        self.cycles_per_ms, self.room = cycles_per_ms, room
        self.ends: list[float] = []
        self.spins: list[float] = []

    def kernel(self, host_ms: float, device_ms: float) -> None:
        """Enqueue a kernel, which takes the host and the device so long."""
        self.now += host_ms
        if len(self.ends) >= self.room:
            self.now = max(self.now, self.ends[-self.room])
        self.free_at = max(self.free_at, self.now) + device_ms
        self.ends.append(self.free_at)

    def sleep(self, cycles: int) -> None:
        self.spins.append(cycles / self.cycles_per_ms)
        self.free_at = max(self.free_at, self.now) + self.spins[-1]

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        event = SimpleNamespace(at=None)

        def record():
            event.at = max(self.free_at, self.now)

        def synchronize():
            self.now = max(self.now, event.at)

        event.record, event.synchronize = record, synchronize
        event.query = lambda: self.now >= event.at
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Stream:
        """Put it in the place of torch.cuda's, and of the host's clock."""
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(device_time, "time", SimpleNamespace(perf_counter=lambda: self.now * 1e-3))
        return self
