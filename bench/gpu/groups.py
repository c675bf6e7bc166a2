"""What the scripts of `make gpu` share: options, groups of candidates within a budget, ratios, the record.

A group is the candidates that are interleaved on one batch. The most important groups come first; the run
prints the groups that the budget leaves out. A group that fails has rows with the reason, and the next group
is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.lib import roofs, served
from bench.lib.engines import PACKAGES, compile_cache
from bench.lib.machine import describe, package_version
from bench.lib.probe_steps import reason_of
from bench.lib.report import Report, count, row_line
from bench.lib.turns import precision

COMPILED = "torch_compile"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Candidates that are compared on one batch.

    Attributes:
        step: what is measured, such as "encoder".
        candidates: with their precision, such as "fastbert-bf16".
        rows: measures them.
        seconds: that must be left of the budget.
        head: one of training.HEADS, where something is trained.
    """

    step: str
    model: str
    workload: str
    candidates: tuple[str, ...]
    rows: Callable[[], Iterable[dict]]
    seconds: float = 0.0
    head: str | None = None

    @property
    def compiled(self) -> bool:
        """Whether it is there for torch.compile; others are in it only to be compared with."""
        return any(name.startswith(COMPILED) for name in self.candidates)

    def without_a_time(self, status: str, reason: str) -> Iterator[dict]:
        """A row for every candidate that was not measured; of one for torch.compile only that."""
        facts = {"model": self.model, "workload": self.workload} | ({"head": self.head} if self.head else {})
        for name in self.candidates:
            if not self.compiled or name.startswith(COMPILED):
                parts = (self.step, name, self.model, self.workload, self.head)
                row = {"step": self.step, "name": "-".join(filter(None, parts)), "status": status}
                yield row | {"error": reason, "candidate": name, **facts}


def measured(
    groups: Iterable[Group], left: Callable[[], float], device: str, budget: float = 0.0
) -> Iterator[dict]:
    """Every row of the groups; `group` tells rows of the same turns from others."""
    for group in groups:
        kind = "compile" if group.compiled else "plain"
        if left() < group.seconds:
            reason = f"{max(0.0, left()):.0f} s left of --budget {budget:.0f}"
            yield from group.without_a_time("skipped", f"{reason}, about {group.seconds:.0f} s needed")
            continue
        try:
            for row in group.rows():
                yield row | {"group": kind, "backends": served.of_row(row, device)}
        except Exception as error:  # for example, the batch itself does not fit
            yield from group.without_a_time("error", reason_of(error))
        torch._dynamo.reset()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()  # the memory of the next group's processes


def ratios(rows: Iterable[dict]) -> list[dict]:
    """Our speed over each peer's, or our share of its memory, from rows of the same group and precision.

    Of the encoder, eager calls are compared with eager ones and graphs with graphs. transformers' model after
    `fastbert.accelerate` is no peer: its layers are ours.
    """
    found: list[dict] = []
    timed: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["status"] == "ok" and "candidate" in row:
            tag = precision(row["candidate"])
            key = tuple(row.get(name) for name in ("step", "model", "workload", "head", "group"))
            timed.setdefault((*key, tag, _graphed(row)), []).append(row)
    for (step, model, workload, head, *_), group in timed.items():
        what = {"step": step, "model": model, "workload": workload, "head": head}
        ours = next((row for row in group if _engine(row) in ("fastbert", "fastbert_graphs")), {})
        peers = [row for row in group if row is not ours and _engine(row) != "accelerated"]
        for row, of in itertools.product(peers, ("median_ms", "peak_mib", "above_mib", "saved_mib")):
            if of in ours and of in row:
                both = {"ours": ours["candidate"], "theirs": row["candidate"], "of": of}
                over = row[of] / ours[of] if of == "median_ms" else ours[of] / row[of]
                found.append({**what, **both, "ratio": over})
    return found


def _engine(row: dict) -> str:
    return row["candidate"].partition("-")[0]


def _graphed(row: dict) -> bool:
    """Whether an encoder's engine replays CUDA graphs; torch.compile in the mode that is timed does."""
    return row["step"] == "encoder" and _engine(row).endswith(("_graphs", COMPILED))


def ratio_line(row: dict) -> str:
    where = " ".join(filter(None, (row["step"], row["model"], row["workload"], row["head"])))
    kind = "times the speed" if row["of"] == "median_ms" else f"of the {row['of']}"
    return f"# {where:<42} {row['ours']:22} {row['ratio']:5.2f} {kind} of {row['theirs']}"


def options(about: str, samples: int) -> argparse.ArgumentParser:
    """A parser with the options that every script has; `samples` of each candidate are the default."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--samples", type=count, default=samples, help="samples per candidate")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds in all; 0: no limit")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and roofs: tries the code only")
    return parser


def parsed(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The command line; ends with a message where an option of `options` cannot be met."""
    args = parser.parse_args(argv)
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget: got {args.budget}, expected seconds, or 0 for no limit")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no CUDA device here")
    return args


def timer(args: argparse.Namespace) -> Callable[[], float]:
    """A function that returns the seconds left of the budget, which begins now; infinity without a budget."""
    end = time.monotonic() + args.budget if args.budget else float("inf")
    return lambda: end - time.monotonic()


@contextlib.contextmanager
def recorded(report: Report, row: dict, left: Callable[[], float], needed: float) -> Iterator[None]:
    """Measure within the block: an error, or fewer seconds left than are needed, is a row like `row`."""
    try:
        if left() < needed:
            raise TimeoutError(f"{left():.0f} s of --budget are left, {needed:.0f} needed")
        yield
    except Exception as error:
        before = f" after {reason_of(error.__context__)}" if error.__context__ else ""
        report.row(row | {"status": "error", "error": reason_of(error) + before})


def begun(args: argparse.Namespace, line: Callable[[dict], str] = row_line) -> Report:
    """The run's file with its head."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "roofs", "note")}
    report = Report(args.json, settings, args.note, line)
    environment = describe(torch.device(args.device))
    environment["versions"] = {name: package_version(name) for name in (*PACKAGES, "flash_attn")}
    report.data["environment"] = environment
    report.save()
    print(f"# {environment['device']}: torch {torch.__version__}", flush=True)
    return report


def with_roofs(report: Report, args: argparse.Namespace) -> roofs.Roofs:
    """The machine's roofs, in the record too."""
    found = roofs.known_or_measured(args.roofs, torch.device(args.device), args.smoke, report.row)
    report.data["roofs"] = asdict(found)
    report.save()
    return found


def lengths(args: argparse.Namespace, every: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of a batch; of a smoke run a few short ones."""
    return tuple(max(2, n // 32) for n in every[:3]) if args.smoke else every


def record(
    args: argparse.Namespace,
    plan: Callable[[argparse.Namespace, roofs.Roofs, Callable[[], float]], Iterable[Group]],
) -> int:
    """Measure all groups; every row is printed and recorded at once, the ratios at the end.

    Args:
        plan: makes the groups from the arguments, the roofs and what is left of the budget.
    """
    left, report = timer(args), begun(args)
    report.data["weights"] = "random"
    report.data["self_checks"] = served.prove(args.device)
    groups = plan(args, with_roofs(report, args), left)
    with compile_cache():
        for row in measured(groups, left, args.device, args.budget):
            report.row(row)
    report.data["ratios"] = ratios(report.data["rows"])
    if others := served.told((row.get("backends", {}) for row in report.data["rows"]), args.device):
        print(f"# not by the first backend: {others}", flush=True)
    for row in report.data["ratios"]:
        print(ratio_line(row), flush=True)
    report.end()
    return 0
