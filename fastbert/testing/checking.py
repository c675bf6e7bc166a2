"""A kernel's self-check: the error rule on a few Cases, then its times on a GPU.

`checked` checks kernels in a separate process, so that a kernel that hangs or destroys the CUDA context
leaves this process whole, and yields the verdicts one by one. After a crash or a hang, which costs one
kernel, a new process checks the rest. `check` runs a check in this process.

The separate process is `python -P -m fastbert.testing.checking REQUEST`. REQUEST is JSON: {"device", "uuid",
"units": [[op, backend, dtype, the verdict's file], …]}. It prints one JSON object per line: first
{"ready": true}, or {"cannot": reason}, then a verdict per unit.
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
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch

from fastbert.runtime import dispatch
from fastbert.testing import error_rule, speed, verdicts
from fastbert.testing.verdict_keys import PACKAGE, Unit, key_of, name_of
from fastbert.testing.verdicts import DIED, FAILED, KILLED, SLOWER, UNDECIDED, Verdict

# A self-check that takes longer is reported by a warning: it may hang.
SLOW_SECONDS = 60.0
# Types of devices on which a kernel is timed beside the next backend.
TIMED = ("cuda",)


def check(unit: Unit, device: torch.device) -> Verdict:
    """Run the self-check of a kernel in this process, keep its verdict on disk, and return it.

    The check runs in a thread of its own, which has PyTorch's default state even where the caller is in
    inference mode, under autocast, within a checkpoint's hooks or on a side stream.

    Raises:
        BackendError: the kernel broke the CUDA context; nothing more runs on the GPU in this process.
        KeyboardInterrupt: the check was stopped; it may still run.
    """
    key = key_of(unit, device)
    what = f"the {unit.backend} kernel of {unit.op!r}"
    where = f"in {name_of(unit.dtype)} on {device}"
    results: list[tuple[Verdict, bool]] = []

    def run() -> None:
        before = verdicts.attempt(key)
        results.append(_found(unit, device))
        verdicts.settle(key, before, results[0][0])

    thread = threading.Thread(target=run, name=f"fastbert-check-{unit.op}", daemon=True)
    thread.start()
    try:
        thread.join(SLOW_SECONDS)
        if thread.is_alive():
            warnings.warn(
                f"fastbert: the self-check of {what} {where} has run for {SLOW_SECONDS:.0f} s. If it hangs, "
                "end the process: the next one will not try it",
                RuntimeWarning,
                stacklevel=5,
            )
            thread.join()
    except BaseException:
        # Ctrl-C: a check that is about to end may still keep its verdict
        thread.join(1.0)
        raise
    if not results:
        raise dispatch.BackendError(f"the self-check of {what} ended without a verdict")
    verdict, lost = results[0]
    if lost:
        raise dispatch.BackendError(
            f"{what} broke the CUDA context of this process at its self-check {where}: {verdict.reason}. "
            "Start the process anew: the kernel will not be tried again on this machine"
        )
    return verdict


def _found(unit: Unit, device: torch.device) -> tuple[Verdict, bool]:
    """(the verdict, whether the CUDA context is lost).

    Failures of the kernel are wrong results, a broken CUDA context, code that does not compile. Other errors
    may be the machine's (out of memory, no C compiler): their verdict is "undecided".
    """
    begin = time.perf_counter()
    reason, outcome, times, lost = None, "", (), False
    try:
        here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        # an empty trial, so that nothing in this thread starts another check
        with here, dispatch.trial():
            facts = unit.op, unit.backend, device, unit.dtype
            reason = error_rule.self_check(*facts)
            if reason is None and device.type in TIMED:
                times = speed.compare(*facts)
                reason = speed.why_never(unit.op, device.type, times)
                outcome = SLOWER if reason else ""
    except Exception as error:
        reason, times = f"{type(error).__name__}: {error}", ()
        lost = _context_lost(device)
        compiled = not any(c.__name__ == "TritonError" for c in type(error).__mro__)
        outcome = UNDECIDED if compiled and not lost else FAILED
    seconds = time.perf_counter() - begin
    return Verdict(reason, seconds, verdicts.now(), outcome=outcome, times=times), lost


def _context_lost(device: torch.device) -> bool:
    """Whether nothing runs on the GPU in this process any more, as after an illegal access."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return True
    return False


# --- the separate process -----------------------------------------------------------------------------------

# -P: not from the current folder, where a file could shadow a module
COMMAND = [sys.executable, "-P", "-m", "fastbert.testing.checking"]
# Limit for one check, compilation and timing included.
SECONDS = 300.0
# Limit until a process begins its first check: it imports torch and wakes the GPU.
START_SECONDS = 180.0
# Types of devices whose first checks run in a separate process.
DEVICES = ("cuda",)
# Set in the process that checks: it starts no other.
_MARK = "FASTBERT_CHECKING"
# Signals that come from outside: from a user, a job scheduler, or a system that is out of memory.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if os.name == "posix" else ()


class CannotStart(RuntimeError):
    """No separate process can check this device's kernels for this process."""


def possible(device: torch.device) -> bool:
    """Whether another process can be tried at all.

    Not under Windows, in programs that embed or freeze Python, or in a process that checks.
    """
    python = re.match(r"(python|pypy)[0-9.]*$", Path(sys.executable or "").name)
    alone = python is None or getattr(sys, "frozen", False) or _MARK in os.environ
    return device.type in DEVICES and os.name == "posix" and not alone


def checked(
    device: torch.device,
    units: Iterable[Unit],
    *,
    seconds: float = SECONDS,
    waiting: Callable[[float], None] = lambda seconds: None,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Unit, Verdict]]:
    """Check kernels in a separate process, keep the verdicts on disk, and yield them as they come.

    Args:
        device: the device to check on, with its index.
        units: the kernels, in the order in which they are checked.
        seconds: limit for one check.
        waiting: called about once per second with the seconds since the first process was started.
        telling: callback for progress messages, such as "linear of triton in float32 is checked".

    Raises:
        CannotStart: the process cannot use the device, or would check other kernels than those of this
            process. Verdicts yielded before remain valid.
    """
    left, begin = list(units), time.monotonic()
    while left:
        telling("a process that checks is started")
        with _Worker(device, lambda: waiting(time.monotonic() - begin)) as process:
            process.start(left)
            alive = True
            while left and alive:
                telling(f"{left[0].op} of {left[0].backend} in {name_of(left[0].dtype)} is checked")
                verdict, alive = process.verdict(left[0], seconds)
                yield left.pop(0), verdict


class _Worker(contextlib.ExitStack):
    """The separate process, seen from the process that waits for it; it ends with the block."""

    def __init__(self, device: torch.device, waiting: Callable[[], None]) -> None:
        super().__init__()
        self.device, self.waiting, self.pending = device, waiting, b""

    def start(self, units: list[Unit]) -> None:
        """Start the process, and wait until it has used the device. Raises CannotStart."""
        device, self.output = self.device, self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        rows = [[u.op, u.backend, name_of(u.dtype), verdicts.stem(key_of(u, device))] for u in units]
        request = json.dumps({"device": str(device), "uuid": uuid_of(device), "units": rows})
        paths = filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")])
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
            raise CannotStart(f"no process can be started: {error}") from error
        self.pipe = cast(IO[bytes], self.process.stdout)
        self.callback(self.pipe.close)
        self.callback(self.end)
        try:
            message = self.receive(time.monotonic() + START_SECONDS)
        except TimeoutError:
            raise CannotStart(f"it has not begun within {START_SECONDS:.0f} s") from None
        if message is None or "ready" not in message:
            raise CannotStart(self.ended() if message is None else message["cannot"])

    def end(self) -> int:
        """End the process and what it has started; returns its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def verdict(self, unit: Unit, seconds: float) -> tuple[Verdict, bool]:
        """(the next kernel's verdict, whether the process still runs)."""
        key, begin, problem = key_of(unit, self.device), time.monotonic(), ""
        before = verdicts.attempt(key)
        try:
            message = self.receive(begin + seconds)
        except TimeoutError:
            message, problem = None, f"no verdict within {seconds:.0f} s: it hangs"
        except BaseException:
            # stopped by the user: no fault of the kernel
            self.end()
            verdicts.settle(key, before)
            raise
        if message is not None:
            found = verdicts.verdict_of(message) or Verdict("it sent no verdict", outcome=UNDECIDED)
            return verdicts.settle(key, before, found), not message["broken"]
        found = Verdict(problem or self.ended(), time.monotonic() - begin, verdicts.now())
        # this ends what it has started, too
        if -self.end() in _FROM_OUTSIDE and not problem:
            deaths = 1 + (before.deaths if before else 0)
            found = Verdict(DIED, found.seconds, found.date, outcome=KILLED, deaths=deaths)
        return verdicts.settle(key, before, found), False

    def receive(self, deadline: float) -> dict[Any, Any] | None:
        """The next line; None where the process has ended. Raises TimeoutError at the deadline."""
        reading = self.pipe.fileno()
        while b"\n" not in self.pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            ready, _, _ = select.select([reading], [], [], min(remaining, 1.0))
            # what it has started may hold the pipe open after its end
            chunk = os.read(reading, 1 << 16) if ready else b""
            if not chunk and (ready or self.process.poll() is not None):
                return None
            self.pending += chunk
            self.waiting()
        line, _, self.pending = self.pending.partition(b"\n")
        return json.loads(line)

    def ended(self) -> str:
        """How the process ended, with the last line it printed."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            # it has closed the pipe but still runs
            code = self.end()
        names = {-number.value: number.name for number in signal.Signals}
        how = names.get(code, f"signal {-code}" if code < 0 else f"status {code}")
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - 2000))
        said = self.output.read().decode(errors="replace").strip().splitlines()
        return f"its process ended by {how}" + (f": {said[-1][:300]}" if said else "")


# --- in that process ----------------------------------------------------------------------------------------


def uuid_of(device: torch.device) -> str:
    """The identity of a GPU among those of its kind; "" where torch does not know it."""
    facts = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return str(getattr(facts, "uuid", ""))


def main(request: str) -> None:
    """Check the kernels of a request. The process that sent it keeps the verdicts on disk."""
    wanted = json.loads(request)
    # what anything else prints is no verdict
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict[Any, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    _end_with(os.getppid())
    device = torch.device(wanted["device"])
    units = [Unit(op, backend, getattr(torch, dtype)) for op, backend, dtype, _ in wanted["units"]]
    cannot = _why_cannot(device, wanted["uuid"], units, [file for *_, file in wanted["units"]])
    send({"cannot": cannot} if cannot else {"ready": True})
    for unit in [] if cannot else units:
        # the kernels that rank above it are timed beside it
        verdicts.found[unit, device], broken = _found(unit, device)
        send(verdicts.facts_of(verdicts.found[unit, device]) | {"broken": broken})
        if broken:
            return
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _why_cannot(device: torch.device, uuid: str, units: list[Unit], files: list[str]) -> str:
    """Why this process cannot check the kernels for the process that sent the request; "" if it can."""
    try:
        # fails where the device admits one process only
        torch.zeros(1, device=device).add_(1).cpu()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if uuid_of(device) != uuid:
        return f"{device} is another device there"
    own = (verdicts.stem(key_of(unit, device)) for unit in units)
    return next((f"it would check {stem}" for stem, file in zip(own, files, strict=True) if stem != file), "")


def _end_with(parent: int) -> None:
    """End this process soon after its parent has ended, even while a kernel hangs."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="fastbert-watch", daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1])
