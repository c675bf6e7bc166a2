"""`fastbert warmup`: run the self-checks that first use on a device would run, and keep their verdicts.

Kernels are checked in one process of their own, one after the other, each with a time limit. After a kernel
that crashes that process, or hangs, another one checks the rest. What the shipped table proves is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from fastbert.runtime import dispatch
from fastbert.testing import known, processes, proving, serving, verdict_keys, verdicts
from fastbert.testing.processes import SECONDS
from fastbert.testing.verdict_keys import Unit, name_of
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
        commit: of the shipped proof; "" where this machine checked.
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
    commit: str = ""


def wanted(
    device: torch.device, ops: Iterable[str] | None = None, dtypes: Iterable[torch.dtype] | None = None
) -> list[Unit]:
    """The kernels that must pass a self-check before they serve on the device."""
    return [
        Unit(op, backend, dtype)
        for op in ops or dispatch.OPS
        for backend, dtype in proving.to_check(op, device.type)
        if dtypes is None or dtype in dtypes
    ]


def run(
    device: torch.device,
    ops: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    *,
    again: bool = False,
    seconds: float = SECONDS,
    telling: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Check kernels and keep the verdicts, one result at a time.

    Args:
        device: the device to check on; "cuda" with its index.
        ops, dtypes: check only these; None = all.
        again: check also the kernels that are proven or have a verdict.
        seconds: limit for one check.
        telling: called with what is done now, such as "linear of triton in float32 is checked".
    """
    left = []
    for unit in wanted(device, ops, dtypes):
        if again:
            known.found.pop((unit, device), None)
            verdicts.forget(_key(unit, device))
        found = None if again else known.verdict(unit, device)
        if proving.is_due(found, device):
            left.append(unit)
        else:
            yield _result(unit, device, found)
    if left:
        say = lambda waited: telling(f"another process checks; waited for {waited:.0f} s")  # noqa: E731
        with verdicts.turn(_key(left[0], device), say):
            yield from _checked(left, device, seconds, telling)


def _key(unit: Unit, device: torch.device) -> verdict_keys.Key:
    return verdict_keys.key_of(unit.op, unit.backend, device, unit.dtype)


def _checked(
    left: list[Unit], device: torch.device, seconds: float, telling: Callable[[str], None]
) -> Iterator[Result]:
    """Check the kernels, one result at a time."""
    try:
        for unit, found in processes.checked(device, list(left), seconds=seconds, telling=telling):
            left.remove(unit)
            yield _result(unit, device, found)
    except processes.CannotStart as error:
        # the machine's fault, so nothing is kept
        missing = Verdict(f"not checked: {error}", date=verdicts.now(), outcome=UNDECIDED)
        for unit in left:
            yield _result(unit, device, missing)


def _result(unit: Unit, device: torch.device, found: Verdict) -> Result:
    facts = found.passed, found.outcome, found.reason, found.seconds, found.kept, found.date
    beside = serving.beside(found, unit.op, device.type)
    where = unit.op, unit.backend, name_of(unit.dtype), str(device)
    return Result(*where, *facts, found.times, beside, found.commit)
