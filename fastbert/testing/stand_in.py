"""The place of a GPU in a process that has none: launchers of Triton kernels run, and nothing is computed.

Tensors "on" the GPU lie on PyTorch's meta device: they have shapes, strides and dtypes but no memory. A
TorchFunctionMode tells Python code that they are on `cuda`, so the launchers choose what they would choose
there, and what they launch is handed over. `compiling` compiles it. The backward of an op runs, too.

What a launcher asks of the GPU is in `Facts`. Only a process of its own should use this: it replaces some
functions of torch, and caches keep what they said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fastbert.runtime import dispatch

_META = torch.device("meta")


class Facts(NamedTuple):
    """What launchers and heuristics ask about a GPU; as `torch.cuda.get_device_properties` says it."""

    name: str
    major: int
    minor: int
    multi_processor_count: int


def facts_of(device: torch.device) -> Facts | None:
    """The facts of a CUDA device; None for another."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Facts(found.name, found.major, found.minor, found.multi_processor_count)


class Pointer:
    """A tensor as Triton asks about it: its dtype, and an address that shows how it is aligned."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        """The address."""
        return self.address


def _device(device: torch.device, tensor: torch.Tensor) -> torch.device:
    found = _DEVICE(tensor)
    return device if found.type == "meta" else found


def _address(device: torch.device, tensor: torch.Tensor) -> int:
    """Storages begin at multiples of 512, as PyTorch's allocator has them, and no two at the same."""
    if _DEVICE(tensor).type != "meta":
        return tensor.data_ptr()
    return 512 * tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()


_DEVICE = torch.Tensor.device.__get__
# What Python code asks of a tensor: the answer for a tensor that may be on the meta device.
_ANSWERS: dict[Any, Callable] = {
    _DEVICE: _device,
    torch.Tensor.is_cuda.__get__: lambda device, tensor: _device(device, tensor).type == "cuda",
    torch.Tensor.is_meta.__get__: lambda device, tensor: False,
    torch.Tensor.data_ptr: _address,
}


class _OnMeta(TorchFunctionMode):
    """Tensors of the meta device say that they are on `device`; what is made there has no memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self.device, *args)
        if func is torch.device:
            return func(*args, **kwargs)
        args = tuple(_META if self._is_here(a) else a for a in args)
        # memory that is pinned would need the driver
        kwargs = {
            name: _META if self._is_here(a) else a for name, a in kwargs.items() if name != "pin_memory"
        }
        if func is torch.randn:
            # the values of random numbers choose no kernel, and drawing them takes long
            kwargs.pop("generator", None)
            kwargs["device"] = _META
        return func(*args, **kwargs)

    def _is_here(self, value: object) -> bool:
        if isinstance(value, str):
            return value.partition(":")[0] == self.device.type
        return isinstance(value, torch.device) and value.type == self.device.type


class _Driver:
    """Triton's driver without a GPU: it says what to compile for."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def use_driver(facts: Facts) -> None:
    """Let Triton compile for that GPU in this process from now on."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(_Driver(GPUTarget("cuda", 10 * facts.major + facts.minor, 32)))


@contextlib.contextmanager
def gpu(device: torch.device, facts: Facts, launched: Callable[..., None]) -> Iterator[None]:
    """Let this thread's work on `device` be launched without the device.

    Args:
        device: "cuda" with its index.
        facts: about it.
        launched: called in the place of each launch of a Triton kernel: (kernel, grid, args, config).
    """
    # here, because it imports Triton
    from fastbert.kernels import launch as launches

    mode, call = _OnMeta(device), dispatch.call

    def call_again(*args):
        # autograd runs the backward of an op outside of the mode
        with mode:
            return call(*args)

    said = {
        "is_available": True,
        "current_device": device.index,
        "get_device_properties": facts,
        "get_device_capability": (facts.major, facts.minor),
        "get_device_name": facts.name,
        "is_current_stream_capturing": False,
    }
    replaced = [
        *((torch.cuda, name, lambda *_, value=value: value) for name, value in said.items()),
        (dispatch, "call", call_again),
        (launches, "on", lambda _: contextlib.nullcontext()),
        (launches, "_launch", lambda kernel, grid, _, args, config: launched(kernel, grid, args, config)),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, function in replaced:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        undo.enter_context(mode)
        yield
