"""A training step of BERT-base, dropout 0.1, AdamW: ours, transformers', torch.compile of transformers'."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from bench.lib import training, workloads
from bench.lib.engines import MODELS, compile_cache

TAGS = {"cpu": ("fp32", "bf16"), "cuda": ("bf16",)}
BATCHES = {"cpu": (("base", "8x128"), ("base", "ragged16")), "cuda": (("base", "full"), ("large", "train"))}
# what `make bench` has time for, but for torch.compile; --everything adds the rest. On a CPU the loop of
# pre-training (test_pretraining.py) has the other head
SHORT = {"cpu": ("8x128",), "cuda": ("full", "train")}
SHORT_HEADS = {"cpu": ("classification",), "cuda": tuple(training.HEADS)}


def cases(device: str) -> Iterator[object]:
    """(model, workload, head, candidate)."""
    for model, workload in BATCHES[device]:
        for head in training.HEADS:
            for candidate in (f"{name}-{tag}" for name in training.CANDIDATES for tag in TAGS[device]):
                rare = workload not in SHORT[device] or head not in SHORT_HEADS[device]
                rare = rare or candidate.startswith("torch_compile")
                marks = [pytest.mark.long] if rare else []
                yield pytest.param(model, workload, head, candidate, marks=marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(metafunc.config.getoption("device")))
    metafunc.parametrize(("model", "workload", "head", "candidate"), found)


def test_training(in_turns, peak, few, device, request, model, workload, head, candidate):
    size = workloads.TINY if request.config.getoption("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        with compile_cache():
            for tag, names in training.by_dtype(wanted):
                options = {"wanted": names, "head": head, "samples": few, "roofs": peak, "device": device}
                yield from training.bench_training(size, workload, tag, **options)
                torch._dynamo.reset()
                gc.collect()

    in_turns(rows)
