"""Where the CUDA C++ kernels run, and the facts of the device that each launch needs."""

from __future__ import annotations

import functools

import torch

from fastbert.runtime import loader
from fastbert.runtime.streams import current_stream

extension = loader.extension


def available(device_type: str) -> str | None:
    """None where the kernels run on this device type, else why not."""
    if device_type != "cuda":
        return f"runs on cuda, not on {device_type}"
    return loader.cuda_gap()


def place(device: torch.device) -> tuple[int, int]:
    """(index of the device, its current stream as an integer)."""
    return device.index, current_stream(device.index)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device runs the kernels for compute capability 9.0, and the library has them."""
    return extension.cuda_linear_hopper(device.index)


@functools.cache
def has_group_products(device: torch.device) -> bool:
    """Whether its tensor cores are faster than mma.sync: compute capability 9.0 to 11.x."""
    return 9 <= torch.cuda.get_device_capability(device)[0] <= 11
