"""How fast are encoders on 8 bits beside bfloat16, and what do their parts take?

    python bench/gpu/queue/bits.py --json FILE [--budget SECONDS] [--device cpu]

First the products of BERT-base at 16,384 rows: rows rounded by our pass and by PyTorch's chain, and one whole
product with GELU in each format. Then whole encoders by CUDA graph, interleaved: BERT-base at 32 x 512,
BERT-large on 96 lengths of SQuAD, BERT-base at 1 x 128; `torch` is base by bfloat16's nn.TransformerEncoder,
eager.

A row has milliseconds and, of encoders, texts per second. MLPerf's BERT rows (bench/lib/mlperf_records.py)
are of BERT-large on all SQuAD lengths, offline: `bits-large-squad-fp8` is the one row like them. It has no
head, no data loading and one batch size, and our weights are random, so its accuracy is not theirs.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

import fastbert
from bench.gpu import engines, groups
from bench.lib import served, workloads
from bench.lib.engines import config_of, encoder_of
from bench.lib.timing import interleave
from fastbert.layers import float8
from fastbert.ops.linear import linear
from fastbert.ops.linear_fp8 import linear_fp8
from fastbert.ops.linear_fp8 import rounded_rows as rounded
from fastbert.ops.linear_int8 import linear_int8, panel_maker
from fastbert.runtime import dispatch

Calls = dict[str, Callable[[], object]]
FORMATS = ("bf16", "int8", "fp8")


def products(rows: int, depth: int, out: int, device: torch.device) -> Calls:
    """One product with GELU per format and backend, and the passes that round its rows."""
    x, weight = (torch.randn(n, depth, device=device).bfloat16() for n in (rows, out))
    bias = torch.randn(out, device=device).bfloat16()
    (q, step), scale = rounded(weight), weight.float().abs().amax(1) / 127
    steps = step.flatten()
    integers = (weight.float() / scale[:, None]).round().to(torch.int8)
    calls: Calls = {"product-bf16": lambda: linear(x, weight, bias, "gelu")}
    for backend in ("triton", "aten") if device.type == "cuda" else ("aten",):
        pin = functools.partial(dispatch.use_backend, linear_fp8=backend, linear_int8=backend)
        with pin():
            make = panel_maker(device, torch.bfloat16)
        panels = None if make is None else make(integers)
        calls[f"product-fp8-{backend}"] = _within(pin, lambda: linear_fp8(x, q, steps, bias, "gelu"))
        calls[f"product-int8-{backend}"] = _within(
            pin, lambda p=panels: linear_int8(x, integers, scale, bias, "gelu", p)
        )
    calls["rows-fp8-aten"] = lambda: rounded(x)
    if device.type == "cuda":
        from fastbert.kernels import linear_fp8 as kernels

        calls["rows-fp8-triton"] = lambda: kernels.rounded_rows(x)
        calls["rows-fp8-triton-gelu"] = lambda: kernels.rounded_rows(x, "gelu")
    return calls


def _within(pin: Callable[[], Any], call: Callable[[], object]) -> Callable[[], object]:
    def pinned() -> object:
        with pin():
            return call()

    return pinned


def encoders(model: workloads.Model, lengths: tuple[int, ...], device: torch.device) -> Calls:
    """A forward per format, by CUDA graph on a GPU, and torch's of a small model."""
    inputs = workloads.padded_inputs(lengths, model.vocab, device)
    calls: Calls = {}
    with device:
        torch.manual_seed(0)
        full = encoder_of(config_of(model)).bfloat16()
    for name in FORMATS:
        own = copy.deepcopy(full)
        if name == "fp8":
            float8.prepare(own)  # a CPU tries this script too
        elif name == "int8":
            own.quantize("int8")
        own = fastbert.graph(own, max_tokens=sum(lengths), max_batch=len(lengths))
        calls[name] = lambda own=own: own(**inputs)
    if model is workloads.LARGE:
        return calls
    forward = engines.Bank(model, device).forward("torch_encoder-bf16")
    return calls | {"torch": lambda: forward(inputs)}


def cases(tiny: bool, device: torch.device) -> Iterator[tuple[str, int, Callable[[], Calls]]]:
    """(name, texts, what makes its calls)."""
    sizes = (48, 32, 64) if tiny else (16384, 768, 3072)
    yield "base-16384", 0, functools.partial(products, *sizes, device)
    base, large = (workloads.TINY,) * 2 if tiny else (workloads.BASE, workloads.LARGE)
    for model, name in ((base, "full"), (large, "squad"), (base, "latency-128")):
        lengths = (8, 5) if tiny else workloads.lengths(name)
        yield f"{model.name}-{name}", len(lengths), functools.partial(encoders, model, lengths, device)


def line(row: dict) -> str:
    return " ".join([f"{row['name']}:", f"{row['ms']:.3f} ms" if "ms" in row else row.get("error", "")])


@torch.no_grad()
def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=10), argv)
    tiny, device, left = args.device == "cpu", torch.device(args.device), groups.timer(args)
    report = groups.begun(args, line)
    served.prove(device)
    few = {"samples": (2, 2), "warmup": 1, "inner": 1} if tiny else {"samples": (args.samples, 50)}
    for case, texts, make in cases(tiny, device):
        head = {"step": "bits", "name": f"bits-{case}"}
        with groups.recorded(report, head, left, 0 if tiny else 3):
            for name, timing in interleave(make(), device, **few).items():
                speed = {"texts_per_second": 1e3 * texts / timing.median_ms} if texts else {}
                row = {"name": f"bits-{case}-{name}", "status": "ok", "ms": timing.median_ms}
                report.row(head | row | speed)
    report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
