"""The error rule over all cases of every op with a Triton kernel; attention's tests cut theirs by length."""

from __future__ import annotations

import pytest

from fastbert import testing
from fastbert.backends import triton as backend
from fastbert.runtime import dispatch
from tests.support.triton_fixtures import DEVICE, kernels_of

kernels_of("linear")
pytestmark = pytest.mark.usefixtures("checked_memory")
CASES = [
    pytest.param(op, dtype, case, id=f"{op}-{str(dtype).removeprefix('torch.')}-{case}")
    for op, dtypes in backend.DTYPES.items()
    if op in dispatch.OPS and op not in ("attention", "linear_cross_entropy")
    for case in testing.cases(op) + (testing.gpu_cases(op)[2:] if op == "first_attention" else [])
    for dtype in dtypes
]


@pytest.mark.parametrize(("op", "dtype", "case"), CASES)
def test_cases(op, dtype, case):
    rows = testing.run_case(case, "triton", dtype, DEVICE)
    trained = dtype.is_floating_point and op not in dispatch.INFERENCE_ONLY
    assert any(row.quantity.startswith("d") for row in rows) == trained
    assert [f"{row.quantity}: {row.reason}" for row in rows if not row.passed] == []
