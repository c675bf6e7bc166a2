"""`fastbert warmup`: run the self-checks of the GPU kernels now, and keep their verdicts."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from fastbert.cli.usage import DTYPES, UsageError, device_of
from fastbert.runtime import dispatch
from fastbert.runtime.table import call_kinds
from fastbert.testing import checking, proving, serving, verdicts
from fastbert.testing.verdict_keys import Unit, name_of
from fastbert.testing.verdicts import FAILED, KILLED, PASSED, SLOWER, UNDECIDED, Verdict

# a slower kernel is no failure, since the next backend serves
_SAYS = {PASSED: "pass", FAILED: "FAIL", SLOWER: "slower", KILLED: "KILLED", UNDECIDED: "FAIL"}
_LINE = "{:>7}  {:<21}{:<8}{:<10}{:>9}  {}"
_SERVES = "{:<32}{:<10}{:<11}{}"


class _Now:
    """One line of progress on stderr: in place on a terminal, else every few seconds."""

    def __init__(self) -> None:
        self.in_place, self.begin = sys.stderr.isatty(), time.monotonic()
        self.width, self.last = 0, self.begin

    def __call__(self, text: str) -> None:
        """Show what is done now."""
        now = time.monotonic()
        if not self.in_place and now - self.last < 5.0:
            return
        self.last = now
        line = f"{now - self.begin:4.0f} s: {text}"
        print(line.ljust(self.width), end="\r" if self.in_place else "\n", file=sys.stderr, flush=True)
        self.width = len(line) if self.in_place else 0

    def clear(self) -> None:
        """Clear the line before a line of the table is printed."""
        if self.width:
            print(" " * self.width, end="\r", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    """Run the checks and print their verdicts; returns 1 if a kernel failed or has no verdict, else 0."""
    device = device_of(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    timeout = checking.SECONDS if args.timeout is None else args.timeout
    if not 0 < timeout < float("inf"):
        raise UsageError(f"--timeout {timeout}: expected a number of seconds above 0")
    dtypes = [DTYPES[name] for name in args.dtype] if args.dtype else None
    rows: list[dict[str, Any]] = []
    where, wanted, now = verdicts.folder(), proving.to_check(device, args.op, dtypes), _Now()
    if not args.json and wanted:
        print(
            f"verdicts on {device} are kept in {where}" if where else "verdicts are not kept: FASTBERT_CACHE="
        )
        print(_LINE.format("", "op", "backend", "dtype", "ms", "verdict"), flush=True)
    options = {"again": args.again, "seconds": timeout, "telling": now}
    for unit, found in proving.warm_up(device, args.op, dtypes, **options):
        row = _row(unit, device, found)
        rows.append(row)
        now.clear()
        if not args.json:
            verdict = _SAYS[found.outcome] + (row["beside"] if found.passed else f": {found.reason}")
            kept = f" (of {found.date})" if found.kept else ""
            kept = f" (proven at {found.commit[:9]}, {found.date[:10]})" if found.commit else kept
            ms = f"{found.seconds * 1e3:,.0f}"
            which = f"{len(rows)}/{len(wanted)}", unit.op, unit.backend, row["dtype"]
            print(_LINE.format(*which, ms, verdict + kept), flush=True)
    now.clear()
    choices = _choices(device, wanted)
    passed = all(row["outcome"] in (PASSED, SLOWER) for row in rows)
    if args.json:
        folder = None if where is None else str(where)
        report = {
            "device": str(device),
            "verdicts": folder,
            "passed": passed,
            "rows": rows,
            "serving": [vars(choice) for choice in choices],
        }
        print(json.dumps(report, indent=1))
    elif not rows:
        print(f"nothing needs a check on {device}: {why_none(device, args.op or dispatch.OPS)}")
    else:
        counts = Counter(row["outcome"] for row in rows)
        bad = len(rows) - counts[PASSED] - counts[SLOWER]
        print(f"\n{_SERVES.format('op', 'dtype', 'served by', 'why')}")
        for each in choices:
            print(_SERVES.format(each.op, each.dtype, each.backend, each.why))
        print()
        slow = f", {counts[SLOWER]} slower than the next backend" if counts[SLOWER] else ""
        print(f"{len(rows)} kernels on {device}, {bad} failed{slow}")
    return 0 if passed else 1


def _row(unit: Unit, device: torch.device, found: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    facts = ("passed", "outcome", "reason", "seconds", "kept", "date")
    return {
        **{"op": unit.op, "backend": unit.backend, "dtype": name_of(unit.dtype), "device": str(device)},
        **{name: getattr(found, name) for name in facts},
        "times": [time._asdict() for time in found.times],
        "beside": serving.beside(found, unit.op, device.type),
        "commit": found.commit,
    }


def _choices(device: torch.device, wanted: list[Unit]) -> list[serving.Choice]:
    """The backends that serve the ops and dtypes whose kernels were checked."""
    calls = dict.fromkeys((unit.op, unit.dtype) for unit in wanted)
    return [
        serving.choice(op, kind, device, dtype) for op, dtype in calls for kind in call_kinds(op, device.type)
    ]


def why_none(device: torch.device, ops: Sequence[str]) -> str:
    """Why no kernel of these ops needs a check."""
    if device.type == "cpu":
        return "only GPU kernels are checked before they serve"
    pairs = [(op, name) for name in dispatch.SELF_CHECKED for op in ops]
    having = [(op, name) for op, name in pairs if op in dispatch.backend_module(name).DTYPES]
    gaps = [(name, dispatch.unsupported_reason(name, op, device.type, None)) for op, name in having]
    reasons = dict.fromkeys(f"{name}: {reason}" for name, reason in gaps if reason)
    return "; ".join(reasons) or "these ops have no GPU kernel in the table"
