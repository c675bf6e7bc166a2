"""The current CUDA device and stream, asked at every launch: PyTorch's own functions take microseconds.

PyTorch's functions make sure that CUDA has started. Where there are tensors on a GPU, it has.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

_raw_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_NOTHING = contextlib.nullcontext()


def current_device() -> int:
    """The index of the current device."""
    return torch.cuda.current_device() if _raw_device is None else _raw_device()


def current_stream(index: int) -> int:
    """The current stream of the device with this index, as an integer."""
    return torch.cuda.current_stream(index).cuda_stream if _raw_stream is None else _raw_stream(index)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which the device of a CUDA tensor is current. For the CPU it does nothing."""
    index = device.index
    return _NOTHING if index is None or index == current_device() else torch.cuda.device(device)
