"""The Triton kernels that self-checks are about to need, compiled side by side before the checks.

The process that checks forks another one before it starts CUDA. That one launches the cases of a check in a
stand-in of the GPU (`stand_in`), which tells it every kernel, and has each compiled by a fork of its own. So
no process but the one that checks holds memory of the GPU. What is compiled lies in Triton's cache on the
disk, under the keys that the check looks for.

    check   -> compiler     {"units": [[op, backend, dtype], …], "ahead": […]}: compile these, then those
                            {"hold": whether}: begin nothing of what is ahead, because something is timed
    compiler -> check       {"done": unit}; {"compiled": how many kernels, "of": that are wanted}
                            {"note": what went wrong}

Nothing depends on it: a kernel that is not in the cache is compiled by the check, at its first launch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert.runtime import dispatch
from fastbert.testing import error_rule, speed, stand_in

# Memory of one process that compiles, beside what it shares with the others.
PROCESS_BYTES = 300 << 20
MOST_PROCESSES = 32
# How long to wait while no kernel is done, and the limit for one kernel.
SECONDS = 90.0
KERNEL_SECONDS = 60.0
_POLL_SECONDS = 0.005
# How much slower what is ahead gets a core than anything else.
_NICE = 15


class Unit(NamedTuple):
    """A kernel in a dtype, by the dtype's name."""

    op: str
    backend: str
    dtype: str


def processes_here() -> int:
    """How many processes may compile at once: by cores, their quota, and memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))
    free = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text()
        free.append(int(text.partition("MemAvailable:")[2].split()[0]) << 10)
    with contextlib.suppress(OSError, ValueError):
        most, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        free.append(int(most) - int(used))
    fitting = min(free, default=1 << 40) // PROCESS_BYTES
    return max(1, min(cores, fitting, MOST_PROCESSES))


# --- the process that checks --------------------------------------------------------------------------------


def started(
    device: torch.device, facts: Iterable[Any] | None, count: int | None = None, closing: Iterable[int] = ()
) -> Compiler | None:
    """Fork the process that has kernels compiled; None where that is not worth it, or cannot be.

    Args:
        device: "cuda" with its index.
        facts: `stand_in.Facts` of the device; None where it is no GPU.
        count: how many processes may compile at once; None = `processes_here()`.
        closing: files that it must not hold open.
    """
    count = processes_here() if count is None else count
    # a process that has started CUDA cannot be forked
    if facts is None or count < 2 or not hasattr(os, "fork") or torch.cuda.is_initialized():
        return None
    facts = stand_in.Facts(*facts)
    wanted, requests = os.pipe()
    answers, answering = os.pipe()
    with warnings.catch_warnings():
        # numpy's threads are none of ours
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for each in (requests, answers, *closing):
                os.close(each)
            _be_quiet()
            status = _Server(device, facts, count, wanted, answering).run()
        finally:
            os._exit(status)
    os.close(wanted)
    os.close(answering)
    return Compiler(pid, requests, answers)


def _be_quiet() -> None:
    """Settings of a process that only compiles: no GPU, no threads, no verdicts, and nothing printed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in (0, 1, 2):
        os.dup2(nothing, each)
    # PyTorch's autograd starts threads for each GPU that it sees
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "FASTBERT_CACHE": ""}
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Compiler:
    """The process that has kernels compiled, seen from the one that checks.

    Attributes:
        done: the checks whose kernels are compiled.
        alive: whether it may compile more.
    """

    def __init__(self, pid: int, requests: int, answers: int) -> None:
        self.pid, self.requests, self.answers = pid, requests, answers
        self.pending, self.done, self.alive = b"", set(), True

    def ask(self, units: Iterable[tuple[str, str, str]], ahead: Iterable[tuple[str, str, str]] = ()) -> None:
        """Have the kernels of these checks compiled, and in spare time those of others."""
        self._send({"units": [list(unit) for unit in units], "ahead": [list(unit) for unit in ahead]})

    def hold(self, whether: bool) -> None:
        """Begin nothing of what is ahead until `hold(False)`."""
        self._send({"hold": whether})

    def wait(
        self,
        units: Iterable[tuple[str, str, str]],
        progress: Callable[[int, int], None] = lambda compiled, of: None,
        seconds: float = SECONDS,
    ) -> list[str]:
        """Wait until the kernels of these checks are compiled; returns what went wrong.

        If nothing comes for `seconds`, or the process has ended, the checks compile what is missing.

        Args:
            units: what `ask` has asked for.
            progress: called with how many kernels are compiled, and of how many.
            seconds: limit without progress.
        """
        left, notes = {Unit(*unit) for unit in units}, []
        while self.alive and left - self.done:
            ready, _, _ = select.select([self.answers], [], [], seconds)
            if not ready:
                notes.append(f"no kernel was compiled for {seconds:.0f} s: the checks compile the rest")
                self.alive = False
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            notes += self._read(progress)
            if not self.alive:
                notes.append(f"kernels are compiled one after the other: {self._ended()}")
        return notes

    def _send(self, message: dict) -> None:
        if self.alive:
            try:
                os.write(self.requests, json.dumps(message).encode() + b"\n")
            except OSError:
                # `wait` says so
                return

    def _read(self, progress: Callable[[int, int], None]) -> list[str]:
        """The notes in what has come."""
        notes, chunk = [], os.read(self.answers, 1 << 16)
        self.alive = bool(chunk)
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if "note" in message:
                notes.append(message["note"])
            elif "compiled" in message:
                progress(message["compiled"], message["of"])
            else:
                self.done.add(Unit(*message["done"]))
        return notes

    def _ended(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return "the process that compiles ended by " + (
            signal.Signals(-code).name if code < 0 else f"status {code}"
        )


# --- the process that has kernels compiled ------------------------------------------------------------------


class Launch(NamedTuple):
    """A launch that stands for all that need the same compiled kernel."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    config: dict[str, Any]

    def compile(self) -> None:
        """Compile it into Triton's cache, as its launch would; nothing is launched."""
        self.kernel.warmup(*self.args, grid=self.grid, **self.config, enable_fp_fusion=True)


class Recorder:
    """The kernels that checks launch, each of them once.

    Attributes:
        problems: what could not be found out.
    """

    def __init__(self, device: torch.device, facts: stand_in.Facts) -> None:
        from triton import knobs

        stand_in.use_driver(facts)
        self.device, self.facts, self.knobs = device, facts, knobs
        self.found: dict[tuple[str, str], Launch] = {}
        self.launched: dict[tuple[str, str], None] = {}
        self.last: tuple[str, str] | None = None
        self.problems: list[str] = []

    def record(self, unit: Unit) -> list[tuple[str, str]]:
        """Keys of all kernels that the check of a unit launches, in their order; `found` has the launches."""
        dtype = getattr(torch, unit.dtype)
        backward = dispatch.has_backward(unit.backend, unit.op) and dtype.is_floating_point
        calls = [(case, backward) for case in error_rule.checked_cases(unit.op, self.device.type)]
        for case, training in speed.timed_calls(unit.op, unit.backend, self.device.type, dtype):
            if backward or not training:
                calls.append((case, training))
        self.launched, hook = {}, self.knobs.runtime.jit_cache_hook
        self.knobs.runtime.jit_cache_hook = self._seen
        try:
            with stand_in.gpu(self.device, self.facts, self._launch):
                for case, backward in calls:
                    try:
                        _call(case, unit, dtype, self.device, backward)
                    except Exception as error:
                        self.problems.append(
                            f"{unit.op} {unit.dtype} {case.id}: which kernels it launches is not known "
                            f"before its check: {type(error).__name__}: {error}"[:500]
                        )
        finally:
            self.knobs.runtime.jit_cache_hook = hook
        return list(self.launched)

    def _launch(self, kernel, grid, args, config) -> None:
        """In the place of a launch: Triton's own key of it, by a compilation that `_seen` refuses."""
        args = tuple(stand_in.Pointer(a) if isinstance(a, torch.Tensor) else a for a in args)
        launch, self.last = Launch(kernel, grid, args, config), None
        launch.compile()
        if self.last is not None:
            self.found.setdefault(self.last, launch)
            # in their order, each of them once
            self.launched[self.last] = None

    def _seen(self, key=None, fn=None, **_) -> bool:
        """Triton's hook before it compiles; True: it shall not."""
        self.last = f"{fn.module}.{fn.name}", str(key)
        return True


def _call(
    case: error_rule.Case, unit: Unit, dtype: torch.dtype, device: torch.device, backward: bool
) -> None:
    """What a check does with a case, as far as its launches go."""
    inputs = error_rule.with_grad(case.inputs(dtype, device), case.grad_inputs if backward else (), None)
    with dispatch.trial(**{unit.op: unit.backend}), torch.set_grad_enabled(backward):
        outputs = case.call(**inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        heads = [o for o in outputs if o.requires_grad]
        wanted = [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        if heads and wanted:
            douts = [torch.empty(o.shape, dtype=o.dtype, device=device) for o in heads]
            torch.autograd.grad(heads, wanted, douts, allow_unused=True)


class _Server:
    """Has kernels compiled, each in a fork of its own, as many at once as there are cores."""

    def __init__(
        self, device: torch.device, facts: stand_in.Facts, count: int, wanted: int, answering: int
    ) -> None:
        self.count, self.wanted, self.answering = count, wanted, answering
        self.recorder = Recorder(device, facts)
        self.pending, self.warm, self.held = b"", False, False
        # units whose kernels are to be recorded, now and in spare time; kernels to compile, as well
        self.now: deque[Unit] = deque()
        self.later: deque[Unit] = deque()
        self.first: deque[tuple[str, str]] = deque()
        self.ahead: deque[tuple[str, str]] = deque()
        # unit -> its kernels, once they are recorded
        self.kernels: dict[Unit, list[tuple[str, str]]] = {}
        # kernels that are compiled or refused; those that were asked for; unit -> what it still waits for
        self.over: set[tuple[str, str]] = set()
        self.asked: set[tuple[str, str]] = set()
        self.missing: dict[Unit, set[tuple[str, str]]] = {}
        # process -> (kernel, when it must have ended)
        self.running: dict[int, tuple[tuple[str, str], float]] = {}

    def run(self) -> int:
        """Serve until the process that checks has ended; the exit status."""
        if self.recorder.knobs.runtime.interpret:
            return 0
        while True:
            self._begin()
            if self.now:
                # while the first kernels are compiled
                self._take(self.now.popleft())
            pause = 0.0 if self.now else _POLL_SECONDS if self._busy() else None
            ready, _, _ = select.select([self.wanted], [], [], pause)
            if ready and not self._read():
                for pid in self.running:
                    os.kill(pid, signal.SIGKILL)
                return 0
            self._reap()

    def _busy(self) -> bool:
        spare = not self.held and (self.later or self.ahead)
        return bool(self.running or self.first or spare)

    def _read(self) -> bool:
        """Take new requests; whether there may be more."""
        chunk = os.read(self.wanted, 1 << 16)
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        for message in map(json.loads, lines):
            if "hold" in message:
                self.held = message["hold"]
                continue
            self.now += (Unit(*unit) for unit in message["units"])
            for unit in (Unit(*unit) for unit in message["ahead"]):
                if unit not in self.kernels and unit not in self.later:
                    self.later.append(unit)
        return bool(chunk)

    def _take(self, unit: Unit) -> None:
        """Put the kernels of a unit that was asked for before all others."""
        keys = self._record(unit)
        self.missing[unit] = set(keys) - self.over
        self.asked |= set(keys)
        running = {key for key, _ in self.running.values()}
        self.first += [key for key in keys if key not in self.over | running]
        self._tell()

    def _record(self, unit: Unit) -> list[tuple[str, str]]:
        """The kernels of a unit."""
        if unit in self.kernels:
            return self.kernels[unit]
        self.kernels[unit] = keys = self.recorder.record(unit)
        for problem in self.recorder.problems:
            self._note(problem)
        self.recorder.problems.clear()
        return keys

    def _begin(self) -> None:
        """Begin to compile as long as there are kernels and cores."""
        while len(self.running) < self.count:
            spare = not self.first and not self.now and not self.held
            if spare and not self.ahead and self.later:
                self.ahead += self._record(self.later.popleft())
            queue = self.first or (self.ahead if spare else None)
            if not queue:
                if spare and self.later:
                    continue
                return
            key = queue.popleft()
            if key in self.over or key in (each for each, _ in self.running.values()):
                continue
            launch = self.recorder.found[key]
            if not self.warm:
                # here, so that the forks need not load again what any compilation loads
                self.warm = True
                self._compile(key, launch)
                self._end(key)
                continue
            # a hash of its source, which the fork would make anew
            launch.kernel.cache_key  # noqa: B018
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    if spare:
                        os.nice(_NICE)
                    status = self._compile(key, launch)
                finally:
                    os._exit(status)
            self.running[pid] = key, time.monotonic() + KERNEL_SECONDS

    def _compile(self, key: tuple[str, str], launch: Launch) -> int:
        """Compile a kernel here; the exit status of a fork."""
        knobs = self.recorder.knobs
        try:
            try:
                launch.compile()
            except Exception:
                # what lies in the cache may be damaged: write it anew
                with knobs.compilation.scope():
                    knobs.compilation.always_compile = True
                    launch.compile()
        except BaseException as error:
            self._note(f"{key[0]} was not compiled before its check: {type(error).__name__}: {error}"[:1000])
            return 1
        return 0

    def _reap(self) -> None:
        """Take notice of forks that have ended, and end those that hang."""
        for pid, (key, end) in list(self.running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                continue
            del self.running[pid]
            code = os.waitstatus_to_exitcode(status)
            if code < 0:
                name = signal.Signals(-code).name
                self._note(f"{key[0]} was not compiled before its check: its process ended by {name}")
            self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        self.over.add(key)
        if key in self.asked:
            self._answer({"compiled": len(self.over & self.asked), "of": len(self.asked)})
        for missing in self.missing.values():
            missing.discard(key)
        self._tell()

    def _tell(self) -> None:
        """Name the units that wait for nothing more."""
        for unit in [unit for unit, missing in self.missing.items() if not missing]:
            del self.missing[unit]
            self._answer({"done": list(unit)})

    def _note(self, text: str) -> None:
        self._answer({"note": text})

    def _answer(self, message: dict) -> None:
        # one write of less than a pipe's buffer is never mixed with another process's
        os.write(self.answering, json.dumps(message).encode() + b"\n")
