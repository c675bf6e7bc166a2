"""`SentenceTransformer.encode` of real texts by MiniLM, stock and accelerated; our own `SentenceEncoder`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.lib import encode
from bench.lib.texts import TEXTS

pytestmark = pytest.mark.cpu

TEXTS_EACH = 1000
# what `make bench` has time for; --everything adds the rest
SHORT = (("sentences", 200), (encode.ONE_BY_ONE, 40))


def cases() -> Iterator[object]:
    """(model, workload, candidate)."""
    for kind, count in (*SHORT, *((kind, TEXTS_EACH) for kind in TEXTS)):
        marks = [] if (kind, count) in SHORT else [pytest.mark.long]
        for candidate in encode.CANDIDATES:
            yield pytest.param("minilm", f"{kind}{count}", candidate, marks=marks)


@pytest.mark.parametrize(("model", "workload", "candidate"), list(cases()))
def test_encode(in_turns, few, request, model, workload, candidate):
    kind = workload.rstrip("0123456789")
    count = 8 if request.config.getoption("smoke") else int(workload.removeprefix(kind))
    in_turns(lambda wanted: encode.bench_encode(kind, count, wanted=wanted, samples=few))
