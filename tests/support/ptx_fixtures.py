"""Fixtures of the tests that run CUDA kernels in the PTX emulator."""

import pytest

from fastbert.runtime import dispatch
from tests.ptx.emulator.cudart import emulated_cuda


@pytest.fixture
def emulated():
    """The `cuda` backend on CPU tensors; `emulated.schedule` and `emulated.seed` may be set. Needs nvcc."""
    with emulated_cuda() as emulation:
        yield emulation


@pytest.fixture
def kernels_only(monkeypatch):
    """No call may go to the next backend."""

    def refuse(backend, function, *_):
        raise AssertionError(f"the {backend} kernel should serve this call of {function}")

    monkeypatch.setattr(dispatch, "next_function", refuse)
