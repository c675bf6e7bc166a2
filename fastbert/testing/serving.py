"""The rows of `fastbert.explain` and `fastbert env`.

Which backend serves each op on a device, and what is known of each GPU kernel there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastbert.runtime import dispatch
from fastbert.runtime.devices import device_of
from fastbert.runtime.table import call_kinds
from fastbert.testing import proving, speed, verdicts
from fastbert.testing.verdict_keys import Unit, key_of, name_of
from fastbert.testing.verdicts import KILLED, SLOWER, Verdict

UNCHECKED = "to be self-checked at first use"
UNRANKED = "not in the table: use_backend reaches it"


@dataclass(frozen=True)
class Choice:
    """One row of `explain()`: the backend that serves `op` for `dtype` on `device`, and why no better one.

    Attributes:
        op: the op, or a kind of its calls such as "linear activation".
        device: the device type.
        why: why each backend that ranks higher does not serve.
    """

    op: str
    device: str
    dtype: str
    backend: str
    why: str


@dataclass(frozen=True)
class Proof:
    """One row of `proofs()`: what is known of a GPU kernel on `device`.

    Attributes:
        state: "proven on <GPU>" or "slower on <GPU>" by the shipped table; "checked here", "slower here",
            "failed here" or "killed here" by a check on this machine; "unverified" or "cannot run here". A
            kernel serves only where it is proven or checked.
        detail: at which commit and date, or why not.
        times: the times of each timed call.
    """

    op: str
    device: str
    dtype: str
    backend: str
    state: str
    detail: str
    times: tuple[verdicts.Time, ...] = ()


def choices(device: str | torch.device = "cpu") -> list[Choice]:
    """Which backend serves every op and dtype on a device now, and why the better ones do not.

    Pins of `use_backend` are ignored. Calls that the table ranks apart have rows of their own.
    """
    device = _with_index(device_of(device, "target"))
    return [
        choice(op, kind, device, dtype)
        for op in dispatch.OPS
        for kind in call_kinds(op, device.type)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]


def _with_index(device: torch.device) -> torch.device:
    """`cuda` with the index of the current device."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choice(op: str, kind: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """One row of `explain()`; `kind` is "" or a kind of call, such as "activation" or "training"."""
    passed_over = []
    for name in dispatch.ranking(f"{op}_fwd {kind}".rstrip(), device.type, dtype):
        reason = dispatch.unsupported_reason(name, op, device.type, dtype)
        if reason is None and name in dispatch.SELF_CHECKED:
            verdict = verdicts.known(Unit(op, name, dtype), device)
            if verdict is None or proving.is_due(verdict, device):
                reason = UNCHECKED
            else:
                reason = speed.why_not(verdict, op, kind, device.type)
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    why = "; ".join(passed_over) or "first in the table"
    return Choice(f"{op} {kind}".rstrip(), device.type, name_of(dtype), name, why)


def proofs(device: str | torch.device) -> list[Proof]:
    """What is known of every kernel of a GPU, in every dtype that it stores; other devices need no proof."""
    device = _with_index(torch.device(device))
    if device.type != "cuda":
        return []
    return [
        Proof(op, str(device), name_of(dtype), name, *_proof(Unit(op, name, dtype), device))
        for op in dispatch.OPS
        for name in dispatch.SELF_CHECKED
        for dtype in dispatch.backend_module(name).DTYPES.get(op, ())
    ]


def _proof(unit: Unit, device: torch.device) -> tuple[str, str, tuple[verdicts.Time, ...]]:
    """(state, detail, times) of one kernel."""
    reason = dispatch.unsupported_reason(unit.backend, unit.op, device.type, unit.dtype)
    if reason is not None:
        return "cannot run here", reason, ()
    verdict = verdicts.known(unit, device)
    if verdict is None or proving.is_due(verdict, device):
        served = proving.is_ranked(unit, device.type)
        again = "" if verdict is None else f" again: {verdict.reason}"
        return "unverified", f"checked at first use{again}" if served else UNRANKED, ()
    where, since = "here", verdict.date
    if verdict.commit:
        where, since = f"on {key_of(unit, device)['device']}", f"at {verdict.commit[:9]}, {verdict.date[:10]}"
    if verdict.passed:
        state = f"{'proven' if verdict.commit else 'checked'} {where}"
        return state, since + beside(verdict, unit.op, device.type), verdict.times
    state = verdict.outcome if verdict.outcome in (SLOWER, KILLED) else "failed"
    return f"{state} {where}", f"{since}: {verdict.reason}" if since else verdict.reason or "", verdict.times


def beside(verdict: Verdict, op: str, device_type: str) -> str:
    """The kernel's time over the next backend's, for each pass judged apart, after a comma; or ""."""
    found = ""
    for passes in speed.judged_passes(op, device_type):
        ratio = verdicts.ratio_of(verdict.times, passes)
        if ratio is None:
            continue
        others = ", ".join(dict.fromkeys(t.other for t in verdict.times if passes in ("", t.passes)))
        found += f", {f'{passes} ' if passes else ''}{ratio:.2f} x the time of {others}"
        if verdict.passed and speed.why_slower(verdict.times, passes) is not None:
            found += " (does not serve)"
    return found
