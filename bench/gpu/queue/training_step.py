"""What does a training step take? BERT's pretraining in bf16 autocast, ours and transformers' (sdpa).

    python bench/gpu/queue/training_step.py --json FILE --budget SECONDS [--device cpu]

A step is forward, backward, the norm of all gradients, clipping and fused AdamW. The host reads the norm
(`norm`) or nothing (`free`, `cast`, `recorded`; `waits` names lines where it waits nevertheless). `cast` is
`free` where autograd casts hidden states and weights and their gradients. `recorded` is `free` with the
encoder's forward and backward from CUDA graphs (fastbert/graphs/training.py), as in our loop.
`gradients` compares gradients of `cast` and `recorded` with those of `free`, from the same weights and
dropout: the number of bit-equal ones, the number in all, and the largest distance over the norm. `wall_ms` is
a step of 10 without a wait between them, median of 5; `alone_ms` is one step, `busy_ms` its kernels. A CPU
has no graph.

First the gradient between the products of a feed-forward block: the error rule where one kernel makes it,
then its time at the sizes of both models, by cuBLAS and a pass (`pass`) and by one kernel (`kernel`). If the
kernel is faster at both, SLOPE_PRODUCTS of fastbert/backends/cuda/feed_forward.py is to be True.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parents[3])

import torch

from bench.gpu import breakdown, groups
from bench.lib import served, training, workloads
from bench.lib.timing import interleave
from fastbert import testing
from fastbert.backends.cuda import feed_forward as by_cuda
from fastbert.execution import eager
from fastbert.graphs.training import encoders_of, serving
from fastbert.ops import feed_forward
from fastbert.ops import linear as ops_linear
from fastbert.ops.activation import slope_ref
from fastbert.pretraining.objectives.masked import MaskedLosses
from fastbert.testing.op_cases.feed_forward import ON_GPU, SMALL

STEPS, RUNS, WARMUPS, CLIP = 10, 5, 3, 1.0
WAYS = {"fastbert": ("cast", "free", "recorded"), "transformers": ("norm", "free")}
# rows, columns of dy and of the inner layer
BETWEEN = {"base": (16384, 768, 3072), "large": (24576, 1024, 4096)}


def by_slopes(serve: bool) -> contextlib.AbstractContextManager:
    """Whether one kernel makes the gradient between two products here."""
    return mock.patch.object(by_cuda, "SLOPE_PRODUCTS", serve)


def plain_gradient(dy: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor, activation: str, _: bool):
    """For a CPU."""
    g = (dy @ weight) * slope_ref(pre, activation)
    return g, g.sum(0)


def between(device: torch.device) -> Iterator[dict]:
    """The gradient between two products: the error rule per dtype, then a row per size and way."""
    tiny = device.type == "cpu"
    for dtype in (torch.bfloat16, torch.float16):
        with by_slopes(True):
            runs = {
                repr(case): testing.run_case(case, "aten" if tiny else "cuda", dtype, device)
                for case in (SMALL if tiny else ON_GPU)
            }
        failed = [case for case, found in runs.items() if not all(row.passed for row in found)]
        status = {"status": "failed", "error": ", ".join(failed)} if failed else {"status": "ok"}
        yield {"name": f"between-check-{str(dtype).removeprefix('torch.')}", "cases": len(runs), **status}
    for name, (rows, out, inner) in ({"tiny": (40, 16, 24)} if tiny else BETWEEN).items():
        shapes = (rows, out), (out, inner), (rows, inner)
        given = [torch.randn(*shape, device=device).bfloat16() for shape in shapes]
        call = functools.partial(plain_gradient if tiny else by_cuda.inner_gradient, *given, "gelu", True)
        ways = {way: functools.partial(by_slopes, way == "kernel") for way in ("pass", "kernel")}
        timed = interleave(dict.fromkeys(ways, call), device, within=ways, samples=(10, 100))
        for way, timing in timed.items():
            yield {"name": f"between-{name}-{way}", "status": "ok", "candidate": way, **timing.facts()}


@contextlib.contextmanager
def casting() -> Iterator[None]:
    """Autograd casts what layers hand on, and weights."""
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(eager, "rounds_products", return_value=False))
        for module in (ops_linear, feed_forward):
            patched.enter_context(mock.patch.object(module, "narrows", return_value=False))
        yield


class Candidate:
    def __init__(self, who: str, model: workloads.Model, device: torch.device):
        lengths = (8, 8) if model.name == "tiny" else workloads.lengths(breakdown.STEPS[model.name])
        self.inputs, labelled = training.batch(lengths, model.vocab, "pretraining", device)
        self.model, self.losses = training.modules(model, "pretraining", (who,), device)[who], None
        self.optimizer = training.optimizer_of(self.model.train())
        self.graphed = encoders_of(self.model)
        if who == "fastbert":  # as the training loop calls it: packed, with the number of labels
            pairs = self.inputs.pop("next_sentence_label")
            ends = torch.arange(len(lengths) + 1, dtype=torch.int32) * lengths[0]
            self.inputs = {key: value.flatten() for key, value in self.inputs.items()}
            self.inputs |= {"cu_seqlens": ends, "max_seqlen": lengths[0], "labelled": labelled}
            self.inputs["sentence_labels"] = pairs
            self.losses = MaskedLosses(self.model, num_labels=2)

    def loss(self, way: str) -> torch.Tensor:
        if self.losses is None:  # transformers
            return training.loss_of(self.model, self.inputs, autocast=True)
        graphed = self.graphed if way == "recorded" else []
        casts = casting() if way == "cast" else contextlib.nullcontext()
        with casts, serving(graphed), torch.autocast(self.inputs["labels"].device.type, torch.bfloat16):
            losses, _ = self.losses(self.inputs)
        return losses["mlm"] + losses["sentence"]

    def step(self, way: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(way).backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm, self.optimizer.found_inf = torch.nn.utils.get_total_norm(gradients), None
        if way != "norm":
            wide = norm.double()
            factor = torch.where(wide > CLIP, CLIP / (wide + 1e-6), torch.ones_like(wide)).float()
            torch._foreach_mul_(gradients, factor)
            self.optimizer.found_inf = 1 - norm.isfinite().float()
        elif (value := float(norm)) > CLIP:
            torch._foreach_mul_(gradients, CLIP / (value + 1e-6))
        self.optimizer.step()

    def waits(self, way: str) -> list[str]:
        with warnings.catch_warnings(record=True, action="always") as seen:
            torch.cuda.set_sync_debug_mode("warn")
            self.step(way)
            torch.cuda.set_sync_debug_mode("default")
        return [f"{w.filename}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]

    def gradients(self, way: str) -> list[float]:
        found = []
        for each in ("free", way):
            self.optimizer.zero_grad(set_to_none=True)
            torch.manual_seed(0)
            self.loss(each).backward()
            found.append([p.grad for p in self.model.parameters() if p.grad is not None])
        pairs = list(zip(*found, strict=True))
        far = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
        return [sum(torch.equal(a, b) for a, b in pairs), len(pairs), far]


def rows(who: str, name: str, device: torch.device) -> Iterator[dict]:
    candidate = Candidate(who, workloads.MODELS["tiny" if device.type == "cpu" else name], device)
    calls = {way: lambda way=way: candidate.step(way) for way in WAYS[who]}
    timed = interleave(calls, device, clock="wall", samples=(RUNS, RUNS), warmup=WARMUPS, inner=STEPS)
    for way, call in calls.items():
        found = breakdown.measured(call, device, samples=3) | {"way": way}
        found |= {"alone_ms": found["wall_ms"], "wall_ms": timed[way].median_ms}
        if way != "norm" and device.type == "cuda":
            found["waits"] = candidate.waits(way)
        if way in ("cast", "recorded"):
            found["gradients"] = candidate.gradients(way)
            found["fallbacks"] = [dict(each.fallbacks) for each in candidate.graphed]
        yield found | {"backends": served.backends(who, device, "bf16 autocast")}


def line(row: dict) -> str:
    shown = (f"{key} {value:.2f}" for key, value in row.items() if isinstance(value, float))
    return " ".join([row["name"], *shown, *row.get("waits", []), row.get("error", "")])


def main(argv: list[str] | None = None) -> int:
    args = groups.parsed(groups.options(__doc__, samples=1), argv)
    device, left, report = torch.device(args.device), groups.timer(args), groups.begun(args, line)
    with groups.recorded(report, {"step": "training_step", "name": "between"}, left, 0):
        for row in between(device):
            report.row({"step": "training_step", **row})
    for who, name in itertools.product(("fastbert", "transformers"), ("base", "large")):
        head = {"step": "training_step", "name": f"{who}-{name}"}
        with groups.recorded(report, head, left, 20):
            for row in rows(who, name, device):
                report.row(head | row | {"name": f"{who}-{name}-{row['way']}", "status": "ok"})
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
