"""Pruned encoders beside whole ones, and peers with zeros in place; texts that leave early; int8 tables."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

import fastbert
from bench.lib import workloads
from bench.lib.encoder import bench_encoder, build
from bench.lib.engines import DTYPES, Bank, Forward, needed, ours, theirs, torch_forward
from bench.lib.roofs import Roofs
from fastbert.compression.early_exit import EarlyExit

# How an encoder is pruned -> the arguments of `fastbert.prune`
KINDS = {
    "half-heads": lambda model: {"heads": dict.fromkeys(range(model.layers), range(0, model.heads, 2))},
    "half-neurons": lambda model: {
        "neurons": dict.fromkeys(range(model.layers), range(0, model.intermediate, 2))
    },
    "half-layers": lambda model: {"layers": range(0, model.layers, 2)},
}
EXIT = "early-exit"
# The table of words in 8 bits; "whole" has it in floating point
TABLES = "int8-words"
# "whole" is our unpruned encoder
ENGINES = (
    "fastbert-fp32",
    "fastbert-int8",
    "whole-fp32",
    "whole-int8",
    "transformers-fp32",
    "onnxruntime-int8",
)
# How many of 256 tokens the layers of PoWER-BERT keep (Goyal et al. 2020)
KEPT = (153, 125, 111, 105, 85, 80, 72, 48, 35, 27, 22, 5)


class PrunedBank(Bank):
    """The engines of one pruned model. Peers run `fastbert.prune(…).dense()`, which is as large as the whole.

    Of kind "power-bert" tokens leave between the layers, and peers compute all tokens.

    Args:
        kind: a key of KINDS, or "power-bert".
        model, threads, folder: see `Bank`.
    """

    def __init__(self, kind: str, model: workloads.Model, *given: object):
        super().__init__(model, *given)
        self.is_exact = kind in KINDS
        if self.is_exact:
            found = fastbert.prune(self.master, **KINDS[kind](model))
            self.master, self.dense = found.model, found.dense()
        else:
            self.dense = copy.deepcopy(self.master)
            fastbert.eliminate(self.master, [kept / 256 for kept in KEPT[: model.layers]])

    def _peer(self, dtype: torch.dtype) -> torch.nn.Module:
        module = theirs(self.dense.config)
        module.load_state_dict(self.dense.state_dict())
        return module.to(dtype)

    def forward(self, name: str) -> Forward:
        engine, tag = name.split("-")
        if engine != "whole":
            return super().forward(name)
        module = ours(self.model)[0]
        return torch_forward(module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag]))


class HalfLeave(EarlyExit):
    """Half of the texts of a batch leave at the first branch, and none later. All branches are computed."""

    texts = 0

    def uncertainty(self, logits: torch.Tensor) -> torch.Tensor:
        """0 for every second text of the whole batch, 1 for all others."""
        found, number = super().uncertainty(logits), torch.arange(len(logits))
        leave = (number % 2 == 0) & (len(logits) == self.texts)
        return torch.where(leave, 0 * found, 1 + 0 * found)


class ExitBank(Bank):
    """A classifier whose texts leave early, and the same classifier whole.

    There is a branch after each quarter of the layers. Half of the texts leave at the first, so that 5/8 of
    the layers are computed, and the speed-up to expect is 1.6. Peers compute all layers.

    Args:
        workload: the batch.
        model, threads, folder: see `Bank`.
    """

    def __init__(self, workload: str, model: workloads.Model, *given: object):
        super().__init__(model, *given)
        self.texts, self.is_exact = len(workloads.lengths(workload)), False

    def _classifier(self) -> fastbert.BertForSequenceClassification:
        torch.manual_seed(0)
        module = fastbert.BertForSequenceClassification(self.master.config).eval()
        module.base_model.load_state_dict(self.master.state_dict(), strict=False)
        return module

    def _peer(self, dtype: torch.dtype) -> torch.nn.Module:
        transformers = needed("transformers")
        module = transformers.BertForSequenceClassification(theirs(self.master.config).config)
        module.load_state_dict(self._classifier().state_dict())
        return module.eval().to(dtype)

    def forward(self, name: str) -> Forward:
        engine, tag = name.split("-")
        if engine not in ("fastbert", "whole"):
            return super().forward(name)
        module = self._classifier()
        module = module.quantize("int8") if tag == "int8" else module.to(DTYPES[tag])
        called = module
        if engine == "fastbert":
            called = HalfLeave(module, every=max(1, self.model.layers // 4)).eval()
            called.texts, called.threshold = self.texts, 0.5

        def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            with torch.inference_mode():
                # One row per text, which has no padding
                return called(inputs["input_ids"], token_type_ids=inputs["token_type_ids"]).logits

        return run


class TablesBank(Bank):
    """An int8 encoder whose table of words is in 8 bits too, and the same with a table of floats."""

    def forward(self, name: str) -> Forward:
        engine, tag = name.split("-")
        if engine not in ("fastbert", "whole"):
            return super().forward(name)
        module = ours(self.model)[0]
        if tag == "int8":
            module.quantize("int8", embeddings="int8" if engine == "fastbert" else None)
        return torch_forward(module)


def bank_of(kind: str, model: workloads.Model, workload: str, *given: object) -> Bank:
    """What builds the engines of a kind."""
    if kind == TABLES:
        return TablesBank(model, *given)
    return ExitBank(workload, model, *given) if kind == EXIT else PrunedBank(kind, model, *given)


def bench_smaller(
    bank: Bank, workload: str, wanted: tuple[str, ...], roofs: Roofs, samples: int
) -> Iterator[dict]:
    """A row per engine, as `bench_encoder` yields them, without rates of operations, which differ."""
    for row in bench_encoder(bank.model, workload, build(bank, wanted), roofs, samples=samples):
        left_out = {"gflops", "of_floor", "floor_tokens_per_s"}
        if row["candidate"].startswith("whole") or not getattr(bank, "is_exact", True):
            # It computes another function than its peers
            left_out |= {"cosine", "cosine_to"}
        yield {key: value for key, value in row.items() if key not in left_out}
