"""`fastbert warmup`: run the self-checks that first use on a device would run, and keep their verdicts.

All kernels are compiled side by side, then checked in one process of their own, one after the other, each
with a time limit. After a kernel that crashes that process, or hangs, another one checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from fastbert.runtime import dispatch
from fastbert.testing import processes, proving, serving, verdict_keys, verdicts
from fastbert.testing.processes import SECONDS, Unit
from fastbert.testing.verdicts import UNDECIDED, Time, Verdict


@dataclass(frozen=True)
class Result:
    """The verdict on one kernel.

    Attributes:
        passed: whether it may serve.
        outcome: "passed", "failed", "slower", "killed" or "undecided", as in `verdicts.Verdict`.
        reason: None where it passed.
        seconds: how long the check took, compilation included.
        kept: whether the verdict was on disk already.
        date: of the check, UTC.
        times: of the kernel and of the backend that would serve without it, as in `verdicts.Time`.
        beside: what they say, to be put behind something; "" where nothing was timed.
    """

    op: str
    backend: str
    dtype: str
    device: str
    passed: bool
    outcome: str
    reason: str | None
    seconds: float
    kept: bool
    date: str
    times: tuple[Time, ...] = ()
    beside: str = ""


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
    jobs: int | None = None,
    seconds: float = SECONDS,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Check kernels and keep the verdicts, one result at a time.

    Args:
        device: the device to check on; "cuda" with its index.
        ops, dtypes: check only these; None = all.
        again: check also the kernels that have a verdict.
        jobs: how many processes may compile at once; 1 = none beside the one that checks; None = as the
            machine allows.
        seconds: limit for one check.
        telling: called with what is done now, such as "2 of 7 kernels are compiled".
    """
    left = []
    for op, backend, each in wanted(device, ops, dtypes):
        for dtype in each:
            key = verdict_keys.key_of(op, backend, device, dtype)
            if again:
                verdicts.forget(key)
            found = None if again else verdicts.load(key)
            if proving.is_due(found, device):
                left.append(Unit(op, backend, dtype))
            else:
                yield _result(Unit(op, backend, dtype), device, found)
    if left:
        key = verdict_keys.key_of(left[0].op, left[0].backend, device, left[0].dtype)
        with verdicts.turn(key, lambda waited: telling(f"another process checks; waited for {waited:.0f} s")):
            yield from _checked(left, device, jobs, seconds, telling)


def _checked(
    left: list[Unit],
    device: torch.device,
    jobs: int | None,
    seconds: float,
    telling: Callable[[str], None],
) -> Iterator[Result]:
    """Check the kernels, one result at a time."""
    try:
        for unit, found in processes.checked(device, list(left), jobs=jobs, seconds=seconds, telling=telling):
            left.remove(unit)
            yield _result(unit, device, found)
    except processes.CannotStart as error:
        # the machine's fault, so nothing is kept
        missing = Verdict(f"not checked: {error}", date=verdicts.now(), outcome=UNDECIDED)
        for unit in left:
            yield _result(unit, device, missing)


def _result(unit: Unit, device: torch.device, found: Verdict) -> Result:
    name = str(unit.dtype).removeprefix("torch.")
    facts = found.passed, found.outcome, found.reason, found.seconds, found.kept, found.date
    beside = serving.beside(found, unit.op, device.type)
    return Result(unit.op, unit.backend, name, str(device), *facts, found.times, beside)
