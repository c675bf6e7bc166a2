"""How every benchmark times: warm up, interleave the candidates, take medians.

Three clocks:

- `wall`: host time with the device idle before and after, as a caller waits. The only clock on a CPU.
- `event`: device time between two CUDA events, behind a spin that lasts until the host has enqueued all calls
  (fastbert/testing/device_time.py). The device's time with hidden launches. `launch_bound` counts the
  samples in which launches were not hidden.
- `graph`: the calls captured into one CUDA graph and replayed between two events. The time of small kernels
  without launch gaps.

A sample is the mean over `inner` back-to-back calls; the reported time is the median over samples.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from fastbert.testing.device_time import DeviceClock

Call = Callable[[], object]
Within = Callable[[], contextlib.AbstractContextManager]

CLOCKS = ("wall", "event", "graph")
SAMPLE_MS = {"wall": 1.0, "event": 2.0, "graph": 2.0}  # calls shorter than this are repeated within a sample
MAX_INNER = 1000
ENQUEUE_MS = 3.0  # of a sample on the clock `event`: how long the host may take for its calls


@dataclass(frozen=True)
class Timing:
    """Times of one candidate, in milliseconds per call."""

    median_ms: float
    min_ms: float
    spread: float  # (third quartile - first quartile) / median
    n: int  # samples
    inner: int  # calls within a sample
    clock: str
    # median processor time of the process, all its threads; with one thread, the time without interruptions
    cpu_ms: float | None = None
    samples_ms: tuple[float, ...] = ()  # in the order in which they were taken
    # on the clocks of a GPU: the host's median time to enqueue a call; how many samples waited for the host
    host_ms: float | None = None
    launch_bound: int | None = None

    def facts(self) -> dict:
        """What a row has of it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def summarise(
    samples_ms: Sequence[float], inner: int, clock: str, cpu_samples_ms: Sequence[float] = ()
) -> Timing:
    """Median, minimum and relative interquartile range of samples given in milliseconds per call."""
    if not samples_ms:
        raise ValueError("samples_ms: got no sample, expected at least 1")
    median = statistics.median(samples_ms)
    spread = 0.0
    if len(samples_ms) > 1 and median > 0:
        low, _, high = statistics.quantiles(samples_ms, n=4, method="inclusive")
        spread = (high - low) / median
    cpu_ms = statistics.median(cpu_samples_ms) if cpu_samples_ms else None
    return Timing(median, min(samples_ms), spread, len(samples_ms), inner, clock, cpu_ms, tuple(samples_ms))


class _Sampler:
    """One candidate on one clock. It rotates through several calls, so that no buffer stays in the cache."""

    def __init__(
        self,
        calls: Call | Sequence[Call],
        device: torch.device,
        clock: str,
        warmup: int,
        inner: int | None,
        within: Within = contextlib.nullcontext,
    ):
        self.calls = [calls] if callable(calls) else list(calls)
        self.within = within
        if not self.calls:
            raise ValueError("calls: got an empty sequence, expected at least 1 callable")
        self.device, self.clock, self.next, self.graph = device, clock, 0, None
        self.device_clock = DeviceClock()
        self.times_ms: list[float] = []
        self.cpu_times_ms: list[float] = []
        self.host_times_ms: list[float] = []
        self.launch_bound = 0
        self.host_ms = math.inf
        with within():
            estimate = min((self._timed(1) for _ in range(warmup)), default=SAMPLE_MS[clock])
        self.fewer = inner is None and clock == "event"
        if inner is None:
            inner = min(MAX_INNER, math.ceil(SAMPLE_MS[clock] / max(estimate, 1e-6)))
            if clock == "event" and warmup:
                inner = min(inner, int(ENQUEUE_MS / max(self.host_ms, 1e-6)))
            inner = max(inner, 1 if clock == "wall" else len(self.calls))
        self.inner = inner
        self.sample_ms = estimate * self.inner
        if clock == "event" and warmup:
            self.device_clock.spin_for(self.host_ms * inner)
            self.sample_ms += self.device_clock.spin_ms
        if clock == "graph":
            with within():
                self._capture()

    def _run(self, count: int) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(count):
            self.calls[self.next % len(self.calls)]()
            self.next += 1

    def _capture(self) -> None:
        # Capture needs a side stream that has already run the calls (lazy handles, workspaces).
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._run(len(self.calls))
        torch.cuda.current_stream(self.device).wait_stream(stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self._run(self.inner)
        graph.replay()
        torch.cuda.synchronize(self.device)
        self.graph = graph

    def _timed(self, count: int) -> float:
        """Milliseconds per call over `count` calls (or one replay, which holds `inner` of them)."""
        if self.clock == "wall":
            synchronize(self.device)
            start, cpu_start = time.perf_counter(), time.process_time()
            self._run(count)
            synchronize(self.device)
            self.cpu_ms = (time.process_time() - cpu_start) * 1e3 / count
            return (time.perf_counter() - start) * 1e3 / count
        # to warm up, one try is enough
        found = self.device_clock.once(self._run, count)
        self.host_ms = min(self.host_ms, found.host_ms)
        return found.ms

    def sample(self) -> None:
        with self.within():
            if self.clock == "wall":
                self.times_ms.append(self._timed(self.inner))
            else:
                found = self.device_clock.sample(self._run, self.inner, fewer=self.fewer)
                self.inner = found.count
                self.times_ms.append(found.ms)
                self.host_times_ms.append(found.host_ms)
                self.launch_bound += found.launch_bound
        if self.device.type == "cpu":
            self.cpu_times_ms.append(self.cpu_ms)

    def timing(self) -> Timing:
        found = summarise(self.times_ms, self.inner, self.clock, self.cpu_times_ms)
        if self.clock == "wall":
            return found
        host_ms = statistics.median(self.host_times_ms)
        return replace(found, host_ms=host_ms, launch_bound=self.launch_bound)


def interleave(
    candidates: Mapping[str, Call | Sequence[Call]],
    device: torch.device | str,
    *,
    clock: str | None = None,
    seconds: float = 0.25,
    samples: tuple[int, int] = (5, 50),
    warmup: int = 2,
    pause: float = 0.0,
    inner: int | None = None,
    within: Mapping[str, Within] | None = None,
) -> dict[str, Timing]:
    """Time several candidates interleaved, so that a drift of the machine affects all of them alike.

    Args:
        candidates: name -> callable, or several callables over different buffers to rotate through.
        device: where the calls run; its default clock is `wall` on a CPU and `event` on a GPU.
        clock: `wall`, `event` or `graph`.
        seconds: aim of the measuring time per candidate.
        samples: least and most samples per candidate; the least wins over `seconds`.
        warmup: calls of each candidate before it counts (they also set how often it is repeated); 0 where
            the caller has made one: a sample is then one call, or one of each buffer on a GPU.
        pause: seconds to wait before each sample: idle threads of another library's pool spin for some
            milliseconds after its last call, and would take a core from the next candidate.
        inner: calls within a sample, back to back; as many as make it long enough to time if not given. 1 on
            the clock `wall` is the latency of a single call.
        within: name -> what makes a context that is entered around each sample of a candidate and not timed.

    Returns:
        name -> Timing, in the order given.
    """
    device = torch.device(device)
    clock = clock or ("event" if device.type == "cuda" else "wall")
    if clock not in CLOCKS:
        raise ValueError(f"clock: got {clock!r}, expected one of {', '.join(CLOCKS)}")
    if clock != "wall" and device.type != "cuda":
        raise ValueError(f"clock: got {clock!r} on {device.type}, expected 'wall' there")
    around = within or {}
    samplers = {
        name: _Sampler(calls, device, clock, warmup, inner, around.get(name, contextlib.nullcontext))
        for name, calls in candidates.items()
    }
    wanted = {
        name: min(samples[1], max(samples[0], int(seconds * 1e3 / max(sampler.sample_ms, 1e-6))))
        for name, sampler in samplers.items()
    }
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(max(wanted.values(), default=0)):
            for name, sampler in samplers.items():
                if turn < wanted[name]:
                    time.sleep(pause)
                    sampler.sample()
    finally:
        if collecting:
            gc.enable()
    return {name: sampler.timing() for name, sampler in samplers.items()}


def measure(calls: Call | Sequence[Call], device: torch.device | str, **options) -> Timing:
    return interleave({"": calls}, device, **options)[""]


def synchronize(device: torch.device | str) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device | str) -> float | torch.cuda.Event:
    """A mark in the device's work; on a GPU the host does not wait for it."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Between two marks; a GPU must have passed the second one."""
    return (end - begin) * 1e3 if isinstance(begin, float) else begin.elapsed_time(end)


def cache_bytes(device: torch.device | str) -> int:
    """Size of the last-level cache: L2 on a GPU, the largest of core 0 on a CPU (32 MiB if not told)."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1:] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=32 << 20)


def memory_bytes(device: torch.device) -> int:
    """All memory of the device (of the machine, for a CPU)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rotations(bytes_per_set: int, device: torch.device | str, limit: int = 16) -> int:
    """How many sets of buffers are twice as large as the last-level cache (at most `limit`)."""
    return max(1, min(limit, math.ceil(2 * cache_bytes(device) / max(1, bytes_per_set))))
