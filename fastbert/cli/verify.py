"""`fastbert verify`: the numerics table, each op, backend and dtype beside eager PyTorch."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import numpy as np
import torch

from fastbert import testing
from fastbert.cli.usage import DTYPES, UsageError, device_of
from fastbert.runtime import dispatch
from fastbert.testing import triton_interpreter

_log = logging.getLogger("fastbert")


def run(args: argparse.Namespace) -> int:
    """Print the table; returns 0 if all checks passed, else 1."""
    if triton_interpreter.interpreting():
        # before a kernel is imported: Triton's interpreter computes bfloat16 wrong
        triton_interpreter.choose()
    device = device_of(args.device)
    ops, backends = args.op or list(dispatch.OPS), args.backend or list(dispatch.BACKENDS)
    rows: list[testing.Row] = []
    gaps: list[str] = []
    if not args.json:
        print(_LINE.format("op", "backend", "dtype", "checks", "max error", "eager's", "result"))
    for op in ops:
        for backend in backends:
            for dtype_name in args.dtype or list(DTYPES):
                reason = dispatch.unsupported_reason(backend, op, device.type, DTYPES[dtype_name])
                if reason is not None:
                    gaps.append(f"{op} by {backend} in {dtype_name}: {reason}")
                    continue
                group = _verify_group(op, backend, dtype_name, device, args.quick)
                rows += group
                if not args.json:
                    _print_group(op, backend, dtype_name, group, args.all)
    if not rows:
        raise UsageError(f"nothing to verify on {device.type}: {'; '.join(gaps[:3])}")
    passed = all(row.passed for row in rows)
    if args.json:
        report = {"device": str(device), "passed": passed, "rows": [_finite(row._asdict()) for row in rows]}
        print(json.dumps(report, indent=1))
    else:
        failed = sum(not row.passed for row in rows)
        print(f"{len(rows)} checks on {device}, {failed} failed")
    return 0 if passed else 1


_LINE = "{:<14}{:<11}{:<10}{:>7}  {:>10}  {:>10}  {}"


def _verify_group(
    op: str, backend: str, dtype_name: str, device: torch.device, quick: bool
) -> list[testing.Row]:
    rows: list[testing.Row] = []
    try:
        rows.extend(testing.verify([op], [backend], [DTYPES[dtype_name]], device, quick=quick))
    except Exception as error:  # a kernel that raises has failed; all other kernels are still checked
        _log.debug("verify: %s by %s in %s", op, backend, dtype_name, exc_info=True)
        inf, reason = float("inf"), f"{type(error).__name__}: {error}"
        names = op, "-", backend, dtype_name, str(device), "-"
        rows.append(testing.Row(*names, inf, inf, inf, inf, False, reason))
    return rows


def _print_group(op: str, backend: str, dtype_name: str, group: list[testing.Row], every: bool) -> None:
    if not group:
        print(_LINE.format(op, backend, dtype_name, 0, "-", "-", "no cases"))
        return
    worst = max(group, key=lambda row: row.max_error)
    result = "pass" if all(row.passed for row in group) else "FAIL"
    errors = (f"{worst.max_error:.3g}", f"{worst.eager_max_error:.3g}")
    print(_LINE.format(op, backend, dtype_name, len(group), *errors, result), flush=True)
    for row in group:
        if every or not row.passed:
            verdict = "pass" if row.passed else f"FAIL: {row.reason}"
            errors = f"{row.max_error:.3g}, eager's {row.eager_max_error:.3g}"
            print(f"    {row.case} {row.quantity}: {errors}  {verdict}")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for infinity, which JSON lacks."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in row.items()}
