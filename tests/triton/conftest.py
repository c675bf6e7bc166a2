"""The sanitizer around a test, and the widths of rows.

A module asks for the sanitizer by `pytestmark = pytest.mark.usefixtures("checked_memory")`.
"""

import pytest
import torch

from tests.support.triton_sanitizer import sanitized


@pytest.fixture
def checked_memory():
    """Run every launch under the sanitizer. Memory starts as NaN or the largest integer: a hole is not 0."""
    with sanitized() as report:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield report
        finally:
            torch.use_deterministic_algorithms(before)


@pytest.fixture(params=["one_block", "column_blocks"])
def hidden(request, monkeypatch):
    """A width that one program holds, and one that it does not hold because blocks are made narrow.

    `ONE_BLOCK` of the test module names the limits in its kernels.
    """
    if request.param == "column_blocks":
        kernels = request.module.kernels
        for limit in request.module.ONE_BLOCK:
            monkeypatch.setattr(kernels, limit, 64)
        monkeypatch.setattr(kernels, "WIDE_BLOCK", 32)
    return 70


@pytest.fixture
def bad_ids(request):
    """No bad id is reported before or after a test."""
    cells = request.module.kernels.bad_ids(request.module.DEVICE).cells
    cells.zero_()
    yield cells
    cells.zero_()


@pytest.fixture(params=["as_it_lies", "pointers"])
def transport(request, monkeypatch):
    """Tensor descriptors where the matrices allow them, and pointers in any case."""
    if request.param == "pointers":
        kernels = request.module.kernels
        monkeypatch.setattr(getattr(kernels, "linear", kernels), "fits_tensor_map", lambda *matrices: False)


@pytest.fixture
def exact_gelu(request, monkeypatch):
    """As with FASTBERT_EXACT_GELU=1."""
    monkeypatch.setattr(request.module.kernels.activation_kernels, "EXACT_GELU", True)
