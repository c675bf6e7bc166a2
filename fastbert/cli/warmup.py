"""`fastbert warmup`: run the self-checks of the GPU kernels now, and keep their verdicts."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence

import torch

from fastbert.cli.usage import DTYPES, UsageError, device_of
from fastbert.runtime import dispatch
from fastbert.testing import verdicts, warmup
from fastbert.testing.verdicts import FAILED, KILLED, PASSED, SLOWER, UNDECIDED

# A slower kernel is no failure: the next backend serves.
_SAYS = {PASSED: "pass", FAILED: "FAIL", SLOWER: "slower", KILLED: "KILLED", UNDECIDED: "FAIL"}
_LINE = "{:<14}{:<11}{:<10}{:>10}  {}"


def run(args: argparse.Namespace) -> int:
    """Run the checks and print their verdicts; returns 1 if a kernel failed, or has no verdict; else 0."""
    device = device_of(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    timeout = warmup.SECONDS if args.timeout is None else args.timeout
    if not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout {timeout}: expected a number of seconds above 0")
    dtypes = [DTYPES[name] for name in args.dtype] if args.dtype else None
    rows: list[warmup.Result] = []
    where = verdicts.folder()
    if not args.json and warmup.wanted(device, args.op, dtypes):
        print(
            f"verdicts on {device} are kept in {where}" if where else "verdicts are not kept: FASTBERT_CACHE="
        )
        print(_LINE.format("op", "backend", "dtype", "ms", "verdict"), flush=True)
    for row in warmup.run(device, args.op, dtypes, again=args.again, seconds=timeout):
        rows.append(row)
        if not args.json:
            verdict = _SAYS[row.outcome] + (row.beside if row.passed else f": {row.reason}")
            kept = f" (of {row.date})" if row.kept else ""
            ms = f"{row.seconds * 1e3:,.0f}"
            print(_LINE.format(row.op, row.backend, row.dtype, ms, verdict + kept), flush=True)
    passed = all(row.outcome in (PASSED, SLOWER) for row in rows)
    if args.json:
        folder = None if where is None else str(where)
        report = {
            "device": str(device),
            "verdicts": folder,
            "passed": passed,
            "rows": [vars(row) | {"times": [time._asdict() for time in row.times]} for row in rows],
        }
        print(json.dumps(report, indent=1))
    elif not rows:
        print(f"nothing needs a check on {device}: {why_none(device, args.op or dispatch.OPS)}")
    else:
        counts = Counter(row.outcome for row in rows)
        bad = len(rows) - counts[PASSED] - counts[SLOWER]
        slow = f", {counts[SLOWER]} slower than the next backend" if counts[SLOWER] else ""
        print(f"{len(rows)} kernels on {device}, {bad} failed{slow}")
    return 0 if passed else 1


def why_none(device: torch.device, ops: Sequence[str]) -> str:
    """Why no kernel of these ops has to pass a check."""
    if device.type == "cpu":
        return "only GPU kernels are checked before they serve"
    pairs = [(op, name) for name in dispatch.SELF_CHECKED for op in ops]
    having = [(op, name) for op, name in pairs if op in dispatch.backend_module(name).DTYPES]
    gaps = [(name, dispatch.unsupported_reason(name, op, device.type, None)) for op, name in having]
    told = dict.fromkeys(f"{name}: {reason}" for name, reason in gaps if reason)
    return "; ".join(told) or "no GPU kernel of theirs is in the table"
