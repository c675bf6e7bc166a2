"""Peak memory of a forward or of two training steps, each engine in its own process: see bench/memory.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import memory
from bench.lib import training

pytestmark = pytest.mark.cpu

FORWARD = "forward"
SHORT = ("fastbert-fp32", "transformers-fp32")


def cases() -> Iterator[object]:
    """(model, workload, what runs, candidate)."""
    for candidate in memory.ENGINES:
        marks = [] if candidate in SHORT else [pytest.mark.long]
        yield pytest.param("base", memory.WORKLOAD, FORWARD, candidate, marks=marks)
    for head in training.HEADS:
        for candidate in memory.TRAINED:
            yield pytest.param("base", "8x128", head, candidate, marks=[pytest.mark.long])


@pytest.mark.parametrize(("model", "workload", "what", "candidate"), list(cases()))
def test_memory(in_turns, request, model, workload, what, candidate):
    size = "tiny" if request.config.getoption("smoke") else model
    head = None if what == FORWARD else what

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        return memory.bench_memory(size, workload, wanted, torch.get_num_threads(), head=head)

    in_turns(rows)
