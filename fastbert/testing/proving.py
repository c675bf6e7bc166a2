"""Whether a GPU kernel may serve on a device: by a shipped proof, or by a self-check at its first use.

A kernel without a verdict (`verdicts`) is checked at its first use in a dtype, with all kernels of that dtype
that are due: a few tiny Cases of its op against the reference, then its times beside the backend that would
serve without it. A separate process checks; where none can (a GPU in exclusive mode, for example), this
process does. During the capture of a CUDA graph no check can run, so only verdicts that exist already count.
Of several processes, such as the ranks of a training run, one checks at a time while the rest wait for its
verdict.

A kernel that failed, or whose check was killed, is reported by one warning. A killed check is tried again,
`MOST_DEATHS` times in all and only in a separate process. A kernel that is right but slower does not serve
either; `fastbert.explain` and `fastbert env` report it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

import torch

from fastbert.runtime import dispatch
from fastbert.runtime.table import call_kinds
from fastbert.testing import checking, error_rule, speed, verdicts
from fastbert.testing.verdict_keys import Unit, key_of, name_of
from fastbert.testing.verdicts import KILLED, SLOWER, UNDECIDED, Verdict

# How often a kernel whose checks are killed is checked.
MOST_DEATHS = 3

# The verdicts that this process has asked for. A warning has reported each bad one.
_told: dict[tuple[Unit, torch.device], Verdict] = {}
# Devices that no separate process can check: all checks run in this process.
_alone: set[torch.device] = set()
# Held while a self-check runs: one at a time.
_checking = threading.RLock()


def is_proven(name: str, op: str, device: torch.device, dtype: torch.dtype, kind: str = "") -> bool | None:
    """Whether a kernel is proven on the device; if nothing is known of it, its self-check runs now.

    None where there is no verdict and no check can run now. `kind` is the kind of call, such as "training": a
    kernel may be fast enough for some kinds of an op's calls only.
    """
    verdict = _verdict(Unit(op, name, dtype), device)
    return None if verdict is None else speed.why_not(verdict, op, kind, device.type) is None


def to_check(
    device: torch.device, ops: Iterable[str] | None = None, dtypes: Iterable[torch.dtype] | None = None
) -> list[Unit]:
    """The kernels that must pass a self-check before they serve on the device.

    Kernels of the backend that ranks lower come first.
    """
    return [
        Unit(op, name, dtype)
        for op in ops or dispatch.OPS
        for name in dispatch.SELF_CHECKED
        for dtype in dispatch.backend_module(name).DTYPES.get(op, ())
        if (dtypes is None or dtype in dtypes)
        and dispatch.unsupported_reason(name, op, device.type, dtype) is None
        and is_ranked(Unit(op, name, dtype), device.type)
    ]


def is_ranked(unit: Unit, device_type: str) -> bool:
    """Whether the dispatch table names the kernel's backend for any kind of call of its op."""
    calls = (f"{unit.op}_fwd {kind}".rstrip() for kind in call_kinds(unit.op, device_type))
    return any(unit.backend in dispatch.ranking(call, device_type, unit.dtype) for call in calls)


def is_due(verdict: Verdict | None, device: torch.device) -> bool:
    """Whether the first use checks a kernel that has this verdict."""
    if verdict is None:
        return True
    apart = checking.possible(device) and device not in _alone
    return verdict.outcome == KILLED and verdict.deaths < MOST_DEATHS and apart


def _verdict(unit: Unit, device: torch.device) -> Verdict | None:
    """The verdict on a kernel, by a check if one is due; None where the check cannot run now."""
    verdict = verdicts.found.get((unit, device))
    if verdict is not None and _told.get((unit, device)) is verdict:
        return verdict
    only_look = dispatch.in_trial() or _capturing(device)
    with contextlib.nullcontext() if only_look else _checking:
        # another thread may have found it while this one waited
        verdict = verdicts.known(unit, device)
        if verdict is None or is_due(verdict, device) or (verdict.outcome == KILLED and verdict.kept):
            # where it is "killed", its check may be under way elsewhere
            if only_look:
                return None
            with verdicts.turn(key_of(unit, device), _tell_of(device)):
                # another process may have found it while this one waited
                verdict = verdicts.known(unit, device)
                if verdict is None or is_due(verdict, device):
                    verdict = _check(unit, device)
        verdict = verdicts.found.setdefault((unit, device), verdict)
        if _told.get((unit, device)) is not verdict:
            _told[unit, device] = verdict
            if not verdict.passed and verdict.outcome != SLOWER:
                _warn(unit, device, verdict)
    return verdict


def _check(unit: Unit, device: torch.device) -> Verdict:
    """Check a kernel after those that it is timed beside; a separate process checks all that are due."""
    wanted = [*_lower(unit, device), unit]
    if checking.possible(device) and device not in _alone:
        units = dict.fromkeys([*wanted, *_due(unit.dtype, device)])
        try:
            for each, verdict in checking.checked(device, units, waiting=_tell_of(device)):
                if verdict.outcome != UNDECIDED:
                    verdicts.found[each, device] = verdict
        except checking.CannotStart:
            _alone.add(device)
    # A check may be undecided there and decided here: that process lacks memory that this process holds.
    for each in wanted:
        if (each, device) not in verdicts.found and is_due(verdicts.known(each, device), device):
            try:
                verdicts.found[each, device] = checking.check(each, device)
            except (KeyboardInterrupt, SystemExit):
                # Ctrl-C. The check may hang, so this process does without the kernel
                stopped = Verdict("its self-check was stopped before it ended", outcome=UNDECIDED)
                verdicts.found[each, device] = stopped
                raise
    verdict = verdicts.known(unit, device)
    assert verdict is not None, unit
    return verdict


def _lower(unit: Unit, device: torch.device) -> list[Unit]:
    """The kernels of the unit's dtype that are due and must be checked before it.

    The unit is timed beside the best kernel that passed, of its op's lower ranks, the lowest first, or of the
    ops that models call instead.
    """
    parts = error_rule.bench_cases(unit.op, (128,))[0].parts
    ranked = to_check(device, (*parts, unit.op), [unit.dtype])
    before = takewhile(lambda each: each != unit, ranked)
    return [each for each in before if is_due(verdicts.known(each, device), device)]


def _due(wanted: torch.dtype, device: torch.device) -> list[Unit]:
    """The kernels of a dtype that are due, each after those that it is timed beside."""
    due = [u for u in to_check(device, dtypes=[wanted]) if is_due(verdicts.known(u, device), device)]
    return list(dict.fromkeys(each for unit in due for each in (*_lower(unit, device), unit)))


def _tell_of(device: torch.device) -> Callable[[float], None]:
    """A function that warns once, after a minute, of what this process waits for."""
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
        f"{name_of(unit.dtype)} and will not serve there: {verdict.reason}{since}",
        RuntimeWarning,
        stacklevel=6,
    )


def warm_up(
    device: torch.device,
    ops: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    *,
    again: bool = False,
    seconds: float = checking.SECONDS,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Unit, Verdict]]:
    """Run the checks that first use on a device would run, and yield the verdicts one at a time.

    Args:
        device: the device to check on; "cuda" with its index.
        ops, dtypes: check only these; None = all.
        again: check also the kernels that are proven or have a verdict.
        seconds: limit for one check.
        telling: callback for progress messages, such as "linear of triton in float32 is checked".
    """
    left = []
    for unit in to_check(device, ops, dtypes):
        if again:
            verdicts.found.pop((unit, device), None)
            verdicts.forget(key_of(unit, device))
        known = None if again else verdicts.known(unit, device)
        if known is None or is_due(known, device):
            left.append(unit)
        else:
            yield unit, known
    if not left:
        return
    say = lambda waited: telling(f"another process checks; waited for {waited:.0f} s")  # noqa: E731
    with verdicts.turn(key_of(left[0], device), say):
        try:
            for unit, verdict in checking.checked(device, list(left), seconds=seconds, telling=telling):
                left.remove(unit)
                yield unit, verdict
        except checking.CannotStart as error:
            # the machine's fault, so nothing is kept
            missing = Verdict(f"not checked: {error}", date=verdicts.now(), outcome=UNDECIDED)
            yield from ((unit, missing) for unit in left)
