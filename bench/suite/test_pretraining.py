"""Pre-training: text to token ids beside `datasets`, and a step of the whole loop beside transformers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.lib import pretraining, training, workloads
from bench.lib.engines import MODELS, compile_cache

pytestmark = pytest.mark.cpu

TAGS = ("fp32", "bf16")
WORDS = 200_000


@pytest.mark.parametrize("candidate", pretraining.PREPARE)
def test_prepare(in_turns, few, request, candidate):
    words = 2_000 if request.config.getoption("smoke") else WORDS
    in_turns(lambda wanted: pretraining.bench_prepare(words, wanted=wanted, samples=few))


def cases() -> Iterator[object]:
    """(model, workload, candidate); a short run has MiniLM in fp32, without torch.compile."""
    for model in ("minilm", "base"):
        for name in pretraining.LOOP:
            for tag in TAGS:
                short = model == "minilm" and name != "torch_compile" and tag == "fp32"
                yield pytest.param(model, "8x128", f"{name}-{tag}", marks=[] if short else [pytest.mark.long])


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_loop(in_turns, peak, few, request, model, workload, candidate):
    size = workloads.TINY if request.config.getoption("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        with compile_cache():
            for tag, names in training.by_dtype(wanted):
                yield from pretraining.bench_loop(size, tag, wanted=names, samples=few, roofs=peak)
                torch._dynamo.reset()

    in_turns(rows)
