"""Fine-tuning's whole loop beside transformers' Trainer on MRPC's and SQuAD's lengths: speed, memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.lib import finetuning, workloads
from bench.lib.engines import MODELS

pytestmark = pytest.mark.cpu

TAGS = ("fp32", "bf16")


def cases() -> Iterator[object]:
    """(model, workload, candidate); a short run has MiniLM."""
    for model in ("minilm", "base"):
        marks = [] if model == "minilm" else [pytest.mark.long]
        for workload in finetuning.WORKLOADS:
            for name in finetuning.CANDIDATES:
                for tag in TAGS:
                    yield pytest.param(model, workload, f"{name}-{tag}", marks=marks)


CASES = pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))


@pytest.fixture
def rows(in_turns, few, request):
    """Record a row of a model and a task."""
    smoke = request.config.getoption("smoke")

    def record(model: str, workload: str, **options: object) -> None:
        size = workloads.TINY if smoke else MODELS[model]
        options |= {"samples": few, "threads": torch.get_num_threads()}
        in_turns(lambda wanted: finetuning.bench_finetuning(size, workload, wanted=wanted, **options))

    return record


@CASES
def test_finetuning(rows, peak, model, workload, candidate):
    rows(model, workload, roofs=peak)


@CASES
def test_memory(rows, model, workload, candidate):
    rows(model, workload, memory=True)
