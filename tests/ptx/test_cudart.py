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
    Library,
    Memory,
    Raising,
    entries,
    regions,
    tensors_in,
)
from tests.support import cuda_build
from tests.support.cpu_truth import randn

KB = 1024

pytest_plugins = ("tests.support.ptx_fixtures",)


# --- its parts ---

PTX = """
.version 9.0
.extern .shared .align 16 .b8 common[];
.visible .entry first(.param .u64 first_param_0)
{
{
.reg .b32 inner;
}
mov.b64 {%r1, %r2}, %rd1;
}
.global .u32 between;
.entry second()
.maxntid 32, 1, 1
{
ret;
}
"""


def test_a_module_is_split_by_kernel():
    found = entries(PTX)
    assert list(found) == ["first", "second"]
    for name, text in found.items():
        assert text.count(".entry") == 1
        assert f".entry {name}(" in text
        assert ".extern .shared" in text
        assert ".global .u32 between" in text
        assert text.index(".version") < text.index(".entry")
    assert found["first"].count("}") == 3
    assert ".maxntid" not in found["first"]
    assert found["second"].rstrip().endswith("ret;\n}")


def test_regions_are_the_tensors_own_bytes():
    memory = torch.zeros(100)
    start = memory.data_ptr()
    views = [memory[10:20], memory[15:30], memory[40:60].view(4, 5)[:, :2], memory[90:90]]
    found = regions(views)
    assert [(r.ctypes.data - start, r.nbytes) for r in found] == [(40, 80), (160, 4 * 17)]
    found[0][:] = 0x3F
    assert (memory[10:30] != 0).all()
    assert memory.count_nonzero() == 20


def test_tensors_are_found_in_any_argument():
    a, b, c, d = (torch.zeros(n) for n in range(1, 5))
    given = (a, [b, None, 3], {"c": SimpleNamespace(inside=(c,), name="x")}, LayerNormInputs(d, a))
    assert [t.numel() for t in tensors_in(given)] == [1, 2, 3, 4, 1]


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


def test_memory_of_no_launcher_is_out_of_bounds(emulated):
    x, weight, y = randn(4, 768), randn(768), torch.zeros(4, 768)
    given = (0, 4, 768, x.data_ptr(), 768, 0, 0, weight.data_ptr(), 0, 0, 0, 0, 0)
    rest = (1e-5, 0, 0, 0, 1.0, y.data_ptr(), 0, 0, 0, 0, 0, 0, 0)
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
