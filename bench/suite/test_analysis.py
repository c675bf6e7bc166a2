"""Analysis: attention statistics, importance and ablation of all heads, beside transformers' eager maps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.lib import analysis, workloads
from bench.lib.engines import MODELS

pytestmark = pytest.mark.cpu

# what a short run has; BERT-base on 64 sequences takes a quarter of an hour
SHORT = ("forward", "statistics", "importance")


def cases() -> Iterator[object]:
    """(model, workload, what, candidate)."""
    for what in analysis.WHAT:
        for candidate in analysis.CANDIDATES:
            if what in SHORT:
                yield pytest.param("minilm", "ragged16", what, candidate)
            yield pytest.param("base", "ragged64", what, candidate, marks=pytest.mark.long)


@pytest.mark.parametrize(("model", "workload", "what", "candidate"), list(cases()))
def test_analysis(in_turns, few, request, model, workload, what, candidate):
    smoke = request.config.getoption("smoke")
    size = workloads.TINY if smoke else MODELS[model]
    samples = 1 if what == "ablation" and not smoke else few

    def rows(wanted: tuple[str, ...]) -> Iterator[dict]:
        options = {"lengths": (9, 17, 30)} if smoke else {}
        return analysis.bench_analysis(size, workload, what, wanted=wanted, samples=samples, **options)

    in_turns(rows)
