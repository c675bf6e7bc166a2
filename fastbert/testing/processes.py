"""Self-checks in a process of their own: a kernel that hangs or destroys the CUDA context harms nobody.

`checked` starts one process for all kernels that it is asked for, and hands over their verdicts as they come.
After a crash or a hang another process checks the rest. `serve` is that process. It may be kept for a while,
because a model uses one op soon after another, and a process takes seconds to start. Before the checks it has
their kernels compiled side by side (`compiling`).

    parent -> argv      the pipe's number, and {"device", "uuid", "gpu": facts, "jobs"} and a request
    parent -> stdin     requests: {"units": [[op, backend, dtype], …], "ahead": what may be compiled then}
    child  -> pipe      {"ready": true}, once the device works there; {"cannot": reason} if it does not
                        {"begin": unit, "key": the verdict's file}, then {"reason", "outcome", …} of a Verdict
                        {"compiled": how many kernels, "of": how many}, while they are compiled
                        {"note": what went wrong with that}, at any time
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
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
from fastbert.testing import checking, compiling, stand_in, verdict_keys, verdicts
from fastbert.testing.verdicts import FAILED, KILLED, SLOWER, Verdict

_CODE = "import sys; sys.path[:1] = []; from fastbert.testing import processes; processes.serve(sys.argv[1:])"
# without the folder in which the user stands: a file there could shadow a module
COMMAND = [sys.executable, "-c", _CODE]
# Limit for one check, compilation and timing included.
SECONDS = 300.0
# Limit until a process begins its first check: it imports torch and wakes the GPU.
START_SECONDS = 180.0
# How long a process that is kept waits for the next request.
KEPT_SECONDS = 20.0
# Types of devices whose first checks run in a process of their own.
DEVICES = ("cuda",)
# Set in the process that checks: it starts no other.
_MARK = "FASTBERT_CHECKING"
# Signals that come from outside: from a user, a job scheduler, or a system that is out of memory.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if os.name == "posix" else ()


_log = logging.getLogger("fastbert")
# Processes that wait for the next request, by their device.
_kept: dict[torch.device, _Child] = {}


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
    ahead: Iterable[Unit] = (),
    jobs: int | None = None,
    keep: bool = False,
    seconds: float = SECONDS,
    waiting: Callable[[float], None] = lambda seconds: None,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Unit, Verdict]]:
    """Check kernels in a process of their own, keep the verdicts on disk, and hand them over as they come.

    Args:
        device: the device to check on, with its index.
        units: the kernels, in the order in which they are checked.
        ahead: kernels that may be asked for next: compiled in spare time, not checked.
        jobs: how many processes may compile at once; None = as the machine allows.
        keep: whether the process waits `KEPT_SECONDS` for the next call.
        seconds: limit for one check.
        waiting: called about once a second with the seconds since the first process was started.
        telling: called with what is done now, such as "2 of 7 kernels are compiled".

    Raises:
        CannotStart: the process cannot use the device, or would check other kernels than those of this
            process. Verdicts that were handed over before stay.
    """
    left, begin, later = list(units), time.monotonic(), list(ahead)

    def told() -> None:
        waiting(time.monotonic() - begin)

    while left:
        child = _kept.pop(device, None)
        if child is None or not child.take(left, later, told):
            child = _Child(device, left, told, later, jobs)
        with child:
            yield from child.results(left, seconds, telling)
            if keep and not left and child.process.poll() is None:
                child.begun, _kept[device] = None, child


@atexit.register
def end_kept() -> None:
    """End the processes that wait for a next request."""
    while _kept:
        _, child = _kept.popitem()
        child.close()


def _uuid(device: torch.device) -> str:
    """What tells GPUs of the same kind apart; "" where torch does not know."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


class _Child:
    """The process that checks."""

    def __init__(
        self,
        device: torch.device,
        units: list[Unit],
        waiting: Callable[[], None],
        ahead: Iterable[Unit] = (),
        jobs: int | None = None,
    ) -> None:
        self.device, self.waiting, self.is_new, self.owner = device, waiting, True, os.getpid()
        self.reading, writing = os.pipe()
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        facts = {"device": str(device), "uuid": _uuid(device), "gpu": stand_in.facts_of(device), "jobs": jobs}
        self.command = [*COMMAND, str(writing), json.dumps(facts | _request(units, ahead))]
        # a process is used again only by calls that would start the same
        self.made_by = COMMAND, dict(os.environ)
        paths = filter(None, [str(verdict_keys.PACKAGE.parent), os.environ.get("PYTHONPATH")])
        try:
            # a session of its own: the compilers that it starts end with it
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
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
        if _kept.get(self.device) is not self:
            self.close()

    def close(self) -> None:
        """End the process, and forget what it has begun."""
        if self.owner != os.getpid():
            # the process of the one that this one was forked from
            return
        self.end()
        with contextlib.suppress(OSError):
            # what it has not read
            self.process.stdin.close()
        os.close(self.reading)
        self.output.close()
        if self.begun is not None:
            # stopped by the user: no fault of the kernel
            verdicts.forget(self.begun)

    def take(self, units: list[Unit], ahead: Iterable[Unit], waiting: Callable[[], None]) -> bool:
        """Ask a process that was kept to check more; False, and it has ended, if it cannot."""
        self.waiting, self.is_new = waiting, False
        request = json.dumps(_request(units, ahead)).encode() + b"\n"
        if self.owner == os.getpid() and self.made_by == (COMMAND, dict(os.environ)):
            with contextlib.suppress(OSError):
                self.process.stdin.write(request)
                self.process.stdin.flush()
                return True
        self.close()
        return False

    def end(self) -> int:
        """End the process and what it has started; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def results(
        self, left: list[Unit], seconds: float, telling: Callable[[str], None] = lambda text: None
    ) -> Iterator[tuple[Unit, Verdict]]:
        """Verdicts as they come, their units removed from `left`, until the process ends."""
        if self.is_new:
            telling("a process that checks is started")
            self.start()
        alive, count = True, len(left)
        while left and alive:
            try:
                message = self.receive(time.monotonic() + START_SECONDS)
                while message is not None and "compiled" in message:
                    telling(f"{message['compiled']} of {message['of']} kernels are compiled")
                    message = self.receive(time.monotonic() + START_SECONDS)
            except TimeoutError:
                raise CannotStart(f"it has done nothing for {START_SECONDS:.0f} s") from None
            if message is None and (len(left) < count or not self.is_new):
                # it ended between two checks: another one checks the rest
                return
            key = verdict_keys.key_of(left[0].op, left[0].backend, self.device, left[0].dtype)
            if message is None or message.get("key") != verdicts.stem(key):
                raise CannotStart(self.ended() if message is None else f"it would check {message['key']}")
            self.begun = key
            telling(f"{left[0].op} of {left[0].backend} in {key['dtype']} is checked")
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
        while True:
            message = self.receive_any(deadline)
            if message is None or "note" not in message:
                return message
            _log.warning("%s: %s", self.device, message["note"])

    def receive_any(self, deadline: float) -> dict | None:
        """`receive`, notes included."""
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


def _request(units: Iterable[Unit], ahead: Iterable[Unit]) -> dict[str, list[list[str]]]:
    """Of a process that checks: what it shall check, and what it may have compiled meanwhile."""
    wanted = {"units": units, "ahead": ahead}
    return {
        name: [[unit.op, unit.backend, str(unit.dtype).removeprefix("torch.")] for unit in each]
        for name, each in wanted.items()
    }


# --- the process that checks --------------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """Be the process that checks.

    Args:
        arguments: the pipe's number, and what is wanted, as JSON.
    """
    writing, wanted = int(arguments[0]), json.loads(arguments[1])
    device = torch.device(wanted["device"])
    # before CUDA is started here, and before there are threads
    compiler = compiling.started(device, wanted.get("gpu"), wanted.get("jobs"), closing=(writing,))
    if compiler is not None:
        compiler.ask(*_compiled_by_triton(wanted))
    channel = os.fdopen(writing, "w")

    def send(message: dict) -> None:
        print(json.dumps(message), file=channel, flush=True)

    _end_with(os.getppid())
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
    while _check_all(wanted["units"], device, compiler, send):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        wanted = _next_request()
        if wanted is None:
            return
        if compiler is not None:
            compiler.ask(*_compiled_by_triton(wanted))


def _compiled_by_triton(wanted: dict) -> list[list]:
    """[what is to be checked, what may be next] of a request, as far as Triton compiles it."""
    requests = wanted["units"], wanted.get("ahead", [])
    return [[unit for unit in units if unit[1] == "triton"] for units in requests]


def _check_all(
    units: list[list[str]],
    device: torch.device,
    compiler: compiling.Compiler | None,
    send: Callable[[dict], None],
) -> bool:
    """Check the kernels of a request; False if nothing more runs on the GPU in this process."""
    if compiler is not None:
        # before the first check, because some of what it times is the host's
        mine = [unit for unit in units if unit[1] == "triton"]
        for note in compiler.wait(mine, lambda compiled, of: send({"compiled": compiled, "of": of})):
            send({"note": note})
        compiler.hold(True)
    for op, backend, name in units:
        dtype, broken = getattr(torch, name), False
        key = verdict_keys.key_of(op, backend, device, dtype)
        send({"begin": [op, backend, name], "key": verdicts.stem(key)})
        try:
            found = checking.check(backend, op, device, dtype)
        except dispatch.BackendError as error:
            found, broken = Verdict(str(error), date=verdicts.now()), True
        facts = {each: getattr(found, each) for each in ("reason", "outcome", "seconds", "date")}
        send(facts | {"times": [list(time) for time in found.times], "broken": broken})
        if broken:
            return False
    if compiler is not None:
        compiler.hold(False)
    return True


def _next_request() -> dict | None:
    """What the parent asks for within `KEPT_SECONDS`; None if it asks for nothing more."""
    ready, _, _ = select.select([sys.stdin], [], [], KEPT_SECONDS)
    line = sys.stdin.readline() if ready else ""
    return json.loads(line) if line else None


def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended, even while a kernel hangs."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="fastbert-watch", daemon=True).start()
