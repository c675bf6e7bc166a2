"""The rows of `fastbert.explain` and `fastbert env`.

Which backend serves each op on a device, and what is known of each GPU kernel there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fastbert.runtime import dispatch
from fastbert.runtime.devices import device_of
from fastbert.testing import proving, speed, verdict_keys, verdicts
from fastbert.testing.proving import is_ranked, known_verdict
from fastbert.testing.verdicts import KILLED, SLOWER, Verdict

UNCHECKED = "to be self-checked at first use"


@dataclass(frozen=True)
class Choice:
    """One row of `explain()`: the backend that serves `op` for `dtype` on `device`, and why no other.

    Attributes:
        op: the op, or the kind of its calls that the table ranks apart, such as "linear activation".
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
        state: "proven here", "slower here", "failed here", "killed here", "proven elsewhere", "unverified" or
            "cannot run here". A kernel serves only where it is proven.
        detail: since when, by which results file, or why not.
        times: (case, passes, ms, other backend, its ms) of each call that was timed here, as in
            `verdicts.Time`.
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

    Pins made by `use_backend` are not counted. A GPU kernel that has not been checked yet is reported as
    unverified. Calls that the table ranks apart from the rest of their op have rows of their own.
    """
    device = _with_index(device_of(device, "target"))
    return [
        choice(op, kind, device, dtype)
        for op in dispatch.OPS
        for kind in dispatch.call_kinds(op, device.type)
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
            verdict = known_verdict(name, op, device, dtype)
            due = proving.is_due(verdict, device)
            reason = UNCHECKED if due else speed.why_not(verdict, op, kind, device.type)
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    why = "; ".join(passed_over) or "first in the table"
    return Choice(f"{op} {kind}".rstrip(), device.type, str(dtype).removeprefix("torch."), name, why)


def proofs(device: str | torch.device, results: Path | None = None) -> list[Proof]:
    """What is known of every kernel that needs a proof, in every dtype that it stores.

    "proven here": it passed its self-check on this machine. "slower here": it is right, but slower than the
    next backend. "killed here": its checks did not end, too often to try again. "proven elsewhere": `results`
    has its checks from a device of the same compute capability.

    Args:
        device: a GPU; other devices have no kernel that needs a proof.
        results: `bench/results` of a source checkout, which `make gpu` writes; None = none.
    """
    device = _with_index(torch.device(device))
    if device.type != "cuda":
        return []
    return [
        Proof(
            op,
            str(device),
            str(dtype).removeprefix("torch."),
            name,
            *_proof(name, op, device, dtype, results),
        )
        for op in dispatch.OPS
        for name in dispatch.SELF_CHECKED
        for dtype in dispatch.backend_module(name).DTYPES.get(op, ())
    ]


def _proof(
    name: str, op: str, device: torch.device, dtype: torch.dtype, results: Path | None
) -> tuple[str, str, tuple[verdicts.Time, ...]]:
    """(state, detail, times) of one kernel."""
    reason = dispatch.unsupported_reason(name, op, device.type, dtype)
    if reason is not None:
        return "cannot run here", reason, ()
    verdict = known_verdict(name, op, device, dtype)
    if verdict is not None and not proving.is_due(verdict, device):
        if verdict.passed:
            return "proven here", f"{verdict.date}{beside(verdict, op, device.type)}", verdict.times
        state = verdict.outcome if verdict.outcome in (SLOWER, KILLED) else "failed"
        return f"{state} here", verdict.reason or "", verdict.times
    capability = verdict_keys.key_of(op, name, device, dtype)["capability"]
    file = None if results is None else verdicts.proven_elsewhere(results, op, name, dtype, capability)
    if file is not None:
        return "proven elsewhere", file, ()
    served = is_ranked(name, op, device.type, dtype)
    again = "" if verdict is None else f" again: {verdict.reason}"
    detail = f"checked at first use{again}" if served else "not in the table: use_backend reaches it"
    return "unverified", detail, ()


def beside(verdict: Verdict, op: str, device_type: str) -> str:
    """The kernel's time beside the next backend's, to be put behind something; "" without times.

    Where calls in training are judged apart, their time stands beside that of forward alone.
    """
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
