"""A training step beside transformers', on a GPU or a CPU: time, peak memory, share of the floor.

    python bench/gpu/training.py [--device cpu] [--models base large] [--budget SECONDS]

| step | what |
|---|---|
| `training` | forward, backward, fused AdamW step: ours, transformers (sdpa), torch.compile of it |
| `training_memory` | peak of two steps, each candidate in a process of its own |
| `attention` | attention alone, forward and backward with dropout, its bits saved and drawn again; SDPA |
| `footprint` | what a step keeps and needs on a GPU, counted on tensors without data |

BERT-base and -large, dropout 0.1, fp32 parameters, bf16 autocast (on a CPU fp32 too): masked tokens (15%)
and next sentence, and classification. A GPU trains base on `full` (32 x 512) and large on `train` (48 x 512),
a CPU base on `8x128` and `ragged16`, large on `8x128`.

All candidates of a group have the same weights, batch and optimizer and are timed turn by turn, each sample
one step, the device idle at both ends; medians. `grad_cosine` compares gradients before anything counts.
`of_floor` is the time that the real tokens' operations, forward and backward, take at this machine's measured
rate for the dtype, over the time of the step. A candidate that is missing or fails is a row with the reason.

The most important groups come first; `--budget` leaves out the rest and says so. torch.compile comes last.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import footprint, memory  # noqa: E402
from bench.lib import attention, plan, roofs, served, training, workloads  # noqa: E402
from bench.lib.engines import PACKAGES, compile_cache  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count, row_line  # noqa: E402

STEPS = ("training", "training_memory", "attention", "footprint")
BATCHES = {
    "cuda": {"base": ("full",), "large": ("train",)},
    "cpu": {"base": ("8x128", "ragged16"), "large": ("8x128",), "minilm": ("8x128",)},
}
DTYPES = {"cuda": ("bf16",), "cpu": ("bf16", "fp32")}
COMPILED = "torch_compile"
PLAIN = tuple(name for name in training.CANDIDATES if name != COMPILED)
# goals on an H200 for a step of pretraining in bf16: milliseconds, and ratios to the peer that is named
GOAL_MS = {("base", "full"): 22.0, ("large", "train"): 110.0}
GOALS = {(COMPILED, "median_ms"): 1.5, ("transformers", "peak_mib"): footprint.GOAL}
# seconds that a candidate takes on a GPU, where kernels compile and processes start; for a CPU see plan.py
GPU_SECONDS = {"training": 7.0, "training_memory": 20.0, "attention": 3.0, "footprint": 5.0, COMPILED: 90.0}
FOOTPRINT = {"base": "full", "large": "train", "tiny": "1x128"}
COLUMNS = ("model", "workload", "head", "candidate", "ms", "forward", "backward", "step")
LINE = "{:5} {:9} {:14} {:18} {:>9} {:>9} {:>9} {:>8} {:>8} {:>8} {:>9} {:>7}"
HEAD = LINE.format(*COLUMNS, "tflops", "of floor", "cosine", "spread")


def line(row: dict) -> str:
    """The printed form of a row."""
    if row["status"] == "skipped":
        return f"{row['name']:<60} skipped: {row['error']}"
    if row["status"] != "ok":
        return row_line(row)
    if row["step"] == "footprint":
        return footprint.line(row)
    if row["step"] == "training_memory":
        return memory.line(row)
    if row["step"] == "attention":
        return attention.line(row)
    if row["step"] != "training":
        return row_line(row)
    cosine = row["grad_cosine"]
    text = LINE.format(
        row["model"],
        row["workload"],
        row["head"],
        row["candidate"],
        f"{row['median_ms']:,.2f}",
        *(f"{row[part]:,.2f}" for part in training.PARTS),
        f"{row['gflops'] / 1e3:,.2f}",
        f"{row['of_floor']:.0%}",
        "" if cosine is None else f"{cosine:.5f}",
        f"{row['spread']:.1%}",
    )
    goal = row.get("goal_ms")
    return text if goal is None else f"{text}   goal: {goal:g} ms"


def ratios(rows: Iterable[dict]) -> list[dict]:
    """Our speed over each peer's, or our share of its memory; with the goal, if there is one."""
    keys = {"training": ("median_ms",), "training_memory": ("peak_mib", "above_mib")}
    keys |= {"footprint": ("peak_mib", "saved_mib"), "attention": ("median_ms",)}
    groups: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step"] in keys and row["status"] == "ok":
            name, tag = row["candidate"].split("-")
            what = (row["step"], row["model"], row["workload"], row["head"], tag, row.get("group"))
            groups.setdefault(what, {})[name] = row
    found = []
    for (step, model, workload, head, tag, _), group in groups.items():
        for name, key in (
            (n, k) for n in group if n != "fastbert" and "fastbert" in group for k in keys[step]
        ):
            ours, theirs = group["fastbert"][key], group[name][key]
            what = {"step": step, "model": model, "workload": workload, "head": head, "dtype": tag}
            ratio = theirs / ours if key == "median_ms" else ours / theirs
            goal = GOALS.get((name, key)) if _is_the_goals(step, model, workload, head, tag) else None
            found.append({**what, "theirs": name, "of": key, "ratio": ratio, "goal": goal})
    return found


def _is_the_goals(step: str, model: str, workload: str, head: str, tag: str) -> bool:
    """Whether a goal was set for this step: BERT's pretraining in bf16 on a GPU's batches."""
    asked = (model, workload) in GOAL_MS if step == "training" else (model, workload) == ("base", "full")
    return asked and (head, tag) == ("pretraining", "bf16")


def ratio_line(row: dict) -> str:
    """The printed form of a ratio."""
    where = f"{row['step']} {row['model']} {row['workload']} {row['head']} {row['dtype']}"
    kind = "times the speed" if row["of"] == "median_ms" else f"of the {row['of']}"
    text = f"# {where:<52} {row['ratio']:5.2f} {kind} of {row['theirs']}"
    if row["goal"] is None:
        return text
    least = row["of"] == "median_ms"
    met = row["ratio"] >= row["goal"] if least else row["ratio"] <= row["goal"]
    return f"{text}; goal: at {'least' if least else 'most'} {row['goal']:g}, {'met' if met else 'missed'}"


@dataclass(frozen=True)
class Group:
    """Candidates that are compared on one batch.

    Attributes:
        step: of STEPS.
        tag: "fp32" or "bf16".
        seconds: estimated.
    """

    step: str
    model: str
    workload: str
    head: str
    tag: str
    candidates: tuple[str, ...]
    seconds: float


def groups(args: argparse.Namespace, roof: roofs.Roofs) -> list[Group]:
    """What is measured together, the most important first."""
    found: list[tuple[int, Group]] = []
    plain = tuple(name for name in args.candidates if name in PLAIN)
    for model in args.models:
        for workload in args.workloads or BATCHES[args.device].get(model, ("1x128",)):
            for i, head in enumerate(args.heads):
                for tag in args.dtypes:
                    wanted = [(3 * i, "training", plain), (3 * i + 1, "training_memory", plain)]
                    if COMPILED in args.candidates:
                        wanted.append((7 + i, "training", (*PLAIN, COMPILED)))
                        if args.device == "cuda":  # a CPU's resident memory would be the compiler's
                            wanted.append((9 + i, "training_memory", (COMPILED,)))
                    for priority, step, who in wanted:
                        if step in args.steps and who:
                            seconds = estimate(step, model, workload, head, tag, who, args, roof)
                            found.append((priority, Group(step, model, workload, head, tag, who, seconds)))
            for tag in args.dtypes if "attention" in args.steps else ():
                who = attention.CANDIDATES
                seconds = estimate("attention", model, workload, "dropout", tag, who, args, roof)
                found.append((2, Group("attention", model, workload, "dropout", tag, who, seconds)))
        for i, head in enumerate(args.heads if "footprint" in args.steps else ()):
            seconds = GPU_SECONDS["footprint"] * len(plain)
            where = FOOTPRINT.get(model, footprint.WORKLOAD)
            found.append((3 * i + 2, Group("footprint", model, where, head, "bf16", plain, seconds)))
    # groups of one priority keep their order
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def estimate(
    step: str,
    model: str,
    workload: str,
    head: str,
    tag: str,
    who: tuple[str, ...],
    args: argparse.Namespace,
    roof: roofs.Roofs,
) -> float:
    """Seconds that a group takes."""
    if args.smoke:
        return 0.0
    if args.device == "cuda":
        slower = 2.0 if model == "large" else 1.0
        return slower * sum(GPU_SECONDS[COMPILED if name == COMPILED else step] for name in who)
    if step == "training":
        calls = args.samples + 1
        each = (plan.training_seconds(model, workload, f"{name}-{tag}", calls, roof, head) for name in who)
    elif step == "attention":
        work = attention.flops(workloads.lengths(workload), plan.MODELS[model])
        return len(who) * (attention.SECONDS + args.samples * work / (0.1 * roof.gflops[tag] * 1e9))
    else:
        each = (plan.memory_seconds(model, workload, f"{name}-{tag}", roof, head) for name in who)
    return sum(each)


class Benchmark:
    """One run over the groups."""

    def __init__(self, args: argparse.Namespace, roof: roofs.Roofs):
        self.args, self.roofs, self.begin = args, roof, time.monotonic()

    def left(self) -> float:
        """Seconds of the budget that are not spent; without a budget there is no end."""
        return self.args.budget - (time.monotonic() - self.begin) if self.args.budget else float("inf")

    def rows(self) -> Iterator[dict]:
        """Every row of the run."""
        for group in groups(self.args, self.roofs):
            if self.left() < group.seconds:
                reason = f"{max(0.0, self.left()):.0f} s left of --budget {self.args.budget:.0f}"
                yield from self.failed(group, "skipped", f"{reason}, about {group.seconds:.0f} s needed")
                continue
            try:
                yield from self.group(group)
            # for example, the batch itself does not fit
            except Exception as error:
                yield from self.failed(group, "error", reason_of(error))
            torch._dynamo.reset()
            gc.collect()
            if self.args.device == "cuda":
                torch.cuda.empty_cache()  # the memory of the next group's processes

    @staticmethod
    def failed(group: Group, status: str, reason: str) -> Iterator[dict]:
        """A row for every candidate of a group that was not measured."""
        compiled = COMPILED in group.candidates
        for name in (COMPILED,) if compiled else group.candidates:
            who = f"{name}-{group.tag}"
            facts = {"model": group.model, "workload": group.workload, "candidate": who, "head": group.head}
            name = f"{group.step}-{who}-{group.model}-{group.workload}-{group.head}"
            yield {"step": group.step, "name": name, "status": status, "error": reason, **facts}

    def group(self, group: Group) -> Iterator[dict]:
        """Rows of one group."""
        args, model = self.args, plan.MODELS[group.model]
        if group.step == "footprint":
            yield from footprint.rows(model, group.workload, group.head, group.tag, group.candidates)
            return
        lengths = workloads.lengths(group.workload)
        if args.smoke:
            lengths = tuple(max(2, n // 32) for n in lengths[:3])
        if group.step == "attention":
            yield from attention.rows(
                model, group.workload, lengths, group.tag, args.device, args.samples, self.roofs
            )
            return
        if group.step == "training_memory":
            engines = tuple(f"{name}-{group.tag}" for name in group.candidates)
            timeout = min(memory.TIMEOUT_SECONDS, max(1.0, self.left()))
            options = {"timeout": timeout, "head": group.head, "device": args.device}
            yield from memory.bench_memory(
                group.model, group.workload, engines, args.threads, lengths, **options
            )
            return
        compiled = COMPILED in group.candidates
        for row in training.bench_training(
            model,
            group.workload,
            group.tag,
            wanted=group.candidates,
            head=group.head,
            samples=args.samples,
            lengths=lengths,
            device=args.device,
            roofs=self.roofs,
        ):
            goal = GOAL_MS.get((group.model, group.workload)) if args.device == "cuda" else None
            if (
                goal is not None
                and row["name"].startswith("training-fastbert")
                and group.head == "pretraining"
            ):
                row["goal_ms"] = goal
            tag = "bf16 autocast" if group.tag == "bf16" else group.tag
            served_by = served.backends(row["candidate"], args.device, tag)
            yield row | {"group": "compile" if compiled else "plain", "backends": served_by}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/training.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = tuple(plan.MODELS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=known, default=["base", "large"], metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=workloads.names(), metavar="WORKLOAD")
    parser.add_argument("--heads", nargs="+", choices=tuple(training.HEADS), default=list(training.HEADS))
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), help="bf16 is autocast")
    candidates = training.CANDIDATES
    parser.add_argument("--candidates", nargs="+", choices=candidates, default=list(candidates))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--samples", type=count, default=7, help="steps of each candidate that count")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=count, default=threads, help="of every candidate, on a CPU")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds in all; 0: no end")
    parser.add_argument("--roofs", type=Path, help="the probe's file: its roofs are not measured again")
    parser.add_argument("--json", type=Path, help="write the rows here, after each one (*.jsonl: appended)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="tiny batches and roofs: tries the code only")
    args = parser.parse_args(argv)
    if not 0 <= args.budget < float("inf"):
        parser.error(f"--budget: got {args.budget}, expected seconds, or 0 for no end")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: got cuda, but torch finds no CUDA device here")
    args.dtypes = args.dtypes or list(DTYPES[args.device])
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name; every row is printed and recorded at once."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "roofs", "note")}
    report = Report(args.json, settings, args.note, line)
    environment = describe(torch.device(args.device))
    environment["versions"] = {name: package_version(name) for name in PACKAGES}
    report.data |= {"environment": environment, "weights": "random"}
    report.save()
    print(f"# {environment['device']}: torch {torch.__version__}", flush=True)
    report.data["self_checks"] = served.prove(args.device)
    roof = roofs.known_or_measured(args.roofs, args.device, args.smoke, report.row)
    report.data["roofs"] = asdict(roof)
    report.save()
    print(HEAD, flush=True)
    with compile_cache():
        for row in Benchmark(args, roof).rows():
            report.row(row)
    report.data["ratios"] = ratios(report.data["rows"])
    if others := served.told((row.get("backends", {}) for row in report.data["rows"]), args.device):
        print(f"# not by the first backend: {others}", flush=True)
    for row in report.data["ratios"]:
        print(ratio_line(row), flush=True)
    report.data["finished"] = True
    report.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
