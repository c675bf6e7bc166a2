"""Peak memory of a forward, two training steps or analysis, each engine in its process: see bench/memory.py.

On a CPU it is the process's resident memory, on a GPU the peak of torch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import memory
from bench.lib import training

# device -> (model, batch) of a forward, and those of training
FORWARDS = {"cpu": (("base", "ragged16"), ("base", memory.WORKLOAD)), "cuda": (("base", "full"),)}
TRAINED = {"cpu": (("base", "8x128"),), "cuda": (("base", "full"), ("large", "train"))}
ENGINES = {"cpu": memory.ENGINES, "cuda": ("fastbert-bf16", "transformers-bf16")}
# what `make bench` has time for on a CPU; --everything adds the rest
SHORT = (("fastbert-fp32", "ragged16"), ("transformers-fp32", "ragged16"))


def cases(device: str) -> Iterator[object]:
    """(model, workload, what runs, candidate); a GPU has time for all, a CPU for one forward."""
    for model, workload in FORWARDS[device]:
        for candidate in ENGINES[device]:
            marks = [] if device == "cuda" or (candidate, workload) in SHORT else [pytest.mark.long]
            yield pytest.param(model, workload, memory.FORWARD, candidate, marks=marks)
    for model, workload in TRAINED[device]:
        for head in training.HEADS:
            for candidate in ENGINES[device]:
                if candidate in memory.TRAINED:
                    marks = [] if device == "cuda" else [pytest.mark.long]
                    yield pytest.param(model, workload, head, candidate, marks=marks)
    if device == "cpu":
        for candidate in memory.ANALYSED:
            yield pytest.param(
                "base", memory.WORKLOAD, memory.STATISTICS, candidate, marks=[pytest.mark.long]
            )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(metafunc.config.getoption("device")))
    metafunc.parametrize(("model", "workload", "what", "candidate"), found)


def test_memory(in_turns, proven, request, device, model, workload, what, candidate):
    size = "tiny" if request.config.getoption("smoke") else model

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the processes need what earlier benchmarks have left in the allocator
        options = {"what": what, "device": device.type}
        return memory.bench_memory(size, workload, wanted, torch.get_num_threads(), **options)

    in_turns(rows)
