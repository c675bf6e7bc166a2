"""The stand-in for the CUDA runtime: reports leave the op's call, and bad launches are refused."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fastbert.ops.layer_norm import LayerNormInputs
from tests.ptx import emulator
from tests.ptx.emulator.cudart import INVALID_CONFIGURATION, INVALID_VALUE, Emulation, Library
from tests.support import cuda_build
from tests.support.cpu_truth import randn

KB = 1024

pytest_plugins = ("tests.support.ptx_fixtures",)


# --- the backend on CPU tensors ---


def forward(emulated, x, weight):
    return emulated.backend.layer_norm_fwd(LayerNormInputs(x, weight, eps=1e-5), False)[0]


def test_a_report_leaves_the_call(emulated):
    x, weight = randn(4, 768), randn(1024)
    with pytest.raises(emulator.OutOfBounds, match="forward_kernel"):
        forward(emulated, x, weight[:760])  # the bytes behind it are of the same storage
    assert torch.isfinite(forward(emulated, x, weight[:768])).all()


def test_memory_of_no_launcher_is_out_of_bounds(emulated):
    x, weight, y = randn(4, 768), randn(768), torch.zeros(4, 768)
    given = (0, 4, 768, x.data_ptr(), 768, 0, 0, weight.data_ptr(), 0, 0, 0, 0, 0)
    rest = (1e-5, 0, 0, 0, 1.0, y.data_ptr(), 0, 0, 0, 0, 0)
    launch = emulated.backend.device.extension.cuda_layer_norm_fwd
    with pytest.raises(emulator.OutOfBounds):
        launch(*given, *rest)
    emulated.register(x, weight, y)
    launch(*given, *rest)
    assert torch.equal(y, forward(emulated, x, weight))


def test_outside_there_is_no_device(emulated):
    library = emulated.library
    emulated.library.calls.emulator_set_callbacks(None, None)
    x = randn(4, 768)
    with pytest.raises(RuntimeError, match="no CUDA-capable device"):
        forward(emulated, x, x[0])
    assert library.module.cuda_archs == "ptx_80"


# --- other host code ---


@pytest.fixture
def emulated_launches():
    """tests/ptx/cuda/launches.cu; a launch may touch what `memory` has."""
    library = Library(cuda_build.launches())
    library.calls.text.restype = ctypes.c_char_p
    emulation = Emulation(library)
    with emulation.connected():
        yield emulation


def integers(emulation, *shape):
    tensor = torch.full(shape, -1, dtype=torch.int32)
    emulation.register(tensor)
    return tensor, ctypes.c_void_p(tensor.data_ptr())


def turn(emulation, grid=(1, 1, 1), threads=128, shared=512):
    """(code, the threads' numbers that each block wrote)."""
    out, place = integers(emulation, max(1, torch.Size(grid).numel()), max(1, threads))
    code = emulation.library.calls.turn(place, *grid, threads, ctypes.c_size_t(shared))
    emulation.raise_report()
    return code, out


def test_parameters_of_many_sizes(emulated_launches):
    given, out = torch.tensor([1.0, 2.5]), torch.zeros(7, dtype=torch.float64)
    emulated_launches.register(given, out)
    places = (ctypes.c_void_p(t.data_ptr()) for t in (given, out))
    assert emulated_launches.library.calls.mixed(*places) == 0
    emulated_launches.raise_report()
    assert out.tolist() == [-3, 7, 0.1, 515, -515, 2.5, 1]


def test_grid_block_and_dynamic_shared_memory(emulated_launches):
    code, out = turn(emulated_launches, (3, 2, 2), 96, 384)
    assert code == 0
    assert torch.equal(out, torch.arange(95, -1, -1, dtype=torch.int32).expand(12, 96))
    launch = emulated_launches.launches[-1]
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 2, 2), (96, 1, 1), 384)


def test_dynamic_shared_memory_has_bounds(emulated_launches):
    with pytest.raises(emulator.OutOfBounds):
        turn(emulated_launches, threads=128, shared=508)


@pytest.mark.parametrize("grid", ((0, 1, 1), (1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)))
def test_grids_that_no_device_takes(emulated_launches, grid):
    place = ctypes.c_void_p(0)
    code = emulated_launches.library.calls.turn(place, *map(ctypes.c_uint, grid), 32, ctypes.c_size_t(128))
    assert code == INVALID_CONFIGURATION
    assert emulated_launches.launches == []


@pytest.mark.parametrize(("threads", "code"), ((0, INVALID_CONFIGURATION), (129, INVALID_VALUE)))
def test_blocks_that_no_device_takes(emulated_launches, threads, code):
    """129 are more than the kernel's launch bounds."""
    assert turn(emulated_launches, threads=threads, shared=1024)[0] == code
    assert turn(emulated_launches, threads=1025, shared=8192)[0] == INVALID_CONFIGURATION


def test_more_than_48_kb_must_be_asked_for(emulated_launches):
    calls = emulated_launches.library.calls
    assert turn(emulated_launches, shared=48 * KB)[0] == 0
    assert turn(emulated_launches, shared=48 * KB + 4)[0] == INVALID_VALUE
    assert calls.allow(163 * KB + 1) == INVALID_VALUE
    assert calls.allow(100 * KB) == 0
    assert turn(emulated_launches, shared=100 * KB)[0] == 0
    assert turn(emulated_launches, shared=100 * KB + 1)[0] == INVALID_VALUE
    assert calls.allow(163 * KB) == 0
    assert turn(emulated_launches, shared=163 * KB)[0] == 0


def test_static_shared_memory_counts(emulated_launches):
    calls, (out, place) = emulated_launches.library.calls, integers(emulated_launches, 256)
    assert calls.both(place, ctypes.c_size_t(47 * KB)) == 0
    emulated_launches.raise_report()
    assert torch.equal(out, torch.arange(255, -1, -1, dtype=torch.int32) * torch.arange(256, 0, -1))
    assert calls.both(place, ctypes.c_size_t(47 * KB + 1)) == INVALID_VALUE
    assert calls.allow_both(163 * KB) == INVALID_VALUE
    assert calls.allow_both(162 * KB) == 0


def test_errors_are_kept_until_they_are_read(emulated_launches):
    calls = emulated_launches.library.calls
    assert calls.set_device(0) == 0
    assert calls.text(calls.set_device(1)) == b"invalid device ordinal"
    assert calls.text(INVALID_VALUE) == b"invalid argument"


def test_what_the_stand_in_lacks_does_not_link(emulated_launches):
    with pytest.raises(AssertionError, match="cudaDeviceSynchronize"):
        cuda_build.launches("-DUNKNOWN")
