"""Fixtures of the tests that run the CUDA kernels compiled for the host, on CPU tensors."""

import contextlib
import importlib.util

import pytest
import torch

from fastbert.backends import cuda
from fastbert.runtime import dispatch, loader
from tests.support import cpu_build


@pytest.fixture(scope="module")
def emulated_extension():
    """`_C` with the CUDA kernels compiled for the host (tests/cpu/cpp/cuda_on_host.h)."""
    if getattr(loader.extension, "best_cpu_isa", lambda: "none")() == "none":
        pytest.skip("the emulation converts fp16 by F16C, which this processor lacks")
    spec = importlib.util.spec_from_file_location("_C", cpu_build.emulated_extension())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.cuda_archs == "host"
    return module


@pytest.fixture
def cuda_on_host(emulated_extension, monkeypatch):
    """The `cuda` backend with these kernels, on CPU tensors; the device has two multiprocessors."""
    monkeypatch.setattr(cuda.device, "extension", emulated_extension)
    monkeypatch.setattr(cuda.device, "place", lambda device: (0, 0))
    monkeypatch.setattr(cuda.device, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(cuda.device, "is_hopper", lambda device: False)
    monkeypatch.setattr(cuda.device, "has_group_products", lambda device: False)
    monkeypatch.setattr(cuda, "available", lambda device_type: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return cuda


@pytest.fixture
def kernels_only(monkeypatch):
    """No call may go to the next backend."""

    def refuse(backend, function, *_):
        raise AssertionError(f"the {backend} kernel should serve this call of {function}")

    monkeypatch.setattr(dispatch, "next_function", refuse)
