"""`fastbert warmup`: run the self-checks that first use on a device would run, and keep their verdicts.

Kernels are checked in one process of their own, one after the other, each with a time limit. After a kernel
that crashes that process, or hangs, another one checks the rest. What the shipped table proves is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from fastbert.runtime import dispatch
from fastbert.testing import checking, known, proving, verdict_keys, verdicts
from fastbert.testing.checking import SECONDS
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import UNDECIDED, Verdict


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
) -> Iterator[tuple[Unit, Verdict]]:
    """Check kernels and keep the verdicts, which are handed over one at a time.

    Args:
        device: the device to check on; "cuda" with its index.
        ops, dtypes: check only these; None = all.
        again: check also the kernels that are proven or have a verdict.
        seconds: limit for one check.
        telling: called with what is done now, such as "linear of triton in float32 is checked".
    """
    left = []
    keys = {unit: verdict_keys.key_of(*unit[:2], device, unit.dtype) for unit in wanted(device, ops, dtypes)}
    for unit, key in keys.items():
        if again:
            known.found.pop((unit, device), None)
            verdicts.forget(key)
        found = None if again else known.verdict(unit, device)
        if proving.is_due(found, device):
            left.append(unit)
        else:
            yield unit, found
    if not left:
        return
    say = lambda waited: telling(f"another process checks; waited for {waited:.0f} s")  # noqa: E731
    with verdicts.turn(keys[left[0]], say):
        try:
            for unit, found in checking.checked(device, list(left), seconds=seconds, telling=telling):
                left.remove(unit)
                yield unit, found
        except checking.CannotStart as error:
            # the machine's fault, so nothing is kept
            missing = Verdict(f"not checked: {error}", date=verdicts.now(), outcome=UNDECIDED)
            yield from ((unit, missing) for unit in left)
