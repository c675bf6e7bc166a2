"""Engines under load: a busy neighbour, 4 processes of one thread, 2 Python threads that call one model.

A row's time is that under load; `loss` is the cost of the load (bench/lib/load.py). A test of ours fails if
it loses more than the best peer of its precision, beyond noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench.lib import load

pytestmark = pytest.mark.cpu

CASES = (("minilm", "1x16"), ("base", "1x128"), ("base", "8x128"), ("base", "ragged16"))
# (kind, model, workload): the candidates that `make bench` has time for; --everything adds the rest
SHORT = {
    (kind, "minilm", "1x16"): ("fastbert-fp32", "openvino-fp32", "onnxruntime-fp32") for kind in load.KINDS
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """(kind, model, workload, candidate), the loads of one model together."""
    found = []
    for model, workload in CASES:
        for kind in load.KINDS:
            for candidate in load.CANDIDATES:
                rare = candidate not in SHORT.get((kind, model, workload), ())
                marks = [pytest.mark.long] if rare else []
                found.append(pytest.param(kind, model, workload, candidate, marks=marks))
    metafunc.parametrize(("kind", "model", "workload", "candidate"), found)


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[Callable[[str], load.Bench]]:
    """model -> its processes; those of the model before end."""
    option = request.config.getoption
    kept: dict[str, load.Bench] = {}
    with tempfile.TemporaryDirectory() as folder:

        def of(model: str) -> load.Bench:
            if model not in kept:
                for last in kept.values():
                    last.close()
                kept.clear()
                place = Path(folder, model)
                place.mkdir()
                asked = [item.callspec.params for item in request.session.items if is_of(item, model)]
                kept[model] = load.Bench(
                    "tiny" if option("smoke") else model,
                    place,
                    torch.get_num_threads(),
                    {params["candidate"] for params in asked},
                    {params["workload"] for params in asked},
                    seconds=0.0 if option("smoke") else load.LEAST_SECONDS,
                )
            return kept[model]

        try:
            yield of
        finally:
            for last in kept.values():
                last.close()


def is_of(item: pytest.Item, model: str) -> bool:
    """Whether a test of this file is of a model."""
    return item.path == Path(__file__) and item.callspec.params["model"] == model


def test_load(in_turns, processes, request, kind, model, workload, candidate):
    option = request.config.getoption

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        yield from processes(model).rows(kind, workload, wanted, option("samples"))

    row = in_turns(rows)
    if row.get("holds") is False and not option("smoke"):
        pytest.fail(
            f"{candidate}: loss {row['loss']:.2f}, expected at most {row['best_peer_loss']:.2f} as "
            f"{row['best_peer']}, and {row['allowance']:.0%} for noise",
            pytrace=False,
        )
