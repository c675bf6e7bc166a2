"""One short text at a time: the median and the longest wait of a caller.

`1x128-rested` is a caller of about ten calls per second: the process sleeps for 100 ms before each
call, so that all threads must be woken, and caches are colder.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator

import pytest

from bench.gpu.engines import ENGINES as GPU_ENGINES
from bench.lib import encoder, workloads
from bench.lib.engines import ENGINES, MODELS

SAMPLES = 4  # times --samples: the last percentiles need more of them
LENGTHS = (16, 128, 384)  # of the one sequence, in tokens
RESTED, RESTED_SECONDS = "-rested", 0.1
# device -> model -> workloads that `make bench` has time for; --everything adds the rest
SHORT = {
    "cpu": {"base": ("1x128",), "minilm": ("1x16", "1x128", "1x16-rested", "1x128-rested")},
    "cuda": {"base": ("1x128", "1x384"), "large": ("1x128", "1x384")},
}
CANDIDATES = {"cpu": ENGINES, "cuda": GPU_ENGINES}


def cases(device: str) -> Iterator[object]:
    """(model, workload, candidate); torch.compile is measured by the encoder's benchmark."""
    for model, short in SHORT[device].items():
        for length, rest in itertools.product(LENGTHS, ("", RESTED) if device == "cpu" else ("",)):
            workload = f"1x{length}{rest}"
            for candidate in CANDIDATES[device]:
                if not candidate.startswith("torch_compile"):
                    marks = [] if workload in short else [pytest.mark.long]
                    name = f"latency-{candidate}-{model}-{workload}"
                    yield pytest.param(model, workload, candidate, marks=marks, id=name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = list(cases(metafunc.config.getoption("device")))
    metafunc.parametrize(("model", "workload", "candidate"), found)


def test_latency(in_turns, peak, engines, device, request, model, workload, candidate):
    option = request.config.getoption
    size = workloads.TINY if option("smoke") else MODELS[model]
    rested = workload.endswith(RESTED)
    lengths = (int(workload.removeprefix("1x").removesuffix(RESTED)),)

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        found = encoder.bench_encoder(
            size,
            workload,
            engines.of(size, wanted),
            peak,
            samples=SAMPLES * option("samples"),
            lengths=lengths,
            device=device,
            pause=RESTED_SECONDS if rested else encoder.PAUSE_SECONDS,
        )
        for row in found:
            if row["status"] == "ok":
                tenths = statistics.quantiles(row["samples_ms"], n=10, method="inclusive")
                row |= {"p90_ms": tenths[-1], "max_ms": max(row["samples_ms"])}
            yield row

    in_turns(rows)
