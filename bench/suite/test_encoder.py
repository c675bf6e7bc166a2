"""The encoder's forward by every engine: real tokens per second, and how near the machine's roof."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS

# what `make bench` has time for; --everything adds the rest
SHORT = {"base": ("8x128", "ragged16"), "minilm": ("8x128", "ragged64")}
WORKLOADS = ("1x128", "1x512", "8x128", "ragged16", "ragged64")
COMPILED = "torch_compile"


def cases() -> Iterator[object]:
    """(model, workload, candidate), the workloads of one model together: its engines are built once."""
    for model in ("base", "minilm"):
        for workload in WORKLOADS:
            for candidate in ENGINES:
                rare = workload not in SHORT[model] or candidate.startswith(COMPILED)
                marks = [pytest.mark.long] if rare else []
                yield pytest.param(
                    model, workload, candidate, marks=marks, id=f"encoder-{candidate}-{model}-{workload}"
                )


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_encoder(in_turns, peak, engines, request, model, workload, candidate):
    option = request.config.getoption
    size = workloads.TINY if option("smoke") else MODELS[model]

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        forwards = engines.of(size, wanted)
        yield from encoder.bench_encoder(size, workload, forwards, peak, samples=option("samples"))
        torch._dynamo.reset()  # every shape is compiled for itself, and kept until here

    in_turns(rows)
