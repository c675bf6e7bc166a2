"""What the scripts that measure group by group share: options, the run within a budget, its record.

A group is the candidates that are timed turn by turn on one batch. The most important come first; the budget
leaves out the rest and says so. A group that fails has rows with the reason, and the next one is measured.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.lib import roofs, served
from bench.lib.engines import compile_cache
from bench.lib.machine import describe, package_version
from bench.lib.probe_steps import reason_of
from bench.lib.report import Report, count

COMPILED = "torch_compile"


@dataclass(frozen=True, kw_only=True)
class Group(ABC):
    """Candidates that are compared on one batch.

    Attributes:
        seconds: that must be left of the budget.
    """

    model: str
    workload: str
    candidates: tuple[str, ...]
    seconds: float

    @property
    def compiled(self) -> bool:
        """Whether it is there for torch.compile; others are in it only to be compared with."""
        return any(name.partition("-")[0] == COMPILED for name in self.candidates)

    @property
    def kind(self) -> str:
        """A row's `group`: the same candidates are also timed without torch.compile."""
        return "compile" if self.compiled else "plain"

    @abstractmethod
    def facts(self, candidate: str) -> dict:
        """What a row says of a candidate before it is measured: step, name, model, workload, candidate."""

    def without_a_time(self, status: str, reason: str) -> Iterator[dict]:
        """A row for every candidate that was not measured; of one for torch.compile only that."""
        for name in self.candidates:
            if not self.compiled or name.partition("-")[0] == COMPILED:
                yield self.facts(name) | {"status": status, "error": reason}


class Run(ABC):
    """One run over the groups."""

    def __init__(self, args: argparse.Namespace, roof: roofs.Roofs):
        self.args, self.roofs, self.begin = args, roof, time.monotonic()

    @abstractmethod
    def groups(self) -> Iterable[Group]:
        """What the arguments name, the most important first."""

    @abstractmethod
    def measure(self, group: Group) -> Iterator[dict]:
        """Rows of one group."""

    def left(self) -> float:
        """Seconds of the budget that are not spent; without a budget there is no end."""
        return self.args.budget - (time.monotonic() - self.begin) if self.args.budget else float("inf")

    def rows(self) -> Iterator[dict]:
        """Every row of the run."""
        for group in self.groups():
            if self.left() < group.seconds:
                reason = f"{max(0.0, self.left()):.0f} s left of --budget {self.args.budget:.0f}"
                yield from group.without_a_time("skipped", f"{reason}, about {group.seconds:.0f} s needed")
                continue
            try:
                yield from self.measure(group)
            # for example, the batch itself does not fit
            except Exception as error:
                yield from group.without_a_time("error", reason_of(error))
            torch._dynamo.reset()
            gc.collect()
            if self.args.device == "cuda":
                torch.cuda.empty_cache()  # the memory of the next group's processes

    def lengths(self, every: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of a batch; of a smoke run a few short ones."""
        return tuple(max(2, n // 32) for n in every[:3]) if self.args.smoke else every


def add_options(parser: argparse.ArgumentParser, samples: int) -> None:
    """The options that every such script has; `samples` of each candidate are the default."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=count, default=samples, help="of each candidate in a group")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds in all; 0: no end")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and roofs: tries the code only")


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message where the options of `add_options` cannot be met."""
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget: got {args.budget}, expected seconds, or 0 for no end")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no CUDA device here")


def record(
    args: argparse.Namespace,
    run: Callable[[argparse.Namespace, roofs.Roofs], Run],
    *,
    head: str,
    line: Callable[[dict], str],
    ratios: Callable[[Iterable[dict]], list[dict]],
    ratio_line: Callable[[dict], str],
    packages: Iterable[str],
) -> int:
    """Measure all groups; every row is printed and recorded at once, the ratios at the end.

    Args:
        run: makes the run from the arguments and the machine's roofs.
        head: of the printed table.
        line: the printed form of a row.
        ratios: of the rows.
        ratio_line: the printed form of a ratio.
        packages: whose versions are recorded.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "roofs", "note")}
    report = Report(args.json, settings, args.note, line)
    environment = describe(torch.device(args.device))
    environment["versions"] = {name: package_version(name) for name in packages}
    report.data |= {"environment": environment, "weights": "random"}
    report.save()
    print(f"# {environment['device']}: torch {torch.__version__}", flush=True)
    report.data["self_checks"] = served.prove(args.device)
    roof = roofs.known_or_measured(args.roofs, args.device, args.smoke, report.row)
    report.data["roofs"] = asdict(roof)
    report.save()
    print(head, flush=True)
    with compile_cache():
        for row in run(args, roof).rows():
            report.row(row)
    report.data["ratios"] = ratios(report.data["rows"])
    if others := served.told((row.get("backends", {}) for row in report.data["rows"]), args.device):
        print(f"# not by the first backend: {others}", flush=True)
    for row in report.data["ratios"]:
        print(ratio_line(row), flush=True)
    report.data["finished"] = True
    report.save()
    return 0
