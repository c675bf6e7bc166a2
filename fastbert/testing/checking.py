"""A kernel's self-check in this process: the error rule on a few Cases, then its times on a GPU.

`processes` runs it in a process of its own, where a crash or a hang does no harm.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings

import torch

from fastbert.runtime import dispatch
from fastbert.testing import error_rule, speed, verdict_keys, verdicts
from fastbert.testing.verdict_keys import Unit, name_of
from fastbert.testing.verdicts import FAILED, SLOWER, UNDECIDED, Verdict

# A self-check that takes longer is reported by a warning: it may hang.
SLOW_SECONDS = 60.0
# Types of devices on which a kernel is timed beside the next backend.
TIMED = ("cuda",)


def check(unit: Unit, device: torch.device) -> Verdict:
    """Run the self-check of a kernel now, keep its verdict on disk, and return it.

    The check runs in a thread of its own, which has PyTorch's default state even where the caller is in
    inference mode, under autocast, within a checkpoint's hooks or on a side stream. Failures of the kernel
    are kept on disk: wrong results, a broken CUDA context, code that does not compile; and that it is
    slower than the next backend. Other errors may be the machine's (out of memory, no C compiler): their
    verdict is "undecided", and is not kept.

    Raises:
        BackendError: the kernel broke the CUDA context; nothing more runs on the GPU in this process.
        KeyboardInterrupt: the check was stopped; it may still run.
    """
    key = verdict_keys.key_of(unit.op, unit.backend, device, unit.dtype)
    what = f"the {unit.backend} kernel of {unit.op!r}"
    where = f"in {name_of(unit.dtype)} on {device}"
    found: list[tuple[Verdict, bool]] = []

    def run() -> None:
        before = verdicts.attempt(key)
        verdict, lost = _checked(unit, device)
        verdicts.settle(key, before, verdict)
        found.append((verdict, lost))

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
    if not found:
        raise dispatch.BackendError(f"the self-check of {what} ended without a verdict")
    verdict, lost = found[0]
    if lost:
        raise dispatch.BackendError(
            f"{what} broke the CUDA context of this process at its self-check {where}: {verdict.reason}. "
            "Start the process anew: the kernel will not be tried again on this machine"
        )
    return verdict


def _checked(unit: Unit, device: torch.device) -> tuple[Verdict, bool]:
    """(the verdict, whether the CUDA context is lost)."""
    op, name, dtype = unit
    begin = time.perf_counter()
    reason, outcome, times, lost = None, "", (), False
    try:
        here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        # a trial of none yet, so that nothing in this thread starts another check
        with here, dispatch.trial():
            reason = error_rule.self_check(op, name, device, dtype)
            if reason is None and device.type in TIMED:
                times = speed.compare(op, name, device, dtype)
                reason = speed.why_never(op, device.type, times)
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
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception:
            return True
    return False
