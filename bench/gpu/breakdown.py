"""The GPU's time of a forward and of a training step by kernel, for fastbert and transformers.

    python bench/gpu/breakdown.py [--models base large] [--budget SECONDS] [--json FILE]

Each model and batch is run by ours and by transformers (sdpa): the forward in bf16, the training step in
bf16 autocast with dropout. torch's profiler (CUPTI) measures each kernel's time on the device. A row has the
wall time of a call without the profiler (`wall_ms`), the time that kernels take in it (`busy_ms`), their
number, and the kernels by time. Where `busy_ms` is far below `wall_ms`, the GPU waits for Python.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from bench.gpu import engines, groups
from bench.lib import served, training, workloads
from bench.lib.probe_steps import reason_of
from bench.lib.timing import synchronize

FORWARDS = ("full", "squad", "latency-128")
STEPS = {"base": "full", "large": "train", "tiny": "1x128"}
KERNELS = 40  # of a row, by time
SHOWN = 14  # of a printed row
WARMUPS, PROFILED = 4, 3


def kernels_of(profiler: torch.profiler.profile, calls: int, device_type: str) -> list[dict]:
    """name, launches and microseconds per call of every kernel, the longest first."""
    found = []
    for event in profiler.key_averages():
        on_device = device_type == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA
        spent = event.self_cpu_time_total if device_type == "cpu" else event.self_device_time_total
        if on_device and spent > 0:
            found.append({"kernel": event.key[:160], "launches": event.count / calls, "us": spent / calls})
    return sorted(found, key=lambda row: -row["us"])


def measured(call: Callable[[], object], device: torch.device, samples: int) -> dict:
    for _ in range(WARMUPS):
        call()
    walls = []
    for _ in range(samples):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        walls.append((time.perf_counter() - begin) * 1e3)
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU if device.type == "cpu" else activity.CUDA]) as seen:
        for _ in range(PROFILED):
            call()
        synchronize(device)
    kernels = kernels_of(seen, PROFILED, device.type)
    facts = {"wall_ms": statistics.median(walls), "busy_ms": sum(row["us"] for row in kernels) / 1e3}
    return facts | {"launches": sum(row["launches"] for row in kernels), "kernels": kernels[:KERNELS]}


def forwards(model: workloads.Model, batch: str, device: torch.device) -> Iterator[tuple[str, Callable]]:
    """(engine, a call) of each engine's forward."""
    bank = engines.Bank(model, device)
    lengths = (3, 4) if device.type == "cpu" else workloads.lengths(batch)
    inputs = workloads.padded_inputs(lengths, model.vocab, device)
    for name in ("fastbert-bf16", "transformers_sdpa-bf16"):
        forward = bank.forward(name)
        yield name, lambda forward=forward: forward(inputs)


def steps(model: workloads.Model, batch: str, device: torch.device) -> Iterator[tuple[str, Callable]]:
    """(candidate, a call) of each candidate's step of pretraining."""
    lengths = (3, 4) if device.type == "cpu" else workloads.lengths(batch)
    inputs, _ = training.batch(lengths, model.vocab, "pretraining", device)
    for name in ("fastbert", "transformers"):
        module = training.modules(model, "pretraining", (name,), device)[name]
        if isinstance(module, str):
            raise RuntimeError(module)
        yield (
            f"{name}-bf16",
            training.Step(module.train(), training.optimizer_of(module), inputs, autocast=True),
        )


def rows(args: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    plan = [("forward", model, batch, forwards) for model in args.models for batch in FORWARDS]
    plan += [("training", model, STEPS[model], steps) for model in args.models]
    begin = time.monotonic()
    for what, name, batch, calls in plan:
        facts = {"step": "breakdown", "pass": what, "model": name, "workload": batch}
        if args.budget and time.monotonic() - begin > args.budget:
            reason = f"--budget {args.budget:.0f} is spent"
            yield facts | {"name": f"breakdown-{what}-{name}-{batch}", "status": "skipped", "error": reason}
            continue
        try:
            for candidate, call in calls(workloads.MODELS[name], batch, device):
                row = facts | {"name": f"breakdown-{what}-{candidate}-{name}-{batch}", "candidate": candidate}
                tag = "bf16" if what == "forward" else "bf16 autocast"
                row |= {"status": "ok", **measured(call, device, args.samples)}
                yield row | {"backends": served.backends(candidate, device, tag)}
        except Exception as error:
            where = f"breakdown-{what}-{name}-{batch}"
            yield facts | {"name": where, "status": "error", "error": reason_of(error)}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def line(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['name']} {row['status']}: {row['error'][:200]}"
    text = f"{row['name']}: wall {row['wall_ms']:.3f} ms, kernels {row['busy_ms']:.3f} ms"
    shown = row["kernels"][:SHOWN]
    lines = [f"  {k['us']:10.1f} us  {k['launches']:6.1f} x  {k['kernel'][:90]}" for k in shown]
    return "\n".join([f"{text} in {row['launches']:.0f} launches", *lines])


def main(argv: list[str] | None = None) -> int:
    parser = groups.options(__doc__, samples=7)
    known = tuple(STEPS)
    parser.add_argument("--models", nargs="+", choices=known, default=["base", "large"], metavar="MODEL")
    args = groups.parsed(parser, argv)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    report = groups.begun(args, line)
    served.prove(device)
    for row in rows(args, device):
        report.row(row)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
