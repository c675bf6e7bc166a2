"""The encoder on a CPU beside its peers, in one run: `python bench/bench_cpu.py`, or `make bench`.

| step | what |
|---|---|
| `roofs` | this machine's arithmetic peak per dtype and memory bandwidth |
| `encoder` | the forward of BERT-base and MiniLM (with its real weights, where they are installed) |
| `training` | BERT-base: forward, backward and AdamW step, dropout 0.1; fp32 and bf16 autocast |
| `training_memory` | its peak in two steps, each candidate in a process of its own |
| `memory` | BERT-base: peak of one `ragged64` forward, each engine in a process of its own |
| `kernels` | a line per op with BERT-base's shapes, forward and backward |

Ours and every peer that is installed (`pip install .[bench]`): transformers (sdpa), torch.compile of it, ONNX
Runtime, OpenVINO. All have the same weights, inputs and number of threads and are timed turn by turn: medians
of real tokens per second, padding does not count. A peer that is missing or fails is a row with the reason.

A whole run takes more than an hour on two cores. It first says how long it will take. `--budget` (20 minutes
by default, 0: no limit) leaves out the least important units, and the run names them. Rows go to
bench/results/<machine>/bench_cpu.json as they are measured; at the end a chart per model is drawn beside it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(ROOT)

import torch  # noqa: E402

from bench import memory, plot  # noqa: E402
from bench.lib import encoder, kernels, plan, roofs, training  # noqa: E402
from bench.lib.engines import ENGINES, MODELS, PACKAGES, Bank, compile_cache  # noqa: E402
from bench.lib.machine import describe, package_version  # noqa: E402
from bench.lib.probe_steps import reason_of  # noqa: E402
from bench.lib.report import Report, count, row_line  # noqa: E402
from fastbert.runtime import dispatch  # noqa: E402

STEPS = ("encoder", "training", "training_memory", "memory", "kernels")
WORKLOADS = ("1x128", "1x512", "8x128", "ragged16", "ragged64")
TRAINED, TRAINED_MEMORY = ("8x128", "ragged16"), ("8x128",)
MEMORY = ("memory", "training_memory")
# the most important workloads come first
KERNELS = ("8x128", "ragged16", "1x512", "1x128")
BUDGET_SECONDS = 1200.0
COLUMNS = ("workload", "candidate", "ms", "tokens/s", "gflops", "of floor", "cosine", "spread", "n")
LINE = "{:9} {:19} {:>10} {:>9} {:>7} {:>9} {:>8} {:>7} {:>3}"
PAIRS = (
    ("fastbert-bf16", "openvino-bf16"),
    ("fastbert-fp32", "openvino-fp32"),
    ("fastbert-int8", "onnxruntime-int8"),
    ("fastbert-bf16", "transformers-bf16"),
    ("fastbert-fp32", "transformers-fp32"),
)


def line(row: dict) -> str:
    """The printed form of a row of any step."""
    if row["status"] == "skipped":
        return f"{row['name']:<50} skipped: {row['error']}"
    if row["status"] != "ok":
        return memory.line(row)
    if row["step"] == "kernels":
        return kernels.line(row)
    if row["step"] in MEMORY:
        return memory.line(row)
    if row["step"] not in ("encoder", "training"):
        return row_line(row)
    cosine = row.get("cosine", row.get("grad_cosine"))
    columns = [
        row["workload"],
        row["candidate"],
        f"{row['median_ms']:,.1f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['gflops']:,.0f}",
        f"{row['of_floor']:.0%}" if "of_floor" in row else "",
        "" if cosine is None else f"{cosine:.5f}",
        f"{row['spread']:.1%}",
        row["n"],
    ]
    text = LINE.format(*columns)
    if row["step"] == "training":
        text += " forward {:,.0f} backward {:,.0f} step {:,.0f} ms".format(*(row[p] for p in training.PARTS))
    return text


def ratios(rows: Iterable[dict]) -> list[dict]:
    """Our speed over each peer's, and our share of transformers' memory, from rows of one run."""
    ok = {
        (r["step"], r.get("model"), r.get("workload"), r.get("head"), r.get("candidate")): r
        for r in rows
        if r["status"] == "ok"
    }
    found = []
    for (step, model, workload, head, candidate), row in ok.items():
        for ours, theirs in PAIRS:
            other = ok.get((step, model, workload, head, theirs))
            if candidate != ours or other is None or step not in ("encoder", "training", *MEMORY):
                continue
            keys = ("peak_mib", "above_mib") if step in MEMORY else ("median_ms",)
            for key in keys:
                value = row[key] / other[key] if step in MEMORY else other[key] / row[key]
                what = {"step": step, "model": model, "workload": workload}
                what |= {} if head is None else {"head": head}
                found.append({**what, "ours": ours, "theirs": theirs, "of": key, "ratio": value})
    return found


def wanted_engines(prefixes: Iterable[str] | None) -> tuple[str, ...]:
    """Ours, and the peers whose name begins with one of `prefixes` (None: all, "none": nobody)."""
    if prefixes is None:
        return ENGINES
    chosen = {"fastbert"}
    for prefix in prefixes:
        if prefix != "none" and not any(name.startswith(prefix) for name in ENGINES):
            names = ", ".join(n for n in ENGINES if not n.startswith("fastbert"))
            raise ValueError(f"--peers: got {prefix}, expected the beginning of one of {names}, or none")
        chosen.add(prefix)
    return tuple(name for name in ENGINES if name.startswith(tuple(chosen)))


class Benchmark:
    """One run: the plan, then its steps, each row recorded as it is measured."""

    def __init__(self, args: argparse.Namespace, report: Report):
        self.args, self.report, self.begin = args, report, time.monotonic()
        self.engines = wanted_engines(args.peers)
        self.roofs = roofs.measure("cpu", args.smoke, report.row)
        report.data["roofs"] = asdict(self.roofs)
        self.units = self.planned()
        plan.choose(self.units, args.budget)

    def planned(self) -> list[plan.Unit]:
        """Every unit of the steps, models and workloads asked for."""
        args, units = self.args, []
        main_model, calls = args.models[0], args.samples + 1
        for i, model in enumerate(args.models if "encoder" in args.steps else ()):
            units += plan.encoder_units(model, i == 0, args.workloads, self.engines, calls, self.roofs)
        if "training" in args.steps:
            names = [name for name in TRAINED if name in args.workloads]
            candidates = plan.training_candidates(self.engines)
            units += plan.training_units(main_model, names, candidates, calls, self.roofs, heads=args.heads)
        if "training_memory" in args.steps:
            names = [name for name in TRAINED_MEMORY if name in args.workloads]
            engines = [name for name in memory.TRAINED if name in self.engines]
            units += plan.training_memory_units(main_model, names, engines, self.roofs, args.heads)
        if "memory" in args.steps:
            engines = [name for name in memory.ENGINES if name in self.engines]
            units += plan.memory_units(main_model, engines, self.roofs)
        if "kernels" in args.steps:
            names = [name for name in KERNELS if name in args.workloads]
            units += plan.kernels_units(names, args.ops, self.roofs)
        return units

    def announce(self) -> None:
        """Say how long it will take and what is left out."""
        everything = plan.cost(self.units) / 60
        chosen = plan.cost(unit for unit in self.units if unit.chosen) / 60
        print(
            f"# this will take about {chosen:.0f} minutes; all of it would take {everything:.0f}", flush=True
        )
        for unit in self.units:
            if not unit.chosen:
                reason = f"about {unit.seconds:.0f} s, for which --budget {self.args.budget:.0f} has no room"
                self.skip(unit, reason)

    def skip(self, unit: plan.Unit, reason: str) -> None:
        """Record that a unit was not measured."""
        name = "-".join(filter(None, (unit.step, unit.who, unit.model, unit.workload, unit.head)))
        row = {"step": unit.step, "name": name}
        facts = {"model": unit.model, "workload": unit.workload, "candidate": unit.who}
        facts |= {"head": unit.head} if unit.head else {}
        self.report.row({**row, "status": "skipped", "error": reason, **facts})

    def run(self) -> None:
        """Run all chosen units, step by step. If a step fails, the others still run."""
        groups: dict[tuple[str, str, str, str], list[plan.Unit]] = {}
        for unit in self.units:
            if unit.chosen:  # the forward of a model is one group: its engines are built once
                workload = "" if unit.step in ("encoder", "memory") else unit.workload
                groups.setdefault((unit.step, unit.model, workload, unit.head), []).append(unit)
        for (step, *what), units in groups.items():
            name, start = "-".join(filter(None, (step, *what))), time.monotonic()
            print(f"# {name}", flush=True)
            status, reason = "ok", None
            try:
                for row in getattr(self, step)(units):
                    self.report.row(row)
            except Exception as error:
                status, reason = "failed", reason_of(error)
            self.report.step(name, status, time.monotonic() - start, reason)
            gc.collect()

    def spent(self) -> bool:
        """The budget is used up, whatever the plan thought."""
        return 0 < 1.25 * self.args.budget < time.monotonic() - self.begin

    def encoder(self, units: list[plan.Unit]) -> Iterator[dict]:
        """The forward of one model."""
        model = MODELS[units[0].model]
        print(LINE.format(*COLUMNS), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            bank = Bank(model, self.args.threads, Path(folder))
            self.report.data["weights"][model.name] = bank.weights
            names = {unit.who for unit in units}
            forwards = encoder.build(bank, tuple(name for name in ENGINES if name in names))
            for workload in dict.fromkeys(unit.workload for unit in units):
                chosen = [unit for unit in units if unit.workload == workload]
                if self.spent():
                    for unit in chosen:
                        self.skip(unit, "the budget is spent")
                    continue
                some = {unit.who: forwards[unit.who] for unit in chosen}
                yield from encoder.bench_encoder(model, workload, some, self.roofs, samples=self.args.samples)
                torch._dynamo.reset()  # every shape is compiled for itself, and kept until here

    def training(self, units: list[plan.Unit]) -> Iterator[dict]:
        """The training step on one workload, one dtype after the other."""
        model = MODELS[units[0].model]
        for tag in ("fp32", "bf16"):
            chosen = [unit for unit in units if unit.who.endswith(tag)]
            if self.spent():
                for unit in chosen:
                    self.skip(unit, "the budget is spent")
                continue
            wanted = tuple(unit.who.split("-")[0] for unit in chosen)
            options = {"head": units[0].head, "samples": self.args.samples, "roofs": self.roofs}
            yield from training.bench_training(model, units[0].workload, tag, wanted=wanted, **options)
            torch._dynamo.reset()
            gc.collect()

    def training_memory(self, units: list[plan.Unit]) -> Iterator[dict]:
        """Peak memory of two training steps."""
        return self.memory(units)

    def memory(self, units: list[plan.Unit]) -> Iterator[dict]:
        """Peak memory of one forward, or of training."""
        engines, one = tuple(unit.who for unit in units), units[0]
        return memory.bench_memory(one.model, one.workload, engines, self.args.threads, head=one.head or None)

    def kernels(self, units: list[plan.Unit]) -> Iterator[dict]:
        """A line per op on one workload."""
        print(kernels.HEAD, flush=True)
        for unit in units:
            if self.spent():
                self.skip(unit, "the budget is spent")
                continue
            try:
                ops = (unit.who,)
                yield from kernels.bench_workload(unit.workload, torch.device("cpu"), self.roofs, ops)
            except Exception as error:
                text = reason_of(error)
                row = {"step": unit.step, "name": f"kernels-{unit.who}-{unit.workload}", "status": "error"}
                yield {**row, "error": text, "workload": unit.workload, "op": unit.who}


def finish(report: Report, folder: Path) -> None:
    """Ratios and charts, from what was measured."""
    report.data["ratios"] = ratios(report.data["rows"])
    for row in report.data["ratios"]:
        where = " ".join(filter(None, (row["step"], row["model"], row["workload"], row.get("head"))))
        print(f"# {where:<38} {row['ours']:14} / {row['theirs']:18} {row['ratio']:.2f} ({row['of']})")
    try:
        for path in plot.charts(report.data, folder):
            print(f"# {path}")
    except RuntimeError as error:
        print(f"# {error}", flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=tuple(MODELS), default=["base", "minilm"], metavar="MODEL"
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD"
    )
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", help="beginnings of names, such as openvino; or none"
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="STEP")
    parser.add_argument("--ops", nargs="+", choices=dispatch.OPS, default=list(dispatch.OPS), metavar="OP")
    parser.add_argument(
        "--heads", nargs="+", choices=tuple(training.HEADS), default=list(training.HEADS), metavar="HEAD"
    )
    parser.add_argument("--samples", type=count, default=7, help="of each engine on each workload")
    parser.add_argument("--threads", type=count, default=len(os.sched_getaffinity(0)), help="of every engine")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS, help="seconds in all; 0: no end")
    parser.add_argument("--out", type=Path, help="folder (default: bench/results/<machine>)")
    parser.add_argument("--note", help="a remark to keep with the results, such as 'shared machine'")
    parser.add_argument("--smoke", action="store_true", help="tiny roofs: tries the code only")
    args = parser.parse_args(argv)
    if not args.budget >= 0:
        parser.error(f"--budget: got {args.budget}, expected seconds, or 0 for no end")
    try:
        wanted_engines(args.peers)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure what the arguments name; every row is printed and recorded at once."""
    args = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(args.threads)
    environment = describe(torch.device("cpu"))
    environment["versions"] = {name: package_version(name) for name in PACKAGES}
    folder = args.out or ROOT / "bench" / "results" / environment["slug"]
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "note")}
    report = Report(folder / "bench_cpu.json", settings, args.note, line)
    report.data |= {"environment": environment, "weights": {}}
    print(
        f"# {environment['device']}, {args.threads} threads, torch {torch.__version__}: the roofs", flush=True
    )
    benchmark = Benchmark(args, report)
    benchmark.announce()
    with compile_cache():
        benchmark.run()
    finish(report, folder)
    report.data["finished"] = True
    report.data["seconds"] = round(time.monotonic() - benchmark.begin, 1)
    report.save()
    print(f"# done in {report.data['seconds'] / 60:.1f} minutes: {report.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
