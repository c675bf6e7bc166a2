"""Encoder layers in one call: few rows by clusters of blocks, chained; many, whose residuals cuBLASLt adds.

    python bench/gpu/queue/latency.py --json FILE [--budget SECONDS] [--device cpu]

First the error rule of `chained` and of `adds`, in both half precisions. Then the replay of a
recorded forward in bf16 of BERT-base and BERT-large at 1 x 128 and 1 x 16 tokens, of MiniLM's six layers at
1 x 16, and of BERT-base at 1 x 256, the most rows for clusters, interleaved: `cublas` (as it serves now),
`clusters`, and `chained`, which are clusters whose kernels begin before their predecessors have ended.
`same`: whether `chained` has the bits of `clusters` in every one of 50 replays. The goals of `chained` at
1 x 128 are 0.22 ms (base) and 0.5 ms (large). At 32 x 512 tokens: `cublas` and `adds`, whose residuals
cuBLASLt adds before a norm; counted are 0.15 (base) and 0.41 ms (large) less.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from bench.gpu import engines, groups
from bench.lib import served, workloads
from bench.lib.timing import interleave
from fastbert import testing
from fastbert.backends.cuda import encoder_layers
from fastbert.testing.op_cases.encoder_layers import CASES, ON_GPU

# CLUSTERS, CHAINED, ADDS
WAYS = {"cublas": (False, False, False), "clusters": (True, False, False), "chained": (True, True, False)}
WAYS["adds"] = False, False, True
FEW, MANY = ("cublas", "clusters", "chained"), ("cublas", "adds")
MINILM = workloads.Model("minilm", 384, 6, 12, 1536)
TEXTS = [(workloads.BASE, (128,), FEW), (workloads.LARGE, (128,), FEW), (workloads.BASE, (512,) * 32, MANY)]
TEXTS += [(workloads.BASE, (16,), FEW), (MINILM, (16,), FEW), (workloads.LARGE, (512,) * 32, MANY)]
TEXTS += [(workloads.LARGE, (16,), FEW), (workloads.BASE, (256,), FEW)]
TINY = [(workloads.TINY, (8,), FEW), (workloads.TINY, (9, 8), MANY)]


@contextlib.contextmanager
def within(way: str) -> Iterator[None]:
    """What is called or recorded here runs so."""
    before = encoder_layers.CLUSTERS, encoder_layers.CHAINED, encoder_layers.ADDS
    encoder_layers.CLUSTERS, encoder_layers.CHAINED, encoder_layers.ADDS = WAYS[way]
    try:
        yield
    finally:
        encoder_layers.CLUSTERS, encoder_layers.CHAINED, encoder_layers.ADDS = before


def checked(device: torch.device) -> Iterator[dict]:
    """A row per way and dtype: the cases that fail the error rule."""
    backend = "aten" if device.type == "cpu" else "cuda"
    for way, dtype in itertools.product(("chained", "adds"), (torch.bfloat16, torch.float16)):
        cases = [case for case in (*ON_GPU, *CASES) if way == "adds" or case.total <= 256]
        with within(way):
            failed = [
                repr(case)
                for case in cases
                if not all(row.passed for row in testing.run_case(case, backend, dtype, device))
            ]
        status = {"status": "failed", "error": ", ".join(failed)} if failed else {"status": "ok"}
        name = f"latency-check-{way}-{str(dtype).removeprefix('torch.')}"
        yield {"name": name, "cases": len(cases), **status}


def replayed(
    name: str,
    model: workloads.Model,
    lengths: tuple[int, ...],
    ways: tuple[str, ...],
    device: torch.device,
    samples: int,
) -> Iterator[dict]:
    bank = engines.Bank(model, device)
    inputs = workloads.padded_inputs(lengths, model.vocab, device)
    forwards, outputs = {way: bank.forward("fastbert_graphs-bf16") for way in ways}, {}
    for way, forward in forwards.items():
        with within(way):
            outputs[way] = forward(inputs).clone()
    again = [
        torch.equal(forwards[ways[-1]](inputs), outputs[ways[-2]]) for _ in range(50 if ways == FEW else 0)
    ]
    calls = {way: functools.partial(forward, inputs) for way, forward in forwards.items()}
    pinned = {way: functools.partial(within, way) for way in ways}
    most = 20 * samples if ways == FEW else 4 * samples
    timed = interleave(calls, device, within=pinned, samples=(samples, most))
    for way, timing in timed.items():
        apart = (outputs[way].float() - outputs["cublas"].float()).abs().max().item()
        facts = {"candidate": way, "apart": apart} | ({"same": all(again)} if way == "chained" else {})
        yield {"name": f"{name}-{way}", "status": "ok", **timing.facts(), **facts}


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=10), argv)
    tiny, device, left = args.device == "cpu", torch.device(args.device), groups.timer(args)
    report = groups.begun(args)
    served.prove(device)
    for row in checked(device):
        report.row({"step": "latency", **row})
    for model, lengths, ways in TINY if tiny else TEXTS:
        name = f"latency-{model.name}-{len(lengths)}x{lengths[0]}"
        with groups.recorded(report, {"step": "latency", "name": name}, left, 0 if tiny else 3):
            for row in replayed(name, model, lengths, ways, device, 2 if tiny else args.samples):
                report.row({"step": "latency", **row})
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
