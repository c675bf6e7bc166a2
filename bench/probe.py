"""Measure the roofs of this machine: `python bench/probe.py [--json FILE]`.

It has two steps: matrix, then bandwidth. A short `--budget` drops bandwidth, and a line reports this.

As soon as a row is measured, a line is printed and the JSON file is replaced atomically: a kill loses
nothing. A row that fails is recorded with its error, and so is a step.

Needs only torch. The peers' encoders are measured by the suite and by `make gpu`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from bench.lib.machine import describe, read_clocks
from bench.lib.probe_steps import STEPS, Bench, reason_of
from bench.lib.report import Report, count
from bench.lib.timing import synchronize

BUDGET_SECONDS = {"cuda": 300.0, "cpu": 150.0}


def run_step(name: str, bench: Bench, report: Report) -> None:
    """Run one step and record how it ended."""
    start, error = time.monotonic(), None
    bench.step = name
    try:
        STEPS[name](bench)
        synchronize(bench.device)
        bench.free()
    except Exception as caught:
        error = reason_of(caught)
    status = "ok" if error is None else "failed"
    report.step(name, status, time.monotonic() - start, error, read_clocks(bench.device))


def run(args: argparse.Namespace) -> int:
    """Plan the steps and run them; returns the exit status of the command."""
    begin = time.monotonic()
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: got cuda, but torch finds no CUDA device here")
    budget = args.budget if args.budget is not None else BUDGET_SECONDS[name]
    settings = {"device": args.device, "threads": args.threads, "budget_s": budget}
    report = Report(args.json, settings | {"only": args.only, "smoke": args.smoke}, args.note)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    torch.manual_seed(0)
    environment = report.data["environment"] = describe(device)
    report.save()
    print(f"# {environment['device']}: torch {environment['torch']}, budget {budget:.0f} s", flush=True)
    bench = Bench(device, args.smoke, report.row)
    for step in args.only or STEPS:
        if time.monotonic() - begin < budget:
            run_step(step, bench, report)
        else:
            report.step(step, "skipped", 0.0, "budget")
    report.end(seconds=round(time.monotonic() - begin, 2))
    print(f"# done in {report.data['seconds']:.1f} s; kept under bench/results/{environment['slug']}/")
    return 0


def positive(text: str) -> float:
    """A finite number of seconds above zero."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="probe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, help="file to write: replaced after every row; a *.jsonl is appended to"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument(
        "--budget", type=positive, help="seconds in all (default: 300 on a GPU, 150 on a CPU)"
    )
    parser.add_argument("--only", action="append", choices=tuple(STEPS), help="may be repeated")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: tries the code only")
    args = parser.parse_args(argv)
    try:
        return run(args)
    except ValueError as error:
        print(f"probe: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
