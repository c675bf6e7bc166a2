"""One line per op, case, pass, dtype and backend: µs, GFLOP/s, GB/s, share of the roof, × PyTorch's speed.

    python bench/gpu/kernels.py [--device cuda] [--op OP] [--workload full] [--pass backward] [--json FILE]

The shapes are BERT-base's for a workload of lib/workloads.py (`8x128` on a CPU, `full` on a GPU), from the
`testing.Case`s that the tests use too. Every backend is timed turn by turn with what a PyTorch user would
call: F.linear and F.gelu, F.layer_norm, SDPA on the padded batch with its mask, …; for `linear_int8` the same
F.linear on the weights in floating point. Medians.

`of_roof` is the least time that the machine's roofs allow (`roofs.py`: arithmetic peak of the dtype, or
memory bandwidth, whichever takes longer) over the time taken; with tensors that stay in a cache it can
exceed 1. `*` marks the backend that serves by default. Backward is the backward alone, the gradients of
every input.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench.lib import roofs as machine_roofs  # noqa: E402
from bench.lib import workloads  # noqa: E402
from bench.lib.kernels import HEAD, PASSES, bench_workload, line  # noqa: E402
from bench.lib.machine import describe  # noqa: E402
from bench.lib.report import Report, count  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402


def seconds_left(begin: float, budget: float) -> float:
    """Seconds left of a budget that began at `begin` on time.monotonic()."""
    return budget - (time.monotonic() - begin)


def main() -> int:
    """Time what the arguments name; print and record each row at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=dispatch.OPS, action="append", help="only this op (may be repeated)")
    parser.add_argument("--device", default="cpu")
    known = workloads.names()
    parser.add_argument("--workload", choices=known, action="append", help="a batch (may be repeated)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), action="append")
    parser.add_argument("--pass", choices=PASSES, action="append", dest="passes", help="default: both")
    parser.add_argument("--threads", type=count, help="threads on a CPU")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--smoke", action="store_true", help="tiny roofs: tries the code only")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    begin = time.monotonic()
    batches = args.workload or ["full" if device.type == "cuda" else "8x128"]
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "roofs")}
    settings |= {"workload": batches}
    report = Report(args.json, settings, None, line)
    report.data["environment"] = describe(device)
    print(
        f"# {report.data['environment']['device']}; torch {torch.__version__}; {', '.join(batches)}",
        flush=True,
    )
    roofs = machine_roofs.known_or_measured(args.roofs, device, args.smoke, report.row)
    report.data["roofs"] = asdict(roofs)
    print(HEAD, flush=True)
    dtypes = tuple(getattr(torch, name) for name in args.dtype or ("float32", "bfloat16"))
    chosen = tuple(args.op or dispatch.OPS), dtypes, tuple(args.passes or PASSES)
    for workload in batches:
        left = functools.partial(seconds_left, begin, args.budget)
        for row in bench_workload(workload, device, roofs, *chosen, left):
            report.row(row)
    report.data["finished"] = True
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
