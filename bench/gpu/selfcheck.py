"""The self-checks that first use would run, so that none runs while something is timed.

    python bench/gpu/selfcheck.py [--json FILE] [--dtype bf16]

Each verdict is a row of FILE, from which `prove.py merge` makes the table of proofs that is shipped. Kernels
that the table proves already are not checked again. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.lib import proven
from bench.lib.machine import describe
from bench.lib.report import Report
from fastbert.testing import proving


def line(row: dict) -> str:
    ratios = ", ".join(f"{ms / other_ms:.2f}" for _, _, ms, _, other_ms, *_ in row["times"])
    return f"{row['outcome']:<9} {row['name']:<36} {row['reason'] or ratios}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="selfcheck", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="file of rows")
    parser.add_argument("--budget", type=float, default=80.0, help="most seconds for one kernel")
    names = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
    parser.add_argument("--dtype", choices=names, action="append", help="default: bf16 and fp32")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    report = Report(args.json, {"device": args.device}, None, line)
    report.data["environment"] = describe(device)
    report.save()
    dtypes = [names[name] for name in args.dtype or ("bf16", "fp32")]
    for unit, found in proving.warm_up(device, dtypes=dtypes, seconds=args.budget):
        report.row(proven.row_of(unit, found, device))
    return int(any(row["status"] == "failed" for row in report.data["rows"]))


if __name__ == "__main__":
    sys.exit(main())
