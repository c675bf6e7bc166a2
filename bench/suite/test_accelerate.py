"""`fastbert.accelerate`: a stock model, the same accelerated, our own; the guard's time per layer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import accelerate, turns, workloads
from bench.lib.engines import MODELS, Bank

pytestmark = pytest.mark.cpu
FAMILIES = ("modernbert", "deberta-v3", "xlnet", "mobilebert", "longformer", "bigbird")


@pytest.fixture(scope="module")
def bank_of(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Bank]]:
    """model -> its engines; those of the model before are dropped."""
    kept: dict[str, Bank] = {}
    with tempfile.TemporaryDirectory() as folder:

        def of(model: str) -> Bank:
            if model not in kept:
                kept.clear()
                size = workloads.TINY if request.config.getoption("smoke") else MODELS[model]
                place = Path(folder, model)
                place.mkdir()
                kept[model] = Bank(size, torch.get_num_threads(), place)
            return kept[model]

        yield of


def cases() -> Iterator[object]:
    """(model, workload, candidate); a short run has MiniLM in fp32."""
    for model in ("minilm", "base", *FAMILIES):
        for name in accelerate.CANDIDATES:
            short = model == "minilm" and turns.precision(name) == "fp32"
            yield pytest.param(model, "ragged16", name, marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_accelerate(in_turns, peak, bank_of, few, model, workload, candidate):
    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        return accelerate.bench_accelerate(bank_of(model), workload, peak, wanted=wanted, samples=few)

    in_turns(rows)


@pytest.mark.parametrize(
    ("model", "check", "candidate"), [("minilm", check, "accelerated") for check in accelerate.CHECKS]
)
def test_guard(in_turns, bank_of, request, model, check, candidate):
    samples = request.config.getoption("samples")
    in_turns(lambda wanted: [accelerate.bench_guard(bank_of(model), check, samples)])
