"""`fastbert warmup`: run the self-checks that first use on a device would run, and keep their verdicts.

Each op is checked in a process of its own, one dtype after the other, each with a time limit. A kernel that
crashes that process or hangs gets a failed verdict like any other, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO

import torch

from fastbert.runtime import dispatch
from fastbert.testing import proving, verdict_keys, verdicts
from fastbert.testing.verdicts import Verdict

COMMAND = [sys.executable, "-m", "fastbert.testing.warmup"]
# Limit for one check, compilation included.
SECONDS = 300.0
# Limit until a process begins its first check: it imports torch and wakes the GPU.
START_SECONDS = 180.0


@dataclass(frozen=True)
class Result:
    """The verdict on one kernel.

    Attributes:
        reason: None where it passed.
        seconds: how long the check took, compilation included.
        kept: whether the verdict was on disk already.
        date: of the check, UTC.
    """

    op: str
    backend: str
    dtype: str
    device: str
    passed: bool
    reason: str | None
    seconds: float
    kept: bool
    date: str


def wanted(
    device: torch.device, ops: Iterable[str] | None = None, dtypes: Iterable[torch.dtype] | None = None
) -> list[tuple[str, str, list[torch.dtype]]]:
    """(op, backend, dtypes) of the kernels that must pass a self-check before they serve on the device."""
    found: dict[tuple[str, str], list[torch.dtype]] = {}
    for op in ops or dispatch.OPS:
        for backend, dtype in proving.to_check(op, device.type):
            if dtypes is None or dtype in dtypes:
                found.setdefault((op, backend), []).append(dtype)
    return [(op, backend, each) for (op, backend), each in found.items()]


def run(
    device: torch.device,
    ops: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    *,
    again: bool = False,
    seconds: float = SECONDS,
) -> Iterator[Result]:
    """Check kernels and keep the verdicts, one result at a time.

    Args:
        device: the device to check on; "cuda" with its index.
        ops, dtypes: check only these; None = all.
        again: check also the kernels that have a verdict.
        seconds: limit for one check.
    """
    for op, backend, each in wanted(device, ops, dtypes):
        keys = {dtype: verdict_keys.key_of(op, backend, device, dtype) for dtype in each}
        left = []
        for dtype, key in keys.items():
            if again:
                verdicts.forget(key)
            found = None if again else verdicts.load(key)
            if found is None:
                left.append(dtype)
            else:
                yield _result(op, backend, dtype, device, found)
        while left:
            with _Child(op, backend, device, left) as child:
                yield from child.results(keys, left, seconds)


def _result(op: str, backend: str, dtype: torch.dtype, device: torch.device, found: Verdict) -> Result:
    name = str(dtype).removeprefix("torch.")
    facts = found.passed, found.reason, found.seconds, found.kept, found.date
    return Result(op, backend, name, str(device), *facts)


class _Child:
    """The process that checks one op in several dtypes."""

    def __init__(self, op: str, backend: str, device: torch.device, dtypes: list[torch.dtype]) -> None:
        self.what = op, backend, device
        self.reading, writing = os.pipe()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        try:
            # a session of its own: the compilers that it starts end with it
            self.process = subprocess.Popen(
                [*COMMAND, str(writing), str(device), op, backend, *names],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                pass_fds=(writing,),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self.pending = b""
        # the kernel that is being checked
        self.begun: verdict_keys.Key | None = None

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *args: object) -> None:
        self.end()
        os.close(self.reading)
        self.output.close()
        if self.begun is not None:
            # stopped by the user: no fault of the kernel
            verdicts.forget(self.begun)

    def end(self) -> int:
        """End the process and what it has started; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def results(
        self, keys: dict[torch.dtype, verdict_keys.Key], left: list[torch.dtype], seconds: float
    ) -> Iterator[Result]:
        """Results as they come, removed from `left`, until the process ends."""
        checked = 0
        while left:
            begin = time.monotonic()
            try:
                message = self.receive(begin + START_SECONDS)
                if message is not None:
                    # the check begins
                    self.begun, begin = keys[left[0]], time.monotonic()
                    message = self.receive(begin + seconds)
                problem = None if message is not None else self.ended()
            except TimeoutError:
                message, problem = None, f"no verdict within {time.monotonic() - begin:.0f} s: it hangs"
            if message is not None:
                found = Verdict(message["reason"], message["seconds"], message["date"])
                checked += 1
            elif self.begun is not None:
                self.end()
                found = Verdict(problem, time.monotonic() - begin, verdicts.now())
                # this removes the marker, too
                verdicts.forget(self.begun)
                verdicts.store(self.begun, found)
            elif checked:
                # it ended between two checks, as after a broken CUDA context
                return
            else:
                # it ended before its first check: the machine's fault, so nothing is kept
                found = Verdict(f"not checked: {problem}", time.monotonic() - begin, verdicts.now())
                for dtype in left:
                    yield _result(*self.what[:2], dtype, self.what[2], found)
                left.clear()
                return
            self.begun = None
            yield _result(*self.what[:2], left.pop(0), self.what[2], found)
            if message is None:
                # a new process checks the rest
                return

    def receive(self, deadline: float) -> dict | None:
        """The next message; None where the process has ended. Raises TimeoutError at the deadline."""
        while b"\n" not in self.pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready, _, _ = select.select([self.reading], [], [], min(remaining, 1.0))
            if ready:
                chunk = os.read(self.reading, 1 << 16)
                if not chunk:
                    return None
                self.pending += chunk
            elif self.process.poll() is not None:
                # what it has started may hold the pipe open
                return None
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def ended(self) -> str:
        """How the process ended, with the last line it printed."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            # it has closed the pipe and goes on
            code = self.end()
        known = {number.value: number.name for number in signal.Signals}
        text = "its process ended by " + (
            known.get(-code, f"signal {-code}") if code < 0 else f"status {code}"
        )
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 2000))
        said = self.output.read().decode(errors="replace").strip().splitlines()
        return text + (f": {said[-1][:300]}" if said else "")


def serve(arguments: list[str]) -> None:
    """Be the process that checks.

    Args:
        arguments: the pipe's number, the device, the op, the backend, and the dtypes.
    """
    channel, device, op, backend, *names = arguments

    def send(message: dict) -> None:
        # short enough to be written in one piece
        os.write(int(channel), (json.dumps(message) + "\n").encode())

    for name in names:
        send({"begin": name})
        try:
            found = proving.check(backend, op, torch.device(device), getattr(torch, name))
        except dispatch.BackendError as error:
            # nothing more runs on the GPU in this process
            send({"reason": str(error), "seconds": 0.0, "date": verdicts.now()})
            return
        send({"reason": found.reason, "seconds": found.seconds, "date": found.date})


if __name__ == "__main__":
    serve(sys.argv[1:])
