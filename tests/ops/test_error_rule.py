"""The error rule over all cases of every op, on every backend that serves a CPU here.

`attention` and `linear_int8` have ways beside their backends, and tests of their own.
"""

from __future__ import annotations

import pytest

from fastbert import testing
from fastbert.backends.cpu import linear as cpu_linear
from fastbert.runtime import dispatch
from tests.support.inputs import name
from tests.support.ops import served

SERVED = [
    pytest.param(op, backend, dtype, case, id=f"{op}-{backend}-{name(dtype)}-{case}")
    for op in dispatch.OPS
    if op not in ("attention", "linear_int8")
    for backend, dtype in served(op)
    for case in testing.cases(op)
]


@pytest.mark.parametrize(("op", "backend", "dtype", "case"), SERVED)
def test_error_rule(op, backend, dtype, case, monkeypatch):
    if op == "linear":  # products of few rows too, which `cpu` leaves to `aten`
        monkeypatch.setattr(cpu_linear, "_FEWEST_ROWS", 1)
    rows = testing.run_case(case, backend, dtype)
    assert rows
    for row in rows:
        assert row.passed, f"{row.quantity}: {row.reason}"
        assert op != "packing" or row.max_error == 0, "nothing is computed, so nothing may be off"
