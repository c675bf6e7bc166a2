"""Records work on a device and repeats it: CUDA graphs, and a substitute without a GPU."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# PyTorch captures one graph at a time
_capturing = threading.Lock()


@dataclass(frozen=True, eq=False)
class Recording:
    """Work that can be repeated: `replay` computes `outputs` again, in place, from the inputs' memory."""

    outputs: tuple[Any, ...]
    replay: Callable[[], None]


class EagerRecorder:
    """Makes recordings on one device, which share memory and run one after the other.

    A replay calls the function again. It uses memory as a CUDA graph does, without a GPU, for tests.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._made: weakref.WeakSet[Recording] = weakref.WeakSet()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """A recording of `function`, which must read and write the same memory at every call."""
        outputs = function()

        def replay() -> None:
            for old, new in zip(outputs, function(), strict=True):
                if old is not None and new is not None:
                    old.copy_(new)

        recording = Recording(outputs, replay)
        self._made.add(recording)
        return recording

    def record_pair(
        self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> tuple[Recording, Recording]:
        """Recordings of `forward()`, and of `backward` of its output by what autograd has saved for it.

        Each replay of the backward follows a replay of the forward. `backward` writes to memory of its own.
        """
        kept = [forward()]
        output = kept[0].detach()

        def replay_forward() -> None:
            kept[:] = [forward()]
            output.copy_(kept[0].detach())

        backward(kept.pop())
        recordings = Recording((output,), replay_forward), Recording((), lambda: backward(kept.pop()))
        self._made.add(recordings[0])
        return recordings

    def in_order(self) -> contextlib.AbstractContextManager[Any]:
        """A context around each use of inputs, recordings and outputs.

        Work that is enqueued inside runs after all work of earlier contexts, on other streams too.
        """
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Wait until all work of earlier contexts has run."""

    def bytes_held(self) -> int:
        """Bytes of the recordings."""
        return sum(t.nbytes for made in self._made for t in made.outputs if t is not None)


class CudaRecorder:
    """Recordings that are CUDA graphs."""

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()
            self._done = torch.cuda.Event()
            self._pool = torch.cuda.graph_pool_handle()

    def record(self, function: Callable[[], tuple[Tensor | None, ...]]) -> Recording:
        """See `EagerRecorder`."""
        with torch.cuda.device(self.device):
            self._run(function)
            return Recording(*self._captured(function))

    def record_pair(
        self, forward: Callable[[], Tensor], backward: Callable[[Tensor], None]
    ) -> tuple[Recording, Recording]:
        """See `EagerRecorder`."""
        with torch.cuda.device(self.device):
            self._run(lambda: backward(forward()))
            # `output` keeps what autograd saves, so that the second capture does not overwrite it
            output, replay = self._captured(forward)
            _, replay_backward = self._captured(lambda: backward(output))
            return Recording((output.detach(),), replay), Recording((), replay_backward)

    def _run(self, function: Callable[[], object]) -> None:
        """Run once before a capture, so that kernels are compiled and checked and have their workspaces."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def _captured(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What a function returns while it is captured, and the function that replays it."""
        captured = torch.cuda.CUDAGraph()
        # Other threads may use the GPU at the same time; their allocations must not fail this capture
        with (
            _capturing,
            torch.cuda.graph(
                captured, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            outputs = function()
        return outputs, captured.replay

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """See `EagerRecorder`."""
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().wait_event(self._done)
            try:
                yield
            finally:
                self._done.record(torch.cuda.current_stream())

    def wait(self) -> None:
        """See `EagerRecorder`."""
        self._done.synchronize()

    def bytes_held(self) -> int:
        """See `EagerRecorder`. These are the pool's segments, as the caching allocator counts them."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(self._pool))


Recorder = EagerRecorder | CudaRecorder


def recorder_for(device: torch.device) -> Recorder | None:
    """A recorder for the device; None if the device is not a CUDA device."""
    return CudaRecorder(device) if device.type == "cuda" else None
