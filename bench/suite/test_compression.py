"""What half the heads, neurons or layers save, beside peers that run them with zeros; early exit; tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import compression, workloads
from bench.lib.engines import MODELS

pytestmark = pytest.mark.cpu

# kind -> its candidates
CANDIDATES = dict.fromkeys((*compression.KINDS, "power-bert"), compression.ENGINES)
CANDIDATES[compression.EXIT] = *compression.ENGINES[:4], "onnxruntime-int8"
CANDIDATES[compression.TABLES] = "fastbert-int8", "whole-int8", "whole-fp32", "onnxruntime-int8"


def cases() -> Iterator[object]:
    """(kind, model, workload, candidate)."""
    for kind, candidates in CANDIDATES.items():
        model = "minilm" if kind == compression.TABLES else "base"
        for candidate in candidates:
            workload = "8x256" if kind == "power-bert" else "8x128"
            yield pytest.param(kind, model, workload, candidate, marks=[pytest.mark.long])


@pytest.mark.parametrize(("kind", "model", "workload", "candidate"), list(cases()))
def test_compression(in_turns, peak, few, request, kind, model, workload, candidate):
    size = workloads.TINY if request.config.getoption("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        with tempfile.TemporaryDirectory() as folder:
            bank = compression.bank_of(kind, size, workload, torch.get_num_threads(), Path(folder))
            yield from compression.bench_smaller(bank, workload, wanted, peak, few)

    in_turns(rows)
