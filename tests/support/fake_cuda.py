"""CUDA as far as the benchmarks use it, where there is no GPU: what lies on `cuda` lies on the CPU.

A pytest plugin (`-p tests.support.fake_cuda`) for a process of its own: `torch.device("cuda")` is what it
says, so that code which asks for the device's type takes a GPU's way; tensors and modules that are put there
stay on the CPU. Nothing that is timed this way is a speed.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from bench.lib import served
from fastbert.graphs import recorder
from fastbert.testing import proving

PROPERTIES = SimpleNamespace(
    name="NVIDIA H999",
    multi_processor_count=132,
    major=9,
    minor=0,
    L2_cache_size=1 << 16,
    total_memory=1 << 36,
)


class Event:
    """A CUDA event on the host's clock."""

    def __init__(self, enable_timing: bool = False):
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def elapsed_time(self, end: Event) -> float:
        return max((end.at - self.at) * 1e3, 1e-6)


def on_the_cpu(value: object) -> object:
    """`cuda` as an argument, replaced."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value


class OnTheCpu(TorchFunctionMode):
    """Every function of torch with the device `cuda` works on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        kwargs = {name: on_the_cpu(value) for name, value in kwargs.items()}
        return func(*map(on_the_cpu, args), **kwargs)


for name, value in {
    "is_available": True,
    "current_device": 0,
    "synchronize": None,
    "empty_cache": None,
    "_sleep": None,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "get_device_name": PROPERTIES.name,
    "is_current_stream_capturing": False,
}.items():
    setattr(torch.cuda, name, lambda *_, value=value: value)
torch.cuda.Event = Event
recorder.recorder_for = recorder.EagerRecorder
proving.is_proven = lambda *_: False  # a check of each kernel would only find that there is no GPU
served.prove = lambda device: []
OnTheCpu().__enter__()
