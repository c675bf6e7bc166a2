"""Self-checks in a process of their own: a kernel that hangs or destroys the CUDA context harms nobody.

`checked` starts one process (`worker`) for all kernels that it is asked for, and hands over their verdicts as
they come. After a crash or a hang, which costs one kernel, a new process checks the rest.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from fastbert.testing import verdict_keys, verdicts, worker
from fastbert.testing.verdict_keys import Unit, name_of
from fastbert.testing.verdicts import DIED, FAILED, KILLED, SLOWER, Verdict

# -P: without the folder in which the user stands; a file there could shadow a module
COMMAND = [sys.executable, "-P", "-m", "fastbert.testing.worker"]
# Limit for one check, compilation and timing included.
SECONDS = 300.0
# Limit until a process begins its first check: it imports torch and wakes the GPU.
START_SECONDS = 180.0
# Types of devices whose first checks run in a process of their own.
DEVICES = ("cuda",)
# Set in the process that checks: it starts no other.
_MARK = "FASTBERT_CHECKING"
# Signals that come from outside: from a user, a job scheduler, or a system that is out of memory.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if os.name == "posix" else ()


class CannotStart(RuntimeError):
    """No process of its own can check this device's kernels for this process."""


def possible(device: torch.device) -> bool:
    """Whether another process can be tried at all.

    Not under Windows, in programs that embed or freeze Python, or in a process that checks.
    """
    python = re.match(r"(python|pypy)[0-9.]*$", Path(sys.executable or "").name)
    frozen = getattr(sys, "frozen", False)
    return bool(
        device.type in DEVICES and os.name == "posix" and python and not frozen and _MARK not in os.environ
    )


def checked(
    device: torch.device,
    units: Iterable[Unit],
    *,
    seconds: float = SECONDS,
    waiting: Callable[[float], None] = lambda seconds: None,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Unit, Verdict]]:
    """Check kernels in a process of their own, keep the verdicts on disk, and hand them over as they come.

    Args:
        device: the device to check on, with its index.
        units: the kernels, in the order in which they are checked.
        seconds: limit for one check.
        waiting: called about once a second with the seconds since the first process was started.
        telling: called with what is done now, such as "linear of triton in float32 is checked".

    Raises:
        CannotStart: the process cannot use the device, or would check other kernels than those of this
            process. Verdicts that were handed over before stay.
    """
    left, begin = list(units), time.monotonic()
    while left:
        telling("a process that checks is started")
        with _Worker(device, left, lambda: waiting(time.monotonic() - begin)) as process:
            process.start()
            alive = True
            while left and alive:
                telling(f"{left[0].op} of {left[0].backend} in {name_of(left[0].dtype)} is checked")
                verdict, alive = process.verdict(left[0], seconds)
                yield left.pop(0), verdict


class _Worker:
    """The process that checks, seen from the one that waits for it."""

    def __init__(self, device: torch.device, units: list[Unit], waiting: Callable[[], None]) -> None:
        self.device, self.waiting, self.pending = device, waiting, b""
        # what was kept before its checks
        self.before = {unit: verdicts.load(self._key(unit)) for unit in units}
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        rows = [
            [unit.op, unit.backend, name_of(unit.dtype), verdicts.stem(self._key(unit))] for unit in units
        ]
        request = json.dumps({"device": str(device), "uuid": worker.uuid_of(device), "units": rows})
        paths = filter(None, [str(verdict_keys.PACKAGE.parent), os.environ.get("PYTHONPATH")])
        try:
            # a session of its own: the compilers that it starts end with it
            self.process = subprocess.Popen(
                [*COMMAND, request],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self.output,
                start_new_session=True,
                env=os.environ | {_MARK: "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            self.output.close()
            raise CannotStart(f"no process can be started: {error}") from error

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *args: object) -> None:
        self.end()
        self.process.stdout.close()
        self.output.close()

    def _key(self, unit: Unit) -> verdict_keys.Key:
        return verdict_keys.key_of(unit.op, unit.backend, self.device, unit.dtype)

    def end(self) -> int:
        """End the process and what it has started; returns its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def start(self) -> None:
        """Wait until the process has used the device. Raises CannotStart."""
        try:
            message = self.receive(time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise CannotStart(f"it has not begun within {START_SECONDS:.0f} s") from None
        if message is None:
            raise CannotStart(self.ended())
        if "ready" not in message:
            raise CannotStart(message["cannot"])

    def verdict(self, unit: Unit, seconds: float) -> tuple[Verdict, bool]:
        """(the next kernel's verdict, whether the process has not ended)."""
        key, begin, before = self._key(unit), time.monotonic(), self.before[unit]
        message, hangs = None, False
        try:
            message = self.receive(begin + seconds)
        except TimeoutError:
            hangs = True
        except BaseException:
            # stopped by the user: no fault of the kernel
            self.end()
            verdicts.settle(key, before)
            raise
        if message is not None:
            found, kept = verdicts.verdict_of(message), verdicts.load(key)
            if found.passed and kept is not None and kept.outcome in (FAILED, SLOWER):
                # another process has found that in the meantime
                found = kept
            return found, not message["broken"]
        problem = f"no verdict within {seconds:.0f} s: it hangs" if hangs else self.ended()
        found = Verdict(problem, time.monotonic() - begin, verdicts.now())
        # this ends what it has started, too
        if -self.end() in _FROM_OUTSIDE and not hangs:
            deaths = 1 + (before.deaths if before else 0)
            found = replace(found, reason=DIED, outcome=KILLED, deaths=deaths)
        verdicts.store(key, found)
        return found, False

    def receive(self, deadline: float) -> dict | None:
        """The next line; None where the process has ended. Raises TimeoutError at the deadline."""
        reading = self.process.stdout.fileno()
        while b"\n" not in self.pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready, _, _ = select.select([reading], [], [], min(remaining, 1.0))
            if ready:
                chunk = os.read(reading, 1 << 16)
                if not chunk:
                    return None
                self.pending += chunk
            elif self.process.poll() is not None:
                # what it has started may hold the pipe open
                return None
            self.waiting()
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
