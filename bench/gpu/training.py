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
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import footprint, memory  # noqa: E402
from bench.gpu import groups  # noqa: E402
from bench.gpu.groups import COMPILED  # noqa: E402
from bench.lib import attention, roofs, served, training, workloads  # noqa: E402
from bench.lib import plan as costs  # noqa: E402
from bench.lib.engines import PACKAGES  # noqa: E402
from bench.lib.report import count, row_line  # noqa: E402

STEPS = ("training", "training_memory", "attention", "footprint")
BATCHES = {
    "cuda": {"base": ("full",), "large": ("train",)},
    "cpu": {"base": ("8x128", "ragged16"), "large": ("8x128",), "minilm": ("8x128",)},
}
DTYPES = {"cuda": ("bf16",), "cpu": ("bf16", "fp32")}
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
    measured: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["step"] in keys and row["status"] == "ok":
            name, tag = row["candidate"].split("-")
            what = (row["step"], row["model"], row["workload"], row["head"], tag, row.get("group"))
            measured.setdefault(what, {})[name] = row
    found = []
    for (step, model, workload, head, tag, _), group in measured.items():
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


@dataclass(frozen=True, kw_only=True)
class Steps(groups.Group):
    """Candidates that are compared on one batch.

    Attributes:
        step: of STEPS.
        tag: "fp32" or "bf16".
    """

    step: str
    head: str
    tag: str

    def facts(self, candidate: str) -> dict:
        """Step, name, model, workload, candidate, head."""
        who = f"{candidate}-{self.tag}"
        facts = {"model": self.model, "workload": self.workload, "candidate": who, "head": self.head}
        name = f"{self.step}-{who}-{self.model}-{self.workload}-{self.head}"
        return {"step": self.step, "name": name, **facts}


def plan(args: argparse.Namespace, roof: roofs.Roofs) -> list[Steps]:
    """What is measured together, the most important first."""
    found: list[tuple[int, Steps]] = []
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
                    found += [
                        (priority, planned(args, roof, step, model, workload, head, tag, who))
                        for priority, step, who in wanted
                        if step in args.steps and who
                    ]
            for tag in args.dtypes if "attention" in args.steps else ():
                who = attention.CANDIDATES
                found.append((2, planned(args, roof, "attention", model, workload, "dropout", tag, who)))
        for i, head in enumerate(args.heads if "footprint" in args.steps else ()):
            where = FOOTPRINT.get(model, footprint.WORKLOAD)
            seconds = GPU_SECONDS["footprint"] * len(plain)
            what = dict(step="footprint", model=model, workload=where, head=head, tag="bf16")
            found.append((3 * i + 2, Steps(**what, candidates=plain, seconds=seconds)))
    # groups of one priority keep their order
    return [group for _, group in sorted(found, key=lambda item: item[0])]


def planned(
    args: argparse.Namespace,
    roof: roofs.Roofs,
    step: str,
    model: str,
    workload: str,
    head: str,
    tag: str,
    who: tuple[str, ...],
) -> Steps:
    """A group with the seconds that it takes."""
    seconds = estimate(step, model, workload, head, tag, who, args, roof)
    what = dict(step=step, model=model, workload=workload, head=head, tag=tag)
    return Steps(**what, candidates=who, seconds=seconds)


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
        each = (costs.training_seconds(model, workload, f"{name}-{tag}", calls, roof, head) for name in who)
    elif step == "attention":
        work = attention.flops(workloads.lengths(workload), costs.MODELS[model])
        return len(who) * (attention.SECONDS + args.samples * work / (0.1 * roof.gflops[tag] * 1e9))
    else:
        each = (costs.memory_seconds(model, workload, f"{name}-{tag}", roof, head) for name in who)
    return sum(each)


class Run(groups.Run):
    """One run over the groups."""

    def groups(self) -> list[Steps]:
        """What the arguments name."""
        return plan(self.args, self.roofs)

    def measure(self, group: Steps) -> Iterator[dict]:
        """Rows of one group."""
        args, model = self.args, costs.MODELS[group.model]
        if group.step == "footprint":
            yield from footprint.rows(model, group.workload, group.head, group.tag, group.candidates)
            return
        lengths = self.lengths(workloads.lengths(group.workload))
        if group.step == "attention":
            yield from attention.rows(
                model, group.workload, lengths, group.tag, args.device, args.samples, self.roofs
            )
            return
        if group.step == "training_memory":
            engines = tuple(f"{name}-{group.tag}" for name in group.candidates)
            timeout = min(memory.TIMEOUT_SECONDS, max(1.0, self.left()))
            options = {"timeout": timeout, "what": group.head, "device": args.device}
            yield from memory.bench_memory(
                group.model, group.workload, engines, args.threads, lengths, **options
            )
            return
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
            yield row | {"group": group.kind, "backends": served_by}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu/training.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = tuple(costs.MODELS)
    groups.add_options(parser, samples=7)
    parser.add_argument("--models", nargs="+", choices=known, default=["base", "large"], metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=workloads.names(), metavar="WORKLOAD")
    parser.add_argument("--heads", nargs="+", choices=tuple(training.HEADS), default=list(training.HEADS))
    parser.add_argument("--dtypes", nargs="+", choices=("bf16", "fp32"), help="bf16 is autocast")
    candidates = training.CANDIDATES
    parser.add_argument("--candidates", nargs="+", choices=candidates, default=list(candidates))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=count, default=threads, help="of every candidate, on a CPU")
    args = parser.parse_args(argv)
    groups.check_options(parser, args)
    args.dtypes = args.dtypes or list(DTYPES[args.device])
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    return groups.record(
        args, Run, head=HEAD, line=line, ratios=ratios, ratio_line=ratio_line, packages=PACKAGES
    )


if __name__ == "__main__":
    sys.exit(main())
