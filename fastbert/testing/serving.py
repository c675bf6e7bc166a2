"""Which backend serves what on a device, and what is known of each GPU kernel there: the rows of
`fastbert.explain` and `fastbert env`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastbert.runtime import dispatch
from fastbert.testing import verdicts
from fastbert.testing.proving import in_a_line, known_verdict


@dataclass(frozen=True)
class Choice:
    """One line of `explain()`: the backend that serves `op` for `dtype` on `device`, and why no other."""

    op: str  # or the part of its calls that has a line of its own, such as "linear activation"
    device: str
    dtype: str
    backend: str
    why: str


@dataclass(frozen=True)
class Proof:
    """One line of `proofs()`: what is known of a GPU kernel on `device`.

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

    Pins made by `use_backend` are not counted. GPU kernels that have not been checked yet are said to be
    unverified. Calls that the table serves otherwise than the rest of their op have rows of their own.
    """
    device = _with_index(torch.device(device))
    return [
        choice(op, part, device, dtype)
        for op in dispatch.OPS
        for part in dispatch.parts(op, device.type)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    ]


def _with_index(device: torch.device) -> torch.device:
    """`cuda` as the device that it means now."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choice(op: str, part: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """One row of `explain()`; `part` is "" or such as "activation"."""
    passed_over = []
    for name in dispatch.line(f"{op}_fwd {part}".rstrip(), device.type, dtype):
        reason = dispatch.gap(name, op, device.type, dtype)
        if reason is None and name in dispatch.SELF_CHECKED:
            verdict = known_verdict(name, op, device, dtype)
            reason = "to be self-checked at first use" if verdict is None else verdict.reason
        if reason is None:
            break
        passed_over.append(f"{name}: {reason}")
    why = "; ".join(passed_over) or "first in the table"
    return Choice(f"{op} {part}".rstrip(), device.type, str(dtype).removeprefix("torch."), name, why)


def proofs(device: str | torch.device) -> list[Proof]:
    """What is known of every kernel that needs a proof, in every dtype that it stores.

    "proven here": it passed its self-check on this machine. "proven elsewhere": bench/results has its checks
    from a device of the same compute capability.
    """
    device = _with_index(torch.device(device))
    if device.type != "cuda":
        return []
    return [
        Proof(op, str(device), str(dtype).removeprefix("torch."), name, *_proof(name, op, device, dtype))
        for op in dispatch.OPS
        for name in dispatch.SELF_CHECKED
        for dtype in dispatch.backend_module(name).DTYPES.get(op, ())
    ]


def _proof(name: str, op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    reason = dispatch.gap(name, op, device.type, dtype)
    if reason is not None:
        return "cannot run here", reason
    verdict = known_verdict(name, op, device, dtype)
    if verdict is not None:
        return ("proven here", verdict.date) if verdict.passed else ("failed here", verdict.reason or "")
    capability = verdicts.key_of(op, name, device, dtype)["capability"]
    file = verdicts.proven_elsewhere(op, name, dtype, capability)
    if file is not None:
        return "proven elsewhere", file
    served = in_a_line(name, op, device.type, dtype)
    return "unverified", "checked at first use" if served else "not in the table: use_backend reaches it"
