"""The backend of each op of a timed row: all self-checks run before the first row, and the row names it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bench.lib.roofs import TAGS
from bench.lib.turns import precision
from fastbert.runtime import dispatch
from fastbert.runtime.table import call_kinds
from fastbert.testing import proving
from fastbert.testing.verdict_keys import name_of

# Candidates whose ops dispatch.py serves.
OURS = ("fastbert", "accelerated")
# Under autocast some ops run in float32.
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = {"fp32": (FP32,), "bf16": (BF16,), "bf16 autocast": (BF16, FP32)}


def prove(device: torch.device | str) -> list[dict]:
    """Check every kernel that has no verdict yet, so that no check runs later while something is timed.

    Returns:
        A record per kernel: op, backend, dtype, outcome, reason, and its times beside the next backend's.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found = []
    for unit, verdict in proving.warm_up(device, dtypes=(torch.bfloat16, torch.float32)):
        facts = {"op": unit.op, "backend": unit.backend, "dtype": name_of(unit.dtype)}
        facts |= {"outcome": verdict.outcome, "reason": verdict.reason}
        found.append(facts | {"times": [time._asdict() for time in verdict.times]})
    return found


def backends(candidate: str, device: torch.device | str, tag: str) -> dict[str, str]:
    """ "op dtype" or "op kind dtype" -> the backend that serves it now; empty for a peer.

    Args:
        candidate: an engine's name in a row, such as "fastbert-bf16".
        device: where it runs.
        tag: one of DTYPES.
    """
    if not candidate.startswith(OURS):
        return {}
    device, found = torch.device(device), {}
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for op in dispatch.OPS:
        for kind in call_kinds(op, device.type):
            call = f"{op}_fwd {kind}".rstrip()
            for dtype in DTYPES[tag]:
                name = " ".join(filter(None, (op, kind, TAGS[dtype])))
                found[name] = dispatch.serving_backend(call, device, dtype)
    return found


def of_row(row: dict, device: torch.device | str) -> dict[str, str]:
    """`backends` of a timed row's candidate; empty without a precision in its name."""
    tag = precision(row.get("candidate", ""))
    if tag not in DTYPES or "median_ms" not in row:
        return {}
    autocast = row.get("step") == "training" and tag == "bf16"
    return backends(row["candidate"], device, "bf16 autocast" if autocast else tag)


def others(served: dict[str, str], device_type: str) -> dict[str, str]:
    """Those of `backends` that are not the table's first: what a reader of the row has to know.

    Of two kernels that a self-check has timed beside each other, either may serve.
    """
    dtypes = {tag: dtype for dtype, tag in TAGS.items()}
    found = {}
    for name, backend in served.items():
        op, *kind, tag = name.split()
        first = dispatch.ranking(" ".join((f"{op}_fwd", *kind)), device_type, dtypes[tag])[0]
        if backend != first and not {backend, first} <= set(dispatch.SELF_CHECKED):
            found[name] = backend
    return found


def told(served: Iterable[dict[str, str]], device_type: str) -> str:
    """One line on all rows whose ops were not all served by the table's first backends; "" without any."""
    found: dict[str, str] = {}
    for each in served:
        found |= others(each, device_type)
    return ", ".join(f"{name} by {backend}" for name, backend in sorted(found.items()))
