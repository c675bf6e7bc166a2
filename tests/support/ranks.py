"""Processes that train together, each with the variables that torchrun sets.

They are forks of one server that has imported PyTorch and has run nothing, so they start at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

PRELOADED = [
    "numpy",
    "torch._dynamo",  # which an optimizer imports
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "fastbert.models.heads",
    "tests.support.ranks",
    "tests.support.parallel_training",
]


class Ended(Exception):
    """A process ended without an answer.

    Attributes:
        codes: exit code by rank, None of one that was still running; negative: a signal's number.
    """

    def __init__(self, codes: list[int | None], said: str) -> None:
        super().__init__(f"exit codes {codes}\n{said}")
        self.codes = codes


class Ranks:
    """`world` processes that run `function(*args)`.

    Args:
        world: how many, with RANK and WORLD_SIZE set; 0: one process without them.
        function: function of a module of the tests; `answers()` has its results by rank.
    """

    def __init__(self, world: int, function: Callable[..., Any], *args: Any) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            pytest.skip("this torch has no gloo")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        variables = {"OMP_NUM_THREADS": "1", "FASTBERT_CACHE": ""}
        port = str(_free_port())
        self.processes, self._pipes = [], []
        for rank in range(max(world, 1)):
            own = dict(variables)
            if world:
                own |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            pipe, far = context.Pipe()
            process = context.Process(target=_run, args=(far, own, function, args))
            process.start()
            far.close()
            self.processes.append(process)
            self._pipes.append(pipe)

    def answers(self, seconds: float = 120.0) -> list[Any]:
        """What each process returned.

        Raises:
            Ended: one raised an error, was killed, or has not answered in time.
        """
        found: dict[int, Any] = {}
        said, deadline = "", time.monotonic() + seconds
        left = dict(enumerate(self._pipes))
        while left and not said:
            for pipe in wait(left.values(), max(deadline - time.monotonic(), 0)):
                rank = self._pipes.index(pipe)
                del left[rank]
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    good, value = False, "ended without a word"
                if good:
                    found[rank] = value
                else:
                    said += f"rank {rank}: {value}\n"
            if time.monotonic() > deadline:
                said += f"ranks {sorted(left)}: no answer in {seconds} s\n"
        if said:
            for process in self.processes:
                process.join(0.5)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        if said:
            raise Ended(codes, said)
        return [found[rank] for rank in range(len(self.processes))]

    def kill(self) -> None:
        """End all of them now."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def together(world: int, function: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
    """What `world` processes return from `function(*args)`, by rank; see `Ranks`."""
    return Ranks(world, function, *args).answers(seconds)


def in_a_group(world: int, function: Callable[[int], Any], seconds: float = 240.0) -> list[Any]:
    """What `function(rank)` returns in each of `world` processes that are one group of gloo."""
    return together(world, _joined, function, seconds=seconds)


def _joined(function: Callable[[int], Any]) -> Any:
    dist.init_process_group("gloo")
    return function(dist.get_rank())


def _run(pipe: Any, variables: dict[str, str], function: Callable[..., Any], args: tuple) -> None:
    """Be one of the processes. It leaves without ending Python or the group.

    A thread of gloo may still hold a tensor, whose end asks for Python's lock. Then ending the group hangs,
    because it holds that lock and waits for the thread, and ending Python aborts ("terminate called without
    an active exception", pytorch/pytorch#179291).
    """
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)  # of a DataLoader's workers, as usual
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        answer = True, function(*args)
    except BaseException:
        answer = False, traceback.format_exc()[-3000:]
    with contextlib.suppress(OSError):
        pipe.send_bytes(pickle.dumps(answer))
    if answer[0]:  # no rank leaves while another may still need it
        with contextlib.suppress(EOFError, OSError):
            pipe.recv_bytes()
    os._exit(0 if answer[0] else 1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
