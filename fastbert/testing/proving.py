"""Whether a GPU kernel is proven on the user's own device: self-checks at first use, and their verdicts.

A self-check runs a few tiny Cases of the kernel's op against the reference, and times it beside the backend
that would serve without it. `verdicts` keeps its result on disk. The first use of any kernel in a dtype
checks all kernels of that dtype, in a process of their own; where that cannot be (a GPU in exclusive mode,
for example), each kernel is checked in this process at its own first use. During the capture of a CUDA graph
no check can run, so only verdicts that are on disk already count.

A kernel that failed, or whose check was killed, is reported by one warning. A killed check is tried again,
`MOST_DEATHS` times in all and only in a process of its own. A kernel that is right but slower does not serve
either; `fastbert.explain` and `fastbert env` say so.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import torch

from fastbert.runtime import dispatch
from fastbert.testing import checking, error_rule, processes, speed, verdict_keys, verdicts
from fastbert.testing.processes import Unit
from fastbert.testing.verdicts import KILLED, SLOWER, UNDECIDED, Verdict

# How often a kernel is checked whose checks are killed.
MOST_DEATHS = 3

# Verdicts that count in this process.
_verdicts: dict[tuple[Unit, torch.device], Verdict] = {}
# Verdicts that a process of their own has found, of kernels that this process has not used yet.
_found: dict[tuple[Unit, torch.device], Verdict] = {}
# Devices on which no process of its own can check: all checks run in this one.
_alone: set[torch.device] = set()
# Held while a self-check runs: one at a time.
_checking = threading.RLock()


def is_proven(name: str, op: str, device: torch.device, dtype: torch.dtype, kind: str = "") -> bool | None:
    """Whether a kernel passed its self-check on the device, which runs now if it has not run yet.

    None where no verdict is known and no check can run now. `kind` is that of the calls, such as "training":
    a kernel may be fast enough for some of an op's calls alone.
    """
    verdict = _verdict(name, op, device, dtype)
    return None if verdict is None else speed.why_not(verdict, op, kind, device.type) is None


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
    key = Unit(op, name, dtype), device
    found = _verdicts.get(key) or _found.get(key)
    return found or verdicts.load(verdict_keys.key_of(op, name, device, dtype))


def is_due(verdict: Verdict | None, device: torch.device) -> bool:
    """Whether first use checks a kernel of which this is known."""
    if verdict is None:
        return True
    apart = processes.possible(device) and device not in _alone
    return verdict.outcome == KILLED and verdict.deaths < MOST_DEATHS and apart


def _verdict(name: str, op: str, device: torch.device, dtype: torch.dtype) -> Verdict | None:
    """The verdict on a kernel, by a check if one is due; None where it is and cannot run now."""
    unit = Unit(op, name, dtype)
    if (unit, device) in _verdicts:
        return _verdicts[unit, device]
    only_look = dispatch.in_trial() or _capturing(device)
    with contextlib.nullcontext() if only_look else _checking:
        # another thread may have found it while this one waited
        verdict = known_verdict(name, op, device, dtype)
        if is_due(verdict, device):
            if only_look:
                return None
            verdict = _check(unit, device)
        if (unit, device) not in _verdicts:
            _verdicts[unit, device] = verdict
            if not verdict.passed and verdict.outcome != SLOWER:
                _warn(unit, device, verdict)
    return _verdicts[unit, device]


def _check(unit: Unit, device: torch.device) -> Verdict:
    """Check a kernel, and in the same process of their own all others of its dtype that are due."""
    if processes.possible(device) and device not in _alone:
        try:
            for each, verdict in processes.checked(device, _due(unit, device), waiting=_tell_of(device)):
                if verdict.outcome != UNDECIDED:
                    _found[each, device] = verdict
        except processes.CannotStart:
            _alone.add(device)
        if (unit, device) in _found:
            return _found[unit, device]
    for lower in _lower(unit, device):
        _verdict(lower.backend, lower.op, device, lower.dtype)
    # what could not be decided there may be decided here: that process lacks memory that this one has
    try:
        return checking.check(unit.backend, unit.op, device, unit.dtype)
    except Exception:
        raise
    except BaseException:
        # Ctrl-C. The check may hang, so this process does without the kernel
        stopped = Verdict("its self-check was stopped before it ended", outcome=UNDECIDED)
        _verdicts[unit, device] = stopped
        raise


def _lower(unit: Unit, device: torch.device) -> list[Unit]:
    """The kernels of the unit's dtype that are to be checked before it and whose check is due.

    It is timed beside the best that passed: of those of its op that rank below it, the lowest first, or of
    the ops that models call instead.
    """
    kinds = dispatch.call_kinds(unit.op, device.type)
    found: list[Unit] = []
    for op in error_rule.parts(unit.op):
        for name, dtype in to_check(op, device.type):
            each = Unit(op, name, dtype)
            if dtype == unit.dtype and is_due(known_verdict(name, op, device, dtype), device):
                found += [lower for lower in (*_lower(each, device), each) if lower not in found]
    for name, dtype in to_check(unit.op, device.type):
        below = any(
            _is_below(
                name, unit.backend, dispatch.ranking(f"{unit.op}_fwd {kind}".rstrip(), device.type, dtype)
            )
            for kind in kinds
        )
        if dtype == unit.dtype and below and is_due(known_verdict(name, unit.op, device, dtype), device):
            found.append(Unit(unit.op, name, dtype))
    return found


def _is_below(name: str, other: str, ranking: tuple[str, ...]) -> bool:
    return name in ranking and other in ranking and ranking.index(name) > ranking.index(other)


def _due(first: Unit, device: torch.device) -> list[Unit]:
    """The kernels of that dtype that are due: `first` behind what it is timed beside, then the others."""
    units = [*_lower(first, device), first]
    for op in dispatch.OPS:
        for name, dtype in to_check(op, device.type):
            unit = Unit(op, name, dtype)
            if dtype != first.dtype or unit in units:
                continue
            if is_due(known_verdict(name, op, device, dtype), device):
                units += [each for each in (*_lower(unit, device), unit) if each not in units]
    return units


def _tell_of(device: torch.device) -> Callable[[float], None]:
    """A function that says once, after a minute, what this process waits for."""
    told = []

    def waiting(seconds: float) -> None:
        if seconds > checking.SLOW_SECONDS and not told:
            told.append(seconds)
            warnings.warn(
                f"fastbert: GPU kernels are checked on {device} before their first use; {seconds:.0f} s "
                "so far. `fastbert warmup` does that ahead",
                RuntimeWarning,
                stacklevel=9,
            )

    return waiting


def _capturing(device: torch.device) -> bool:
    """Whether this thread's work on the device goes into a CUDA graph, where a check cannot run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _warn(unit: Unit, device: torch.device, verdict: Verdict) -> None:
    what = "failed its self-check"
    if verdict.outcome == KILLED:
        what = f"has no verdict, because {verdict.deaths} of its self-checks did not end,"
    since = f" (found at {verdict.date}; `fastbert warmup --again` checks anew)" if verdict.kept else ""
    warnings.warn(
        f"fastbert: the {unit.backend} kernel of {unit.op!r} {what} on {device} in "
        f"{str(unit.dtype).removeprefix('torch.')} and will not serve there: {verdict.reason}{since}",
        RuntimeWarning,
        stacklevel=6,
    )
