"""Fixtures of the tests of compiled kernels: instruction sets, threads, guards around allocations."""

import contextlib

import pytest
import torch

from fastbert.runtime import loader

ISAS = ("avx2", "avx2_vnni", "avx512", "avx512_bf16")


def available_isas() -> list[str]:
    """Those that this processor has."""
    module, found = loader.extension, []
    before = module.cpu_isa()
    for name in ISAS:
        with contextlib.suppress(ValueError):
            module.set_cpu_isa(name)
            found.append(name)
    module.set_cpu_isa(before)
    return found


def using_isa(name):
    """Body of a fixture: this instruction set in use; skips where the processor lacks it."""
    module = loader.extension
    if name not in available_isas():
        pytest.skip(f"this processor has no {name}")
    before = module.cpu_isa()
    module.set_cpu_isa(name)
    try:
        yield name
    finally:
        module.set_cpu_isa(before)


@pytest.fixture(params=("avx2", "avx512"))
def isa(request):
    """AVX2 and AVX-512 in turn, for ops without kernels for AVX-512-BF16 (cpu/test_isa.py)."""
    yield from using_isa(request.param)


@pytest.fixture(params=("avx2", "avx512", "avx512_bf16"))
def every_isa(request):
    """Each instruction set in turn; AVX-VNNI is `linear_int8`'s alone."""
    yield from using_isa(request.param)


@pytest.fixture
def threads():
    """Threads that work together, also on a busy machine; torch's number of them is restored afterwards."""
    before, extension = torch.get_num_threads(), loader.extension
    if extension is not None:
        extension.set_may_be_alone(False)
    yield
    if extension is not None:
        extension.set_may_be_alone(True)
    torch.set_num_threads(before)


@pytest.fixture
def guarded(monkeypatch):
    """Put guards around every tensor that the backend allocates, and NaN into those it does not want zeroed.

    The test fails at its end if a guard has changed. An element that was not written stays NaN.
    """
    guards = []

    def allocate(fill):
        def allocator(self, *size, dtype=None):
            size = size[0] if len(size) == 1 else size
            shape = torch.Size(size if isinstance(size, (tuple, list, torch.Size)) else (size,))
            dtype = dtype or self.dtype
            pad = 128 // dtype.itemsize
            memory = torch.full(((shape.numel() + 2 * pad) * dtype.itemsize,), 0xFF, dtype=torch.uint8)
            guards.append((memory, pad * dtype.itemsize))
            inner = memory.view(dtype)[pad : pad + shape.numel()].view(shape)
            return inner.zero_() if fill == 0 else inner

        return allocator

    monkeypatch.setattr(torch.Tensor, "new_empty", allocate(None))
    monkeypatch.setattr(torch.Tensor, "new_zeros", allocate(0))
    yield
    assert guards, "the backend allocated nothing through new_empty: the guards guard nothing"
    for memory, pad in guards:
        assert (memory[:pad] == 0xFF).all(), "written before the start of an output"
        assert (memory[-pad:] == 0xFF).all(), "written past the end of an output"
