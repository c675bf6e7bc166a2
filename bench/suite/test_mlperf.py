"""MLPerf's BERT workloads beside the public records: `squad`, inference, and `train`, packs of 512 tokens.

The records are of a GPU and of 8 bits. The table has what is comparable and what is not.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import mlperf, workloads

pytestmark = pytest.mark.cpu

ENGINES = ("fastbert-fp32", "fastbert-int8", "transformers-fp32", "fastbert-bf16", "transformers-bf16")
TRAINED = ("fastbert-fp32", "transformers-fp32", "fastbert-bf16", "transformers-bf16")


def cases() -> Iterator[object]:
    """(model, workload, candidate)."""
    for candidate in ENGINES:
        yield pytest.param("large", "squad", candidate, marks=[pytest.mark.long])
    for candidate in TRAINED:
        yield pytest.param("large", "train", candidate, marks=[pytest.mark.long])


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_mlperf(in_turns, peak, few, request, model, workload, candidate):
    smoke = request.config.getoption("smoke")
    size = workloads.TINY if smoke else workloads.MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        if workload == "train":
            yield from mlperf.bench_train(size, wanted, peak, samples=few)
            return
        with tempfile.TemporaryDirectory() as folder:
            threads = torch.get_num_threads()
            yield from mlperf.bench_squad(size, wanted, threads, Path(folder), peak, samples=few)

    in_turns(rows)
