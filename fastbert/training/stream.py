"""What is trained on: the examples of all epochs in one stream, cut into micro-batches.

    source      makes the examples of an epoch; knows their lengths before it makes any
    stream      epoch after epoch, each in an order of its own; a micro-batch may span two epochs
    micro-batch number m of the stream: `sequences` examples, or all that begin among `tokens` tokens

Everything is a function of (source, seed, m). So which process or worker makes a micro-batch changes nothing,
and a run that resumes at step s asks for the micro-batches from s x (micro-batches per step) on.
"""

from __future__ import annotations

import bisect
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fastbert.layers.packing import send
from fastbert.runtime import expected
from fastbert.training.draws import Order, key_of


class Plan(Protocol):
    """One epoch of a source."""

    @property
    def lengths(self) -> np.ndarray:
        """(n,) integers, the tokens of each example."""
        ...


@dataclass
class Batch:
    """A micro-batch.

    Attributes:
        inputs: what the trained module's `forward` takes: arrays and numbers.
        counts: loss -> number of tokens or sequences that it is the mean of.
        lengths: (n,) integers, the tokens of each sequence.
    """

    inputs: dict[str, Any]
    counts: dict[str, int]
    lengths: np.ndarray

    def on(self, device: torch.device) -> dict[str, Any]:
        """The inputs with arrays as tensors on a device; models read `cu_seqlens` on the host."""
        host = torch.device("cpu")
        return {
            key: send(torch.from_numpy(value), host if key == "cu_seqlens" else device)
            if isinstance(value, np.ndarray)
            else value
            for key, value in self.inputs.items()
        }


class Source(Protocol):
    """Where examples come from. It is copied to worker processes, so it holds arrays and files, no model."""

    @property
    def hash(self) -> str:
        """Hash of everything that the examples depend on besides the seed."""
        ...

    def plan(self, epoch: int) -> Plan:
        """The epoch's examples and their lengths."""
        ...

    # The plan and the examples are what the source itself has made.
    def example(self, plan: Any, epoch: int, index: int) -> Any:
        """One example of the epoch."""

    def collate(self, examples: Sequence[Any]) -> Batch:
        """A micro-batch of examples."""
        ...


@dataclass
class _Epoch:
    """An epoch within the stream.

    Attributes:
        number: number of the epoch, from 0 on.
        plan: the source's plan.
        order: place -> example.
        first: place of its first example in the stream.
        begins: (n,) the token of the stream at which the example at each place begins; empty unless a
            micro-batch is counted in tokens.
    """

    number: int
    plan: Plan
    order: Order
    first: int
    begins: np.ndarray


@dataclass
class Stream:
    """The micro-batches of a source; see the module.

    Attributes:
        source: where the examples come from.
        seed: seed of the order; the source has the seed of the examples.
        sequences: number of examples in a micro-batch. Exactly one of `sequences` and `tokens` is set.
        tokens: mean number of tokens in a micro-batch. It has the examples that begin among its tokens, so it
            can be longer or shorter by less than one example.
        sizes: (examples, tokens) of each epoch that is known. They follow from the source; a checkpoint
            keeps them, because counting the examples of an epoch takes a plan.

    Raises:
        ValueError: naming the attribute.
    """

    source: Source
    seed: int
    sequences: int | None = None
    tokens: int | None = None
    sizes: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if (self.sequences is None) == (self.tokens is None):
            raise ValueError("sequences, tokens: expected one of the two")
        name = "tokens" if self.sequences is None else "sequences"
        expected.integers(1, **{name: getattr(self, name)})
        if type(self.seed) is not int:
            raise ValueError(f"seed: expected an integer, got {self.seed!r}")
        self.sizes = [(int(examples), int(tokens)) for examples, tokens in self.sizes]
        self._kept: list[_Epoch] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": []}  # a worker makes its own plans

    def examples(self, number: int) -> list[tuple[int, int]]:
        """(epoch, index) of the examples of a micro-batch, in order.

        Raises:
            ValueError: an epoch without examples, or an example longer than `tokens`.
        """
        if number < 0:
            raise IndexError(f"number: expected an integer >= 0, got {number}")
        found = []
        if self.sequences is not None:
            at, end = number * self.sequences, (number + 1) * self.sequences
            while at < end:
                epoch = self._at(at, 0)
                places = np.arange(at - epoch.first, min(end - epoch.first, len(epoch.order)))
                found += [(epoch.number, int(i)) for i in epoch.order[places]]
                at += len(places)
            return found
        assert self.tokens is not None
        at = begin = number * self.tokens
        end = begin + self.tokens
        while at < end:
            epoch = self._at(at, 1)
            first, last = np.searchsorted(epoch.begins, [begin, end])
            found += [(epoch.number, int(i)) for i in epoch.order[np.arange(first, last)]]
            at = sum(size[1] for size in self.sizes[: epoch.number + 1])
        return found

    def batch(self, number: int) -> Batch:
        """A micro-batch."""
        made = []
        for epoch, index in self.examples(number):
            plan = self._epoch(epoch).plan
            made.append(self.source.example(plan, epoch, index))
        return self.source.collate(made)

    def _at(self, position: int, unit: int) -> _Epoch:
        """The epoch of a position, counted in examples (unit 0) or tokens (unit 1)."""
        ends = list(itertools.accumulate(size[unit] for size in self.sizes))
        while not ends or ends[-1] <= position:
            self._epoch(len(self.sizes))
            ends.append((ends[-1] if ends else 0) + self.sizes[-1][unit])
        return self._epoch(bisect.bisect_right(ends, position))

    def _epoch(self, number: int) -> _Epoch:
        """An epoch; the last two that were read are kept."""
        for kept in self._kept:
            if kept.number == number:
                return kept
        plan = self.source.plan(number)
        lengths = np.asarray(plan.lengths)
        size = (len(lengths), int(lengths.sum()))
        if not size[0] or lengths.min() < 1:
            raise ValueError(f"source: epoch {number}: expected examples of at least one token")
        if self.tokens is not None and lengths.max() > self.tokens:
            raise ValueError(
                f"tokens: expected at least the longest example, {lengths.max()}, got {self.tokens}"
            )
        if number < len(self.sizes) and self.sizes[number] != size:
            raise ValueError(f"sizes: epoch {number} has {size}, but the checkpoint has {self.sizes[number]}")
        if number == len(self.sizes):
            self.sizes.append(size)
        order = Order(size[0], key_of(self.source.hash, self.seed, "order", number))
        begins = np.empty(0, np.int64)
        if self.tokens is not None:
            ordered = lengths[order[np.arange(size[0])]].astype(np.int64)
            begins = np.cumsum(ordered) - ordered + sum(tokens for _, tokens in self.sizes[:number])
        first = sum(examples for examples, _ in self.sizes[:number])
        self._kept = [*self._kept[-1:], _Epoch(number, plan, order, first, begins)]
        return self._kept[-1]


class _Numbered(torch.utils.data.Dataset[Any]):
    """Micro-batches by number, for a DataLoader."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getitem__(self, number: int) -> tuple[Batch, list[tuple[int, int]]] | Exception:
        """The micro-batch and the sizes of the stream; or an error, which the parent raises unchanged."""
        try:
            return self.stream.batch(number), self.stream.sizes
        except Exception as error:
            if not _travels(error):
                raise
            return error


def _travels(error: Exception) -> bool:
    """Whether an error can be pickled and has the same text in another process."""
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def loaded(stream: Stream, numbers: Iterable[int], workers: int = 0) -> Generator[Batch]:
    """The micro-batches of some numbers, in order.

    Args:
        stream: where the micro-batches come from.
        numbers: their numbers in the stream.
        workers: processes that make them ahead; 0: this process makes each when it is read.
    """
    if workers == 0:
        yield from map(stream.batch, numbers)
        return
    batches = torch.utils.data.DataLoader(
        _Numbered(stream),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # the workers' seeds, which nothing reads, are not the model's draws
        prefetch_factor=4,
    )
    for made in batches:
        if isinstance(made, Exception):
            raise made
        batch, sizes = made
        if len(sizes) > len(stream.sizes):
            stream.sizes[:] = sizes
        yield batch


def _unchanged(item: Any) -> Any:
    return item


def _begin_worker(number: int) -> None:
    """A worker leaves signals to its parent, and ends with it.

    A terminal and torchrun send signals to all processes of a group. A worker that ended would cost its
    parent the step and the checkpoint.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has ended.

    PyTorch's own watch does not help a worker whose micro-batch fills the pipe: the pipe has no reader any
    more, and the other workers hold it open.
    """
    above, parent = os.getppid(), multiprocessing.parent_process()
    pid = parent and parent.pid
    while os.getppid() == above and (pid is None or _runs(pid)):
        time.sleep(0.5)
    os._exit(1)


def _runs(pid: int) -> bool:
    if os.name != "posix":  # elsewhere signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
