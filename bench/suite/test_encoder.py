"""The encoder's forward by every engine: real tokens per second, and how near the machine's roof."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS, Bank

# what `make bench` has time for; --everything adds the rest
SHORT = {
    "base": ("8x128", "ragged16"),
    "minilm": ("1x128", "8x128"),
}
WORKLOADS = ("1x128", "1x512", "8x128", "ragged16", "ragged64")
SLOW_TO_BUILD = ("torch_compile",)


def cases() -> Iterator[object]:
    """(model, workload, candidate), the engines of one model together."""
    for model in ("base", "minilm"):
        for workload in WORKLOADS:
            for candidate in ENGINES:
                rare = workload not in SHORT[model] or candidate.startswith(SLOW_TO_BUILD)
                yield pytest.param(model, workload, candidate, marks=[pytest.mark.long] if rare else [])


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[dict]:
    """model -> its engines, built once; those of the last model only are kept."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"folder": Path(folder)}


def built(engines: dict, model: workloads.Model, wanted: tuple[str, ...]) -> dict:
    """The engines of a model."""
    if engines.get("model") != model.name:
        engines.pop("bank", None)
        folder = engines["folder"] / model.name
        folder.mkdir()
        engines |= {"bank": Bank(model, torch.get_num_threads(), folder), "model": model.name, "built": {}}
    made = engines["built"]
    made |= encoder.build(engines["bank"], tuple(name for name in wanted if name not in made))
    return {name: made[name] for name in wanted}


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_encoder(in_turns, peak, engines, request, model, workload, candidate):
    option = request.config.getoption
    size = workloads.TINY if option("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        forwards = built(engines, size, wanted)
        yield from encoder.bench_encoder(size, workload, forwards, peak, samples=option("samples"))
        torch._dynamo.reset()  # every shape is compiled for itself, and kept until here

    in_turns(rows)
