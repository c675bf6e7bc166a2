"""The host's time in an eager call of one sequence, and of a full batch, by Python function.

    python bench/gpu/queue/host.py --json FILE [--budget SECONDS] [--device cpu]

For BERT-base in bf16 at 1 x 128 and 32 x 512, ours, ours layer by layer (`launchers`: without all layers in
one call) and transformers' (sdpa): microseconds of the whole call, microseconds until the host has enqueued
it, and the functions that take most of that under cProfile. cProfile slows Python: read shares, not sums.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from bench.gpu import engines, groups
from bench.lib import served, workloads
from bench.lib.timing import synchronize
from fastbert.runtime import dispatch

LAUNCHERS = "launchers-bf16"
ENGINES = ("fastbert-bf16", LAUNCHERS, "accelerated-bf16", "transformers_sdpa-bf16", "torch_encoder-bf16")
CALLS, PROFILED, FUNCTIONS = 200, 100, 40


def walls(call: Callable[[], object], device: torch.device, calls: int) -> dict[str, float]:
    """Medians in microseconds: with the device idle at both ends, and until the host is done."""
    waited, enqueued = [], []
    for _ in range(calls):
        synchronize(device)
        begin = time.perf_counter()
        call()
        enqueued.append(time.perf_counter() - begin)
        synchronize(device)
        waited.append(time.perf_counter() - begin)
    return {"wall_us": statistics.median(waited) * 1e6, "host_us": statistics.median(enqueued) * 1e6}


def functions(call: Callable[[], object], calls: int) -> list[dict]:
    """function, calls and own microseconds per call of the model, the longest first."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    found = []
    for (file, line, name), (_, count, own, _, _) in pstats.Stats(profile).stats.items():
        where = f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"
        found.append({"function": where, "calls": count / calls, "us": own / calls * 1e6})
    return sorted(found, key=lambda row: -row["us"])[:FUNCTIONS]


def line(row: dict) -> str:
    head = f"{row['name']}: {row['wall_us']:.0f} us, of them {row['host_us']:.0f} until enqueued"
    shown = (f"  {f['us']:7.1f} us {f['calls']:6.1f} x {f['function'][:80]}" for f in row["functions"][:16])
    return "\n".join([head, *shown])


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=CALLS), argv)
    tiny, device = args.device == "cpu", torch.device(args.device)
    report = groups.begun(args, line)
    served.prove(device)
    model = workloads.TINY if tiny else workloads.BASE
    bank = engines.Bank(model, device)
    samples, profiled = (2, 2) if tiny else (args.samples, PROFILED)
    forwards = {engine: bank.forward(engine.replace(LAUNCHERS, "fastbert-bf16")) for engine in ENGINES}
    for case, lengths in {"1x128": (128,), "32x512": (512,) * 32}.items():
        inputs = workloads.padded_inputs((4,) if tiny else lengths, model.vocab, device)
        for engine, forward in forwards.items():
            call = lambda forward=forward, inputs=inputs: forward(inputs)  # noqa: E731
            row = {"step": "host", "name": f"host-{engine}-{model.name}-{case}", "status": "ok"}
            # with a pin beside it no backend runs all layers in one call
            pins = {"encoder_layers": "aten"} if engine == LAUNCHERS else {}
            with dispatch.use_backend(**pins):
                walls(call, device, 2 if tiny else 20)
                row |= walls(call, device, samples if case == "1x128" else max(2, samples // 5))
                report.row(row | {"functions": functions(call, profiled if case == "1x128" else 2)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
