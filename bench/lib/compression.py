"""Pruned encoders beside the whole one, and beside peers that run the same function with zeros."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import fastbert
from bench.lib import workloads
from bench.lib.encoder import bench_encoder, build
from bench.lib.engines import DTYPES, Bank, Forward, ours, theirs, torch_forward
from bench.lib.roofs import Roofs

# How an encoder is pruned -> the arguments of `fastbert.prune`
KINDS = {
    "half-heads": lambda model: {"heads": dict.fromkeys(range(model.layers), range(0, model.heads, 2))},
    "half-neurons": lambda model: {
        "neurons": dict.fromkeys(range(model.layers), range(0, model.intermediate, 2))
    },
    "half-layers": lambda model: {"layers": range(0, model.layers, 2)},
}
# "whole" is our unpruned encoder
ENGINES = (
    "fastbert-fp32",
    "fastbert-int8",
    "whole-fp32",
    "whole-int8",
    "transformers-fp32",
    "onnxruntime-int8",
)


class PrunedBank(Bank):
    """The engines of one pruned model. Peers run `fastbert.prune(…).dense()`, which is as large as the whole.

    Args:
        kind: a key of KINDS.
        model, threads, folder: see `Bank`.
    """

    def __init__(self, kind: str, model: workloads.Model, *given: object):
        super().__init__(model, *given)
        self.whole, found = self.master, fastbert.prune(self.master, **KINDS[kind](model))
        self.master, self.dense = found.model, found.dense()

    def _peer(self, dtype: torch.dtype) -> torch.nn.Module:
        module = theirs(self.dense.config)
        module.load_state_dict(self.dense.state_dict())
        return module.to(dtype)

    def forward(self, name: str) -> Forward:
        """See `Bank`."""
        engine, tag = name.split("-")
        if engine != "whole":
            return super().forward(name)
        module = ours(self.model)[0]
        return torch_forward(module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag]))


def bench_pruned(
    bank: PrunedBank, workload: str, wanted: tuple[str, ...], roofs: Roofs, samples: int
) -> Iterator[dict]:
    """A row per engine, as `bench_encoder` yields them, without rates of operations, which differ."""
    for row in bench_encoder(bank.model, workload, build(bank, wanted), roofs, samples=samples):
        left_out = {"gflops", "of_floor", "floor_tokens_per_s"}
        if row["candidate"].startswith("whole"):
            # It computes another function
            left_out |= {"cosine", "cosine_to"}
        yield {key: value for key, value in row.items() if key not in left_out}
