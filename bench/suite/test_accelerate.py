"""`fastbert.accelerate`: a stock model, the same accelerated, our own; what the guard costs each layer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import accelerate, turns, workloads
from bench.lib.engines import MODELS, Bank

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    """The engines of BERT-base."""
    model = workloads.TINY if request.config.getoption("smoke") else MODELS["base"]
    with tempfile.TemporaryDirectory() as folder:
        yield Bank(model, torch.get_num_threads(), Path(folder))


def cases() -> Iterator[object]:
    """(model, workload, candidate); a short run has fp32."""
    for name in accelerate.CANDIDATES:
        marks = [] if turns.precision(name) == "fp32" else [pytest.mark.long]
        yield pytest.param("base", "ragged16", name, marks=marks)


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_accelerate(in_turns, peak, bank, few, model, workload, candidate):
    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        return accelerate.bench_accelerate(bank, workload, peak, wanted=wanted, samples=few)

    in_turns(rows)


@pytest.mark.parametrize(
    ("model", "check", "candidate"), [("base", check, "accelerated") for check in accelerate.CHECKS]
)
def test_guard(in_turns, bank, request, model, check, candidate):
    samples = request.config.getoption("samples")
    in_turns(lambda wanted: [accelerate.bench_guard(bank, check, samples)])
