"""The stand-in for the CUDA runtime: guards, inputs that stay as they are, reports that leave the call."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fastbert.ops.layer_norm import LayerNormInputs
from tests.ptx import emulator
from tests.ptx.emulator.cudart import Emulation, Memory
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


# --- the backend on CPU tensors ---


def forward(emulated, x, weight):
    return emulated.backend.layer_norm_fwd(LayerNormInputs(x, weight, eps=1e-5), False)[0]


def test_a_report_leaves_the_call(emulated):
    x, weight = randn(4, 768), randn(1024)
    with pytest.raises(emulator.OutOfBounds, match="forward_kernel"):
        forward(emulated, x, weight[:760])  # the bytes behind it are of the same storage
    assert torch.isfinite(forward(emulated, x, weight[:768])).all()
