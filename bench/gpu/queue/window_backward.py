"""ModernBERT's window, gated product and training step, by CUDA C++ and by Triton.

    python bench/gpu/queue/window_backward.py --json FILE [--budget SECONDS] [--device cpu]

At 8 x 512 tokens in bf16: forward and backward of attention with 12 heads of 64, with the window of 64 keys
on both sides and without; the gated product of 768 by 2,304 in inference, and with its backward; then a step
(forward and backward under autocast) of ModernBERT-base by each attention. Backends are interleaved. On a CPU
tiny sizes are timed, by the backends there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

import fastbert
from bench.gpu import groups
from bench.lib import training, workloads
from bench.lib.engines import config_of
from bench.lib.timing import interleave
from fastbert.ops import attention as op
from fastbert.ops.linear import linear
from fastbert.runtime import dispatch

WINDOWS = {"window": (64, 64), "all": (-1, -1)}


def attention(lengths: tuple[int, ...], window: tuple[int, int], device: torch.device) -> Callable[[], None]:
    """Forward and backward over one batch."""
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    qkv = torch.randn(sum(lengths), 3, 12, 64, device=device).bfloat16().requires_grad_()
    dout = torch.randn(sum(lengths), 12, 64, device=device).bfloat16()

    def call() -> None:
        out = op.attention(*qkv.unbind(1), ends, max(lengths), window=window)
        torch.autograd.grad(out, qkv, dout)

    return call


def gated(rows: int, training: bool, device: torch.device) -> Callable[[], None]:
    """ModernBERT-base's first product of a feed-forward block, and its backward in training."""
    x, weight = (torch.randn(n, 768, device=device).bfloat16().requires_grad_(training) for n in (rows, 2304))
    dy = torch.randn(rows, 1152, device=device).bfloat16()

    def call() -> None:
        y = linear(x, weight, activation="gelu", gated="first")
        if training:
            torch.autograd.grad(y, (x, weight), dy)

    return call


def step(lengths: tuple[int, ...], model: workloads.Model, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a classifier of sequences."""
    torch.manual_seed(0)
    module = fastbert.AutoModelForSequenceClassification.from_config(config_of(model)).to(device).train()
    inputs, _ = training.batch(lengths, model.vocab, "classification", device)

    def call() -> None:
        module.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            module(**inputs).loss.backward()

    return call


def rows(device: torch.device, samples: int) -> Iterator[dict]:
    """A row for each call and backend."""
    tiny = device.type == "cpu"
    lengths, backends = ((40, 8), ("cpu", "aten")) if tiny else ((512,) * 8, ("cuda", "triton"))
    model = workloads.TINY if tiny else workloads.MODERNBERT
    calls = {f"attention-{name}": attention(lengths, sides, device) for name, sides in WINDOWS.items()}
    for name in ("inference", "training"):
        calls[f"linear-{name}"] = gated(sum(lengths), name == "training", device)
    calls[f"step-{model.name}"] = step(lengths, model, device)
    for name, call in calls.items():
        pinned_op = "linear" if name.startswith("linear") else "attention"
        pinned = {b: functools.partial(dispatch.use_backend, **{pinned_op: b}) for b in backends}
        timed = interleave(
            dict.fromkeys(backends, call), device, within=pinned, seconds=2.0, samples=(samples, 20 * samples)
        )
        for backend, timing in timed.items():
            yield {"name": f"{name}-{backend}", "status": "ok", "candidate": backend, **timing.facts()}


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=10), argv)
    report = groups.begun(args)
    for row in rows(torch.device(args.device), 2 if args.device == "cpu" else args.samples):
        report.row({"step": "window_backward", **row})
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
