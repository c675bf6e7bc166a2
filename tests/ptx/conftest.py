"""Fixtures of the tests of the PTX emulator, and of those that run CUDA kernels in it."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from fastbert.runtime import dispatch


@pytest.fixture
def random(request):
    """NumPy's generator, with a seed of each test's own."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def emulated():
    """The `cuda` backend on CPU tensors; `emulated.schedule` and `emulated.seed` may be set. Needs nvcc."""
    from tests.ptx.emulator.cudart import emulated_cuda

    with emulated_cuda() as emulation:
        yield emulation


@pytest.fixture
def linear(emulated):
    """The launchers of linear, of its passes, and of the product between the two of feed_forward."""
    from fastbert.backends.cuda import feed_forward
    from fastbert.backends.cuda import linear as launchers

    names = ("linear_fwd", "linear_fwd_with", "linear_bwd", "linear_bwd_with", "gradient")
    own = {name: emulated.launcher(getattr(launchers, name)) for name in names}
    between = ("inner_gradient", "feed_forward_bwd")
    own |= {name: emulated.launcher(getattr(feed_forward, name)) for name in between}
    return SimpleNamespace(**own)


@pytest.fixture
def kernels_only(monkeypatch):
    """No call may go to the next backend."""

    def refuse(backend, function, *_):
        raise AssertionError(f"the {backend} kernel should serve this call of {function}")

    monkeypatch.setattr(dispatch, "next_function", refuse)
