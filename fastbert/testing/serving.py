"""The rows of `fastbert.explain` and `fastbert env`.

Which backend serves each op on a device, and what is known of each GPU kernel there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fastbert.runtime import dispatch
from fastbert.testing import verdict_keys, verdicts
from fastbert.testing.proving import is_ranked, known_verdict


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
        state: "proven here", "failed here", "proven elsewhere", "unverified" or "cannot run here".
        detail: since when, by which results file, or why not.
    """

    op: str
    device: str
    dtype: str
    backend: str
    state: str
    detail: str


def choices(device: str | torch.device = "cpu") -> list[Choice]:
    """Which backend serves every op and dtype on a device now, and why the better ones do not.

    Pins made by `use_backend` are not counted. A GPU kernel that has not been checked yet is reported as
    unverified. Calls that the table ranks apart from the rest of their op have rows of their own.
    """
    device = _with_index(torch.device(device))
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
    """One row of `explain()`; `kind` is "" or a kind of call, such as "activation"."""
    passed_over = []
    for name in dispatch.ranking(f"{op}_fwd {kind}".rstrip(), device.type, dtype):
        reason = dispatch.unsupported_reason(name, op, device.type, dtype)
        if reason is None and name in dispatch.SELF_CHECKED:
            verdict = known_verdict(name, op, device, dtype)
            reason = "to be self-checked at first use" if verdict is None else verdict.reason
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    why = "; ".join(passed_over) or "first in the table"
    return Choice(f"{op} {kind}".rstrip(), device.type, str(dtype).removeprefix("torch."), name, why)


def proofs(device: str | torch.device, results: Path | None = None) -> list[Proof]:
    """What is known of every kernel that needs a proof, in every dtype that it stores.

    "proven here": it passed its self-check on this machine. "proven elsewhere": `results` has its checks from
    a device of the same compute capability.

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
) -> tuple[str, str]:
    reason = dispatch.unsupported_reason(name, op, device.type, dtype)
    if reason is not None:
        return "cannot run here", reason
    verdict = known_verdict(name, op, device, dtype)
    if verdict is not None:
        return ("proven here", verdict.date) if verdict.passed else ("failed here", verdict.reason or "")
    capability = verdict_keys.key_of(op, name, device, dtype)["capability"]
    file = None if results is None else verdicts.proven_elsewhere(results, op, name, dtype, capability)
    if file is not None:
        return "proven elsewhere", file
    served = is_ranked(name, op, device.type, dtype)
    return "unverified", "checked at first use" if served else "not in the table: use_backend reaches it"
