"""A training step of BERT-base, dropout 0.1, AdamW: ours, transformers', torch.compile of transformers'."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bench.lib import training, workloads
from bench.lib.engines import MODELS, compile_cache

CANDIDATES = tuple(f"{name}-{tag}" for name in training.CANDIDATES for tag in ("fp32", "bf16"))


def cases() -> Iterator[object]:
    """(model, workload, head, candidate); what takes long is left to --everything."""
    for workload in ("8x128", "ragged16"):
        for head in training.HEADS:
            for candidate in CANDIDATES:
                rare = workload != "8x128" or candidate.startswith("torch_compile")
                yield pytest.param(
                    "base", workload, head, candidate, marks=[pytest.mark.long] if rare else []
                )


@pytest.mark.parametrize(("model", "workload", "head", "candidate"), list(cases()))
def test_training(in_turns, peak, few, request, model, workload, head, candidate):
    size = workloads.TINY if request.config.getoption("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        with compile_cache():
            for tag in ("fp32", "bf16"):
                names = tuple(name.removesuffix(f"-{tag}") for name in wanted if name.endswith(tag))
                if not names:
                    continue
                options = {"wanted": names, "head": head, "samples": few, "roofs": peak}
                yield from training.bench_training(size, workload, tag, **options)
                torch._dynamo.reset()
                gc.collect()

    in_turns(rows)
