"""One line per op, case, pass, dtype and backend: µs, GFLOP/s, GB/s, share of the roof, × PyTorch's speed.

    python bench/gpu/kernels.py [--device cuda] [--op OP] [--workload full] [--pass backward] [--json FILE]

The shapes are BERT-base's for a workload of lib/workloads.py (`full`), from the `testing.Case`s that the
tests use too. Every backend is interleaved with the plain PyTorch call: F.linear and F.gelu, F.layer_norm,
SDPA on the padded batch with its mask, …; for `linear_int8` the same F.linear on the weights in floating
point. Medians.

`of_roof` is the least time that the machine's roofs allow (`roofs.py`: arithmetic peak of the dtype, or
memory bandwidth, whichever takes longer) over the time taken; with tensors that stay in a cache it can
exceed 1. `*` marks the backend that serves by default. Backward is the backward alone, the gradients of
every input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.gpu import groups
from bench.lib import workloads
from bench.lib.kernels import PASSES, bench_case
from bench.lib.roofs import TAGS, Roofs
from fastbert import testing
from fastbert.runtime import dispatch
from fastbert.runtime.table import INFERENCE_ONLY


def rows(args: argparse.Namespace, roofs: Roofs, left: Callable[[], float]) -> Iterator[dict]:
    """Rows of every workload, op, dtype, pass and case; those beyond the budget say so."""
    device = torch.device(args.device)
    for workload in args.workload or ("full",):
        for op in args.op or dispatch.OPS:
            for dtype in (getattr(torch, name) for name in args.dtype or ("float32", "bfloat16")):
                for which in args.passes or PASSES:
                    if which == "backward" and op in INFERENCE_ONLY:
                        continue
                    for case in testing.bench_cases(op, workloads.lengths(workload)):
                        if left() > 0:
                            options = {"backward": which == "backward", "samples": args.samples}
                            yield from bench_case(case, workload, dtype, device, roofs=roofs, **options)
                            continue
                        name = f"{op}-{TAGS[dtype]}-{case.id}-{which}"[:200]
                        row = {"step": "kernels", "name": name, "status": "skipped", "workload": workload}
                        yield row | {"error": "the budget is spent"}


def main(argv: list[str] | None = None) -> int:
    """Time what the arguments name; print and record each row at once."""
    parser, known = groups.options(__doc__, samples=7), workloads.names()
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--workload", choices=known, action="append", help="a batch (may be repeated)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), action="append")
    parser.add_argument("--pass", choices=PASSES, action="append", dest="passes", help="default: both")
    args = groups.parsed(parser, argv)
    left, report = groups.timer(args), groups.begun(args)
    for row in rows(args, groups.with_roofs(report, args), left):
        report.row(row)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
