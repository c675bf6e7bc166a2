"""`SentenceTransformer.encode` of real texts by MiniLM, stock and accelerated; our own `SentenceEncoder`."""

from __future__ import annotations

import pytest

from bench.lib import encode
from bench.lib.texts import TEXTS

TEXTS_EACH = 1000


@pytest.mark.parametrize(
    ("model", "workload", "candidate"),
    [("minilm", f"{kind}{TEXTS_EACH}", name) for kind in TEXTS for name in encode.CANDIDATES],
)
def test_encode(in_turns, few, request, model, workload, candidate):
    kind = workload.removesuffix(str(TEXTS_EACH))
    count = 8 if request.config.getoption("smoke") else TEXTS_EACH
    in_turns(lambda wanted: encode.bench_encode(kind, count, wanted=wanted, samples=few))
