"""One short text at a time: how long a caller waits, in the middle and at worst."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS

SAMPLES = 4  # times --samples: the last percentiles need more of them
# one sequence, by its length in tokens; --everything adds the longer ones
LENGTHS, SHORT = (16, 128, 384), {"base": (128,), "minilm": (16, 128)}


def cases() -> Iterator[object]:
    """(model, length, candidate); torch.compile is measured by the encoder's benchmark."""
    for model, short in SHORT.items():
        for length in LENGTHS:
            for candidate in ENGINES:
                if not candidate.startswith("torch_compile"):
                    marks = [] if length in short else [pytest.mark.long]
                    yield pytest.param(
                        model,
                        f"1x{length}",
                        candidate,
                        marks=marks,
                        id=f"latency-{candidate}-{model}-1x{length}",
                    )


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_latency(in_turns, peak, engines, request, model, workload, candidate):
    option = request.config.getoption
    size = workloads.TINY if option("smoke") else MODELS[model]
    lengths = (int(workload.removeprefix("1x")),)

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        found = encoder.bench_encoder(
            size,
            workload,
            engines.of(size, wanted),
            peak,
            samples=SAMPLES * option("samples"),
            lengths=lengths,
        )
        for row in found:
            if row["status"] == "ok":
                tenths = statistics.quantiles(row["samples_ms"], n=10, method="inclusive")
                row |= {"p90_ms": tenths[-1], "max_ms": max(row["samples_ms"])}
            yield row

    in_turns(rows)
