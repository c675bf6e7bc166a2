"""Whether a GPU kernel is proven on the user's own device: self-checks at first use, and their verdicts.

A self-check runs a few tiny Cases of the kernel's op against the reference. `verdicts` keeps its result on
disk. During the capture of a CUDA graph no check can run, so only verdicts that are on disk already count. A
kernel that failed is reported by one warning.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator

import torch

from fastbert.runtime import dispatch
from fastbert.testing import error_rule, verdict_keys, verdicts
from fastbert.testing.verdicts import Verdict

_verdicts: dict[tuple[str, str, str, int | None, torch.dtype], Verdict] = {}
# Held while a self-check runs: one at a time.
_checking = threading.RLock()
# A self-check that takes longer is reported by a warning: it may hang.
_SLOW_SECONDS = 60.0


def is_proven(name: str, op: str, device: torch.device, dtype: torch.dtype) -> bool | None:
    """Whether a kernel passed its self-check on the device, which runs now if it has not run yet.

    None where no verdict is known and no check can run now.
    """
    verdict = _verdict(name, op, device, dtype)
    return None if verdict is None else verdict.passed


def to_check(op: str, device_type: str) -> Iterator[tuple[str, torch.dtype]]:
    """(backend, dtype) of every kernel of the op that must pass a self-check before it serves there."""
    for name in dispatch.SELF_CHECKED:
        for dtype in dispatch.backend_module(name).DTYPES.get(op, ()):
            if dispatch.unsupported_reason(name, op, device_type, dtype) is not None:
                continue
            if is_ranked(name, op, device_type, dtype):
                yield name, dtype


def is_ranked(name: str, op: str, device_type: str, dtype: torch.dtype) -> bool:
    """Whether the dispatch table names the backend for any kind of call of the op."""
    calls = (f"{op}_fwd {kind}".rstrip() for kind in dispatch.call_kinds(op, device_type))
    return any(name in dispatch.ranking(call, device_type, dtype) for call in calls)


def known_verdict(name: str, op: str, device: torch.device, dtype: torch.dtype) -> Verdict | None:
    """What is known of a kernel, from this process or from disk; None where it has not been checked."""
    found = _verdicts.get((name, op, device.type, device.index, dtype))
    return found or verdicts.load(verdict_keys.key_of(op, name, device, dtype))


def _verdict(name: str, op: str, device: torch.device, dtype: torch.dtype) -> Verdict | None:
    """The verdict on a kernel, by a check if there is none yet; None where no check can run now."""
    key = (name, op, device.type, device.index, dtype)
    if key in _verdicts:
        return _verdicts[key]
    only_look = dispatch.in_trial() or _capturing(device)
    with contextlib.nullcontext() if only_look else _checking:
        verdict = known_verdict(name, op, device, dtype)
        if verdict is None:
            if only_look:
                return None
            verdict = check(name, op, device, dtype)
        if key not in _verdicts:
            _verdicts[key] = verdict
            if not verdict.passed:
                _warn(name, op, device, dtype, verdict)
    return _verdicts[key]


def _capturing(device: torch.device) -> bool:
    """Whether this thread's work on the device goes into a CUDA graph, where a check cannot run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _warn(name: str, op: str, device: torch.device, dtype: torch.dtype, verdict: Verdict) -> None:
    since = f" (found at {verdict.date}; `fastbert warmup --again` checks anew)" if verdict.kept else ""
    warnings.warn(
        f"fastbert: the {name} kernel of {op!r} failed its self-check on {device} in "
        f"{str(dtype).removeprefix('torch.')} and will not serve there: {verdict.reason}{since}",
        RuntimeWarning,
        stacklevel=6,
    )


def check(name: str, op: str, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Run the self-check of a kernel now, keep its verdict on disk, and return it.

    The check runs in a thread of its own, which has PyTorch's default state even where the caller is in
    inference mode, under autocast, within a checkpoint's hooks or on a side stream. Failures of the kernel
    are kept on disk: wrong results, a broken CUDA context, code that does not compile. Other errors may be
    the machine's (out of memory, no C compiler) and count for this process only.

    Raises:
        BackendError: the kernel broke the CUDA context; nothing more runs on the GPU in this process.
    """
    key = verdict_keys.key_of(op, name, device, dtype)
    found: list[tuple[Verdict, bool]] = []

    def run() -> None:
        with verdicts.running(key):
            begin = time.perf_counter()
            reason, lasting, lost = None, True, False
            try:
                here = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
                # a trial of none yet, so that nothing in this thread starts another check
                with here, dispatch.trial():
                    reason = error_rule.self_check(op, name, device, dtype)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                lost = _context_lost(device)
                lasting = lost or any(c.__name__ == "TritonError" for c in type(error).__mro__)
            verdict = Verdict(reason, time.perf_counter() - begin, verdicts.now())
            if lasting:
                verdicts.store(key, verdict)
            found.append((verdict, lost))

    thread = threading.Thread(target=run, name=f"fastbert-check-{op}", daemon=True)
    thread.start()
    try:
        thread.join(_SLOW_SECONDS)
        if thread.is_alive():
            warnings.warn(
                f"fastbert: the self-check of the {name} kernel of {op!r} in {key['dtype']} on {device} has "
                f"run for {_SLOW_SECONDS:.0f} s. If it hangs, end the process: the next one will not try it",
                RuntimeWarning,
                stacklevel=5,
            )
            thread.join()
    except BaseException:
        # Ctrl-C: a check that is about to end may still remove its marker
        thread.join(1.0)
        if not found:
            # it may hang: this process does without the kernel
            stopped = Verdict("its self-check was stopped before it ended", date=verdicts.now())
            _verdicts[name, op, device.type, device.index, dtype] = stopped
        raise
    if not found:
        raise dispatch.BackendError(f"the self-check of the {name} kernel of {op!r} ended without a verdict")
    verdict, lost = found[0]
    if lost:
        raise dispatch.BackendError(
            f"the {name} kernel of {op!r} broke the CUDA context of this process at its self-check in "
            f"{key['dtype']} on {device}: {verdict.reason}. Start the process anew: the kernel will not be "
            "tried again on this machine"
        )
    return verdict


def _context_lost(device: torch.device) -> bool:
    """Whether nothing runs on the GPU in this process any more, as after an illegal access."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception:
            return True
    return False
