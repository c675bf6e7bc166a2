"""What records work on a device and repeats it: CUDA graphs, and a stand-in without a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_capturing = threading.Lock()  # PyTorch captures one graph at a time


@dataclass(frozen=True, eq=False)
class Recording:
    """Work that can be repeated: `replay` writes into `outputs` what the inputs' memory holds by then."""

    outputs: tuple[Tensor | None, ...]
    replay: Callable[[], None]


class Recorder(Protocol):
    """What makes recordings on one device; all of them share memory, and run one after the other."""

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """`function`, which must read and write the same memory at every call, as a recording."""

    def in_order(self) -> contextlib.AbstractContextManager:
        """Around each use of inputs, recordings and outputs: what is enqueued inside runs after what was
        enqueued in earlier blocks, on whichever streams.
        """

    def wait(self) -> None:
        """Return when nothing that was enqueued in earlier blocks is still running."""

    def bytes_held(self) -> int:
        """Memory of the recordings."""


class CudaRecorder:
    """Recordings that are CUDA graphs. Each is captured after one run on the capture's own stream, in which
    kernels are compiled, checked (dispatch.py) and get their workspaces.
    """

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """See `Recorder`."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                function()
            current.wait_stream(self._stream)
            captured = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU: their allocations are no fault of this capture
            with (
                _capturing,
                torch.cuda.graph(
                    captured, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                outputs = function()
        return Recording(outputs, captured.replay)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Recorder`."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """See `Recorder`."""
        self._done.synchronize()

    def bytes_held(self) -> int:
        """See `Recorder`: the pool's segments, as the caching allocator counts them."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))


class EagerRecorder:
    """Recordings that call their function again: the same use of memory without a GPU, for tests."""

    def __init__(self, device: torch.device):
        self.device = device
        self._made: weakref.WeakSet[Recording] = weakref.WeakSet()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """See `Recorder`."""
        outputs = function()

        def replay() -> None:
            for old, new in zip(outputs, function(), strict=True):
                if old is not None:
                    old.copy_(new)

        recording = Recording(outputs, replay)
        self._made.add(recording)
        return recording

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `Recorder`: a CPU has no streams."""
        yield

    def wait(self) -> None:
        """See `Recorder`: nothing runs behind the host's back."""

    def bytes_held(self) -> int:
        """See `Recorder`: the outputs."""
        return sum(t.nbytes for made in self._made for t in made.outputs if t is not None)


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder of a device, None where there is none."""
    return CudaRecorder(device) if device.type == "cuda" else None
