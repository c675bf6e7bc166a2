"""The stand-in for the CUDA runtime: reports leave the op's call, and bad launches are refused."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from fastbert.ops.layer_norm import LayerNormInputs
from tests.ptx import emulator
from tests.ptx.emulator.cudart import (
    INVALID_CONFIGURATION,
    INVALID_VALUE,
    LAUNCH_FAILURE,
    MAX_DYNAMIC_SHARED,
    Emulation,
    Launch,
    Memory,
    Raising,
)
from tests.support.cpu_truth import randn

# --- its parts ---


@pytest.mark.parametrize("make", (lambda x: x.new_empty(3, 5), torch.empty_like, lambda x: x.new_zeros(7)))
@pytest.mark.parametrize("place", (-1, 1))
def test_guards_around_new_tensors(make, place):
    with Memory() as memory:
        out = make(torch.randn(2, 3, dtype=torch.float64))
    assert out.data_ptr() % 256 == 0
    assert any(t is out for t in memory.tensors)
    assert out.isnan().all() or (out == 0).all()
    memory.check_guards()
    ctypes.memset(out.data_ptr() + (-1 if place < 0 else out.numel() * 8), 0, 1)
    with pytest.raises(AssertionError, match="written beside an output"):
        memory.check_guards()


def test_a_launcher_may_not_write_its_inputs():
    x = torch.zeros(3)
    launch = Emulation(None).launcher(lambda x, y: y.add_(x))
    launch(x, torch.ones(3))
    with pytest.raises(AssertionError, match="an input was written"):
        launch(torch.ones(3), x)


@pytest.mark.parametrize("returns", (True, False))
def test_a_report_is_raised_even_if_the_host_code_misses_the_error(returns):
    def call():
        assert emulation._launch(0, (1, 1, 1, 32, 1, 1), 0, None) == LAUNCH_FAILURE
        if not returns:
            raise RuntimeError("unspecified launch failure")

    library = SimpleNamespace(
        module=SimpleNamespace(call=call), names=["one"], texts={}, program={}.__getitem__
    )
    emulation = Emulation(library)
    with pytest.raises(KeyError, match="one"):
        Raising(emulation).call()
    emulation.raise_report()
    assert emulation._set_attribute(0, MAX_DYNAMIC_SHARED, 0) == LAUNCH_FAILURE
    with pytest.raises(KeyError, match="one"):
        emulation.raise_report()


# --- the backend on CPU tensors ---


def forward(emulated, x, weight):
    return emulated.backend.layer_norm_fwd(LayerNormInputs(x, weight, eps=1e-5), False)[0]


def test_a_report_leaves_the_call(emulated):
    x, weight = randn(4, 768), randn(1024)
    with pytest.raises(emulator.OutOfBounds, match="forward_kernel"):
        forward(emulated, x, weight[:760])  # the bytes behind it are of the same storage
    assert torch.isfinite(forward(emulated, x, weight[:768])).all()


# --- launches that no device takes ---

KB = 1024
MANY = 2**31
LAUNCHES = (
    ((3, 2, 2), 96, 384, 0),
    ((0, 1, 1), 32, 0, INVALID_CONFIGURATION),
    ((1, 65536, 1), 32, 0, INVALID_CONFIGURATION),
    ((1, 1, 65536), 32, 0, INVALID_CONFIGURATION),
    ((MANY, 1, 1), 32, 0, INVALID_CONFIGURATION),
    ((1, 1, 1), 0, 0, INVALID_CONFIGURATION),
    ((1, 1, 1), 1025, 0, INVALID_CONFIGURATION),
    ((1, 1, 1), 129, 0, INVALID_VALUE),  # more than the launch bounds
    ((1, 1, 1), 128, 47 * KB, 0),  # 48 KB with the static memory
    ((1, 1, 1), 128, 47 * KB + 1, INVALID_VALUE),
)


@pytest.fixture
def fake():
    """An emulation of one kernel, with launch bounds and 1 KB of static shared memory, that is never run."""
    program = SimpleNamespace(target="sm_80", kernels={"one": SimpleNamespace(shared_bytes=KB)})
    texts = {"one": "\n.maxntid 128, 1, 1\n"}
    return Emulation(SimpleNamespace(names=["one"], texts=texts, program=lambda name: program))


@pytest.mark.parametrize(("grid", "threads", "shared", "code"), LAUNCHES, ids=str)
def test_configurations(fake, grid, threads, shared, code):
    assert fake._configuration_error(Launch("one", grid, (threads, 1, 1), shared)) == code


def test_more_than_48_kb_must_be_asked_for(fake):
    def launch(shared):
        return fake._configuration_error(Launch("one", (1, 1, 1), (128, 1, 1), shared))

    assert fake._set_attribute(0, MAX_DYNAMIC_SHARED, 162 * KB + 1) == INVALID_VALUE
    assert fake._set_attribute(0, MAX_DYNAMIC_SHARED, 100 * KB) == 0
    assert launch(100 * KB) == 0
    assert launch(100 * KB + 1) == INVALID_VALUE
