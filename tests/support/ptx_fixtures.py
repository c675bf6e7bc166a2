"""Fixture of the tests that run CUDA kernels in the PTX emulator."""

import pytest

from tests.ptx.emulator.cudart import emulated_cuda


@pytest.fixture
def emulated():
    """The `cuda` backend on CPU tensors; `emulated.schedule` and `emulated.seed` may be set. Needs nvcc."""
    with emulated_cuda() as emulation:
        yield emulation
