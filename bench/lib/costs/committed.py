"""The rows of `bench/results` beside what the model predicts for them, and the fit of its constants.

Of the suite's runs the newest row of each benchmark, unless it is too noisy for a claim or wrong.

Ours only: rows of other engines are not predicted, nor are ops that one of torch's backends serves, nor rows
whose file records no roofs or whose lengths are not in it. FITTED says which rows the constants come from;
all others are a check.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.lib import results, workloads
from bench.lib.costs import counts as costs
from bench.lib.costs.counts import BACKWARD, FORWARD, OPTIMIZER, Work
from bench.lib.costs.devices import GIB, Device, of_file, of_run
from bench.lib.engines import MODELS

# what stands for the file of a row of the suite, whose files follow one another
SUITE = "the suite"
# the most that a forward or a training step may be off
WITHIN = 0.25
ENGINES = ("fastbert", "fastbert_graphs", "accelerated")
# of both passes its products are those of `Precision.gradients`
VOCABULARY = "linear_cross_entropy"
# those of dispatch.BACKENDS that are our own kernels
BACKENDS = ("cpu", "triton", "cuda")
# the kind of work of each op of bench_kernels.py; all others are work row by row
KINDS = {
    "linear": "product",
    "linear_int8": "product",
    "feed_forward": "product",
    VOCABULARY: "product",
    "attention": "attention",
}
# (file, workloads, what is fitted)
FITTED_OPS = ("linear", "linear_int8", "attention", "layer_norm", "embedding", "padding", "packing")
FITTED = {
    ("op", "bench_cpu.json"): ("1x512", "8x128"),
    ("attention", "bench_training_attention.json"): ("8x128",),
    (OPTIMIZER, "bench_cpu.json"): ("8x128",),
}
# What a call costs more after a rest, which it has in the suite's rows of latency: the threads wake, and
# weights come from memory. MiniLM and BERT-base on 1x128, in fp32, bf16 and int8, after 30 ms beside
# back to back, one process each: -0.3 to 2.7 ms, in the median 1.0 (a Zen 4, 2 threads)
REST_MS = 1.0
# ONNX Runtime's threads spun on after its runs and took a core from whoever had the next turn, until they
# were told to stop (docs/notes/others.md). In fp32 that was ours. What it cost, on a Zen 4 that ran the same
# suite without and with it, twice each: 8x128 fp32 120 and 135 ms (bf16 61 and 63, int8 44 and 44); 1x128
# fp32 18 and 36 ms, bf16 10.3 and 17.4, int8 7.4 and 10.2.
SPINNING = "measured beside ONNX Runtime's threads, which spun on after its runs then; {}"
_ZEN5 = "0002_cc37266b84cf04f5ec42072f024ad955c5b13aa6_20261125_181158.json"
# (file, row): outside WITHIN, because what was measured was not us alone; `check` prints them and does not
# hold them. A new run on such a machine takes the place of the suite's rows
KNOWN = {
    ("bench_cpu.json", "encoder-fastbert-fp32-minilm-1x128"): SPINNING.format(
        "the spread is 24%, and bf16, which this processor computes in fp32 too, took 11.9 ms"
    ),
    (_ZEN5, "encoder-minilm-8x128-fastbert-fp32"): SPINNING.format(
        "bf16 and int8, whose turns come later, fit"
    ),
    (_ZEN5, "latency-minilm-1x128-fastbert-bf16"): SPINNING.format("back to back it took 4.33 ms"),
    (_ZEN5, "latency-minilm-1x128-fastbert-int8"): SPINNING.format("back to back it took 2.83 ms"),
}


@dataclass(frozen=True)
class Compared:
    """A committed row beside its prediction.

    Attributes:
        step: "op, <kind of work>", "attention" with dropout, "forward", "training", "forward of a step",
            "backward of a step", "optimizer" or "footprint".
        file, name: of the row.
        predicted, measured: in `unit`.
        works: what was predicted from; empty for memory.
        device: whose roofs were used.
        fitted: whether constants were fitted to this row.
        held: whether the row must be within WITHIN.
    """

    step: str
    file: str
    name: str
    workload: str
    tag: str
    predicted: float
    measured: float
    unit: str
    works: tuple[Work, ...]
    device: Device
    fitted: bool
    held: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1

    @property
    def key(self) -> tuple[str, str]:
        """(the file that it is in, its name)."""
        return (self.device.source if self.file == SUITE else self.file), self.name

    @property
    def known(self) -> str | None:
        """Why this row is not held, or None."""
        return KNOWN.get(self.key)

    @property
    def failed(self) -> bool:
        """Whether a row that is held is off by too much."""
        return self.held and self.known is None and not abs(self.error) <= WITHIN


def read(paths: Iterable[Path]) -> tuple[list[Compared], Counter]:
    """(every row of these result files that can be predicted, how many could not, per reason)."""
    found: list[Compared] = []
    left_out: Counter = Counter()
    suite = [path for path in paths if path.match(results.SUITE_FILES)]
    for path in (path for path in paths if path not in suite):
        data = json.loads(path.read_text())
        ok = [row for row in data.get("rows", ()) if row.get("status") == "ok" and of_ours(row)]
        device = device_of(path)
        where = f"in {path.parent.name}/{path.name}"
        for row in ok:
            compared = [] if device is None else list(compare(path.name, row, device))
            if not compared:
                reason = "no roofs recorded" if device is None else "the model has no prediction for it"
                left_out[f"{row['step']} {where}: {reason}"] += 1
            found += compared
    for row, run in newest(map(results.read, suite)):
        try:
            found += compare(SUITE, row, of_run(run))
        except ValueError as error:
            left_out[f"{row['step']} in {run.path.parent.name}: {error}"] += 1
    return found, left_out


def newest(runs: Iterable[results.Run]) -> Iterator[tuple[dict, results.Run]]:
    """(row as a script's file has it, its run): of each machine the newest one of each benchmark of ours."""
    last: dict[tuple[str, str, str], tuple[dict, results.Run]] = {}
    for run in sorted(runs, key=lambda run: run.date):
        for each in () if run.smoke else run.benchmarks:
            row = {**each.extra, "name": f"{each.group}-{each.candidate}", "median_ms": each.seconds * 1e3}
            # of MLPerf's workloads the suite times a part of the batch
            if of_ours(row) and each.extra["correct"] and each.kind != "mlperf":
                last[run.path.parent.name, each.group, each.candidate] = row, run
    return (found for found in last.values() if not found[0]["noisy"])


def of_ours(row: dict) -> bool:
    """Whether our own code produced a row, and it says how long something took or how much memory."""
    if row["step"] == "kernels":
        return row.get("serves", False) and row["backend"] in BACKENDS
    engine = row.get("candidate", "").split("-")[0]
    return engine in ENGINES and ("median_ms" in row or "peak_mib" in row or "quiet_ms" in row)


def device_of(path: Path) -> Device | None:
    """The device of a results file, or None where it records no roofs."""
    try:
        return of_file(path)
    except ValueError:
        return None


def compare(file: str, row: dict, device: Device) -> Iterator[Compared]:
    """The predictions for one row; none if the model has none."""
    step, gpu = row["step"], device.kind == "gpu"

    def timed(what: str, works: Iterable[Work], measured: float, held: bool = False) -> Compared:
        works = tuple(works)
        rest = 0.0 if gpu or not row["name"].startswith("latency-") else REST_MS
        fitted = row.get("workload") in FITTED.get((what.split(",")[0], file), ()) and not gpu
        fitted = fitted and (step != "kernels" or row["op"] in FITTED_OPS)
        predicted = device.seconds(works) * 1e3 + rest
        held = held and not gpu
        facts = file, row["name"], row["workload"], tag
        return Compared(what, *facts, predicted, measured, "ms", works, device, fitted, held)

    tag = row.get("dtype") or row["candidate"].split("-")[-1]
    if step == "kernels":
        work = op_work(row, gpu)
        yield timed(f"op, {work.kind}", [work], row["median_ms"])
        return
    model = MODELS.get(row.get("model"))
    if model is None or row.get("workload") not in workloads.names():
        return
    lengths = workloads.lengths(row["workload"])
    if step == "encoder":
        yield timed(FORWARD, costs.forward(model, lengths, tag, on_gpu=gpu), row["median_ms"], held=True)
    elif step == "training":
        works = costs.training(model, lengths, tag, on_gpu=gpu, head=row["head"])
        yield timed("training", works, row["median_ms"], held=True)
        for which, key in zip(costs.PASSES, ("forward_ms", "backward_ms", "step_ms"), strict=True):
            what = which if which == OPTIMIZER else f"{which} of a step"
            yield timed(what, [work for work in works if work.which == which], row[key])
    elif step == "attention":
        p = costs.precision(tag, gpu, train=False)
        passes = [costs.attention(lengths, model, p, which) for which in (FORWARD, BACKWARD)]
        works = [*passes, costs.draws(model.heads * costs.pairs(lengths))]
        yield timed("attention", works, row["median_ms"])
    elif step == "footprint":
        sizes = costs.training_memory(model, lengths, tag, on_gpu=True, head=row["head"])
        saved = sizes["copies"] + sizes["activations"]
        for key, size in (("saved_mib", saved), ("peak_mib", sum(sizes.values()))):
            mib = size / GIB * 1024
            facts = file, f"{row['name']} {key}", row["workload"], tag
            yield Compared("footprint", *facts, mib, row[key], "MiB", (), device, False, False)


def op_work(row: dict, gpu: bool) -> Work:
    """The work of a row of bench_kernels.py: its operations and bytes are those that it recorded."""
    seconds = row["median_ms"] * 1e-3
    kind = KINDS.get(row["op"], "rows")
    storage = "fp32" if row["dtype"] == "fp32" else "half"
    p = costs.precision("int8" if row["op"] == "linear_int8" else row["dtype"], gpu, train=False)
    products = p.gradients if row["pass"] == BACKWARD or row["op"] == VOCABULARY else p.tag
    tag = {"product": products, "attention": p.attention, "rows": "fp32"}[kind]
    flops, moved = row.get("gflops", 0.0) * 1e9 * seconds, row["gbs"] * 1e9 * seconds
    return Work(row["op"], kind, tag, storage, flops, moved, 1, row["pass"])


def summary(rows: Iterable[Compared]) -> dict[str, dict[str, float]]:
    """step -> rows, median and worst absolute error, of the rows that were not fitted."""
    by_step: dict[str, list[float]] = {}
    for row in rows:
        if not row.fitted:
            by_step.setdefault(row.step, []).append(abs(row.error))
    return {
        step: {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
        for step, errors in by_step.items()
    }


def fit(rows: Iterable[Compared]) -> dict[str, float]:
    """The CPU's constants from the fitted rows: least squares of the relative errors.

    A time is a sum of what each roof alone would take, divided by a share, so the inverse shares are the
    unknowns of a linear system. The share of memory in a product is 1 and is not fitted.

    Raises:
        ValueError: no fitted rows, or a share would not be positive.
    """
    rows = [row for row in rows if row.device.kind == "cpu"]
    equations = []
    for row in rows:
        if row.fitted and row.step != "attention":
            equation: Counter = Counter()
            for work in row.works:
                *roofs, launch = row.device.terms(work)
                for name, seconds in (*roofs, ("given", launch)):
                    equation[name] += seconds * 1e3 / row.measured
                equation["given"] += equation.pop("product memory", 0.0)
            equations.append(equation)
    if not equations:
        raise ValueError("rows: got none that constants are fitted to")
    names = sorted({name for e in equations for name, x in e.items() if x} - {"given"})
    matrix = torch.tensor([[e[name] for name in names] for e in equations], dtype=torch.float64)
    target = torch.tensor([1 - e["given"] for e in equations], dtype=torch.float64)
    solved = torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0].tolist()
    if not all(0 < x < math.inf for x in solved):
        raise ValueError(f"rows: the fit has no positive solution: {dict(zip(names, solved, strict=True))}")
    found = {name: 1 / x for name, x in zip(names, solved, strict=True)}
    return found | {"draw": 1 / statistics.median(drawing(rows))}


def drawing(rows: list[Compared]) -> Iterator[float]:
    """How many times the roof's time attention's random numbers take: attention with dropout less without."""
    for row in rows:
        if row.fitted and row.step == "attention":
            same = row.workload, row.tag
            plain = [r for r in rows if r.step == "op, attention" and r.fitted]
            without = sum(r.measured for r in plain if (r.workload, r.tag) == same)
            draw = next(work for work in row.works if work.kind == "draw")
            yield (row.measured - without) * 1e-3 / row.device.terms(draw)[0][1]
