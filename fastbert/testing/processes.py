"""Self-checks in a process of their own: a kernel that hangs or destroys the CUDA context harms nobody.

`checked` starts one process for all kernels that it is asked for, and hands over their verdicts as they come.
After a crash or a hang another process checks the rest. `serve` is that process.

    parent -> argv      the pipe's number, and {"device", "uuid", "units": [[op, backend, dtype], …]}
    child  -> pipe      {"ready": true}, once the device works there; {"cannot": reason} if it does not
                        {"begin": unit, "key": the verdict's file}, then {"reason", "outcome", …} of a Verdict
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple

import torch

from fastbert.runtime import dispatch
from fastbert.testing import checking, verdict_keys, verdicts
from fastbert.testing.verdicts import FAILED, KILLED, SLOWER, Verdict

_CODE = "import sys; sys.path[:1] = []; from fastbert.testing import processes; processes.serve(sys.argv[1:])"
# without the folder in which the user stands: a file there could shadow a module
COMMAND = [sys.executable, "-c", _CODE]
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


class Unit(NamedTuple):
    """A kernel in a dtype."""

    op: str
    backend: str
    dtype: torch.dtype


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
) -> Iterator[tuple[Unit, Verdict]]:
    """Check kernels in a process of their own, keep the verdicts on disk, and hand them over as they come.

    Args:
        device: the device to check on, with its index.
        units: the kernels, in the order in which they are checked.
        seconds: limit for one check.
        waiting: called about once a second with the seconds since the first process was started.

    Raises:
        CannotStart: the process cannot use the device, or would check other kernels than those of this
            process. Verdicts that were handed over before stay.
    """
    left, begin = list(units), time.monotonic()
    while left:
        with _Child(device, left, lambda: waiting(time.monotonic() - begin)) as child:
            yield from child.results(left, seconds)


def _uuid(device: torch.device) -> str:
    """What tells GPUs of the same kind apart; "" where torch does not know."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class _Child:
    """The process that checks."""

    def __init__(self, device: torch.device, units: list[Unit], waiting: Callable[[], None]) -> None:
        self.device, self.waiting = device, waiting
        self.reading, writing = os.pipe()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        names = [[unit.op, unit.backend, str(unit.dtype).removeprefix("torch.")] for unit in units]
        wanted = {"device": str(device), "uuid": _uuid(device), "units": names}
        paths = filter(None, [str(verdict_keys.PACKAGE.parent), os.environ.get("PYTHONPATH")])
        try:
            # a session of its own: the compilers that it starts end with it
            self.process = subprocess.Popen(
                [*COMMAND, str(writing), json.dumps(wanted)],
                stdin=subprocess.DEVNULL,
                stdout=self.output,
                stderr=self.output,
                pass_fds=(writing,),
                start_new_session=True,
                env=os.environ | {_MARK: "1", "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            os.close(self.reading)
            self.output.close()
            raise CannotStart(f"no process can be started: {error}") from error
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

    def results(self, left: list[Unit], seconds: float) -> Iterator[tuple[Unit, Verdict]]:
        """Verdicts as they come, their units removed from `left`, until the process ends."""
        self.start()
        alive, count = True, len(left)
        while left and alive:
            try:
                message = self.receive(time.monotonic() + START_SECONDS)
            except TimeoutError:
                raise CannotStart(f"it has done nothing for {START_SECONDS:.0f} s") from None
            if message is None and len(left) < count:
                # it ended between two checks: another one checks the rest
                return
            key = verdict_keys.key_of(left[0].op, left[0].backend, self.device, left[0].dtype)
            if message is None or message.get("key") != verdicts.stem(key):
                raise CannotStart(self.ended() if message is None else f"it would check {message['key']}")
            self.begun = key
            verdict, alive = self.verdict(key, seconds)
            self.begun = None
            yield left.pop(0), verdict

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

    def verdict(self, key: verdict_keys.Key, seconds: float) -> tuple[Verdict, bool]:
        """(the verdict on the kernel whose check has begun, whether the process goes on)."""
        begin = time.monotonic()
        try:
            message = self.receive(begin + seconds)
        except TimeoutError:
            message = {"problem": f"no verdict within {seconds:.0f} s: it hangs"}
        if message is None:
            message = {"problem": self.ended(), "outside": -self.end() in _FROM_OUTSIDE}
        if "problem" not in message:
            kept = verdicts.load(key)
            facts = {name: message[name] for name in ("reason", "seconds", "date", "outcome")}
            found = Verdict(**facts, times=verdicts.times_of(message["times"]))
            if found.passed and kept is not None and kept.outcome in (FAILED, SLOWER):
                # another process has found that in the meantime
                found = kept
            return found, not message["broken"]
        self.end()
        found = Verdict(message["problem"], time.monotonic() - begin, verdicts.now())
        if message.get("outside"):
            # its marker counts how often; without a folder this time is the first
            found = verdicts.load(key) or replace(found, outcome=KILLED, deaths=1)
        else:
            # this removes the marker, too
            verdicts.forget(key)
            verdicts.store(key, found)
        return found, False

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


# --- the process that checks --------------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Be the process that checks.

    Args:
        arguments: the pipe's number, and what is wanted, as JSON.
    """
    channel, wanted = os.fdopen(int(arguments[0]), "w"), json.loads(arguments[1])

    def send(message: dict) -> None:
        print(json.dumps(message), file=channel, flush=True)

    _end_with(os.getppid())
    device = torch.device(wanted["device"])
    try:
        # fails where the device admits one process only
        torch.zeros(1, device=device).add_(1).cpu()
    except Exception as error:
        send({"cannot": f"{type(error).__name__}: {error}"})
        return
    if _uuid(device) != wanted["uuid"]:
        send({"cannot": f"{device} is another device there"})
        return
    send({"ready": True})
    for op, backend, name in wanted["units"]:
        dtype, broken = getattr(torch, name), False
        key = verdict_keys.key_of(op, backend, device, dtype)
        send({"begin": [op, backend, name], "key": verdicts.stem(key)})
        try:
            found = checking.check(backend, op, device, dtype)
        except dispatch.BackendError as error:
            # nothing more runs on the GPU in this process
            found, broken = Verdict(str(error), date=verdicts.now()), True
        facts = {each: getattr(found, each) for each in ("reason", "outcome", "seconds", "date")}
        send(facts | {"times": [list(time) for time in found.times], "broken": broken})
        if broken:
            return


def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended, even while a kernel hangs."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="fastbert-watch", daemon=True).start()
