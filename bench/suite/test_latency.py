"""One short text at a time: the median and the longest wait of a caller."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pytest

from bench.gpu.engines import ENGINES as GPU_ENGINES
from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS

SAMPLES = 4  # times --samples: the last percentiles need more of them
LENGTHS = (16, 128, 384)  # of the one sequence, in tokens
# device -> model -> lengths that `make bench` has time for; --everything adds the rest
SHORT = {"cpu": {"base": (128,), "minilm": (16, 128)}, "cuda": {"base": (128, 384), "large": (128, 384)}}
CANDIDATES = {"cpu": ENGINES, "cuda": GPU_ENGINES}


def cases(device: str) -> Iterator[object]:
    """(model, workload, candidate); torch.compile is measured by the encoder's benchmark."""
    for model, short in SHORT[device].items():
        for length in LENGTHS:
            for candidate in CANDIDATES[device]:
                if not candidate.startswith("torch_compile"):
                    marks = [] if length in short else [pytest.mark.long]
                    yield pytest.param(
                        model,
                        f"1x{length}",
                        candidate,
                        marks=marks,
                        id=f"latency-{candidate}-{model}-1x{length}",
                    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(metafunc.config.getoption("device")))
    metafunc.parametrize(("model", "workload", "candidate"), found)


def test_latency(in_turns, peak, engines, device, request, model, workload, candidate):
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
            device=device,
        )
        for row in found:
            if row["status"] == "ok":
                tenths = statistics.quantiles(row["samples_ms"], n=10, method="inclusive")
                row |= {"p90_ms": tenths[-1], "max_ms": max(row["samples_ms"])}
            yield row

    in_turns(rows)
