"""One process, or several started by torchrun: the number of this process, and what all exchange.

    none    one process
    ddp     every process has all weights; gradients are averaged (DistributedDataParallel)
    fsdp    every process has a share of each weight, gradient and moment (FSDP2: `fully_shard` of each layer)

Integers that decide something (counts, whether to stop) go through a group of their own on the host, so the
host does not wait for a GPU.

All processes see the run's directory. If loading, logging or saving fails in one process, all processes raise
the error. An error inside a step ends its own process, and torchrun ends the processes that wait for it.

fsdp hooks each layer, and a hooked layer computes all of its rows. So if a classifier needs only the first
tokens of its last layer, its dropout masks there differ between fsdp and ddp.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastbert.layers.encoder_layer import PackedLayer

KINDS = ("none", "ddp", "fsdp")
# numbers the groups that this process has opened; all processes open the same ones
_groups = itertools.count()


def _number(name: str, least: int, below: int | None = None) -> int:
    """The integer that torchrun has put into the environment."""
    text = os.environ[name]
    if not (text.isdecimal() and int(text) >= least and (below is None or int(text) < below)):
        most = "" if below is None else f" and < {below}"
        raise ValueError(f"{name}: expected an integer >= {least}{most}, got {text!r}")
    return int(text)


class Parallel:
    """This process among those that train together.

    Args:
        kind: one of `KINDS`; None: ddp if torchrun has started several processes, else none.
        device: where the model is; None: a GPU of this process's own if there is one, else the CPU.
        dtype: dtype of the products; fsdp gathers the weights in it.
        bucket_mb: size, in MiB, of the gradients that ddp sends together; None: PyTorch's choice.

    Attributes:
        kind, device: as chosen.
        rank, world: number of this process, and number of all processes.
        waits: whether the host waits for the device when it reads a number from there.

    Raises:
        ValueError: naming the argument.
    """

    def __init__(
        self,
        kind: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        bucket_mb: float | None = None,
    ) -> None:
        started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        self.world = _number("WORLD_SIZE", 1) if started else 1
        self.rank = _number("RANK", 0, self.world) if started else 0
        self.kind = kind or ("ddp" if self.world > 1 else "none")
        if self.kind not in KINDS:
            raise ValueError(f"parallel: expected one of {', '.join(KINDS)}, got {kind!r}")
        if self.kind == "none" and self.world > 1:
            raise ValueError(f"parallel: none, but torchrun has started {self.world} processes")
        if self.kind != "none" and not started:
            raise ValueError(f"parallel: {self.kind} is for processes that torchrun starts; RANK is not set")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0)
        if bucket_mb is not None and not 0 < bucket_mb < float("inf"):
            raise ValueError(f"bucket_mb: expected a number > 0, or None, got {bucket_mb!r}")
        self.waits = self.device.type != "cpu"
        self.dtype, self.bucket_mb = dtype, bucket_mb
        self._mesh, self._began = None, False
        self._host: Any = None  # a ProcessGroup, which torch's functions annotate in several ways
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.kind != "none":
            self._began = not dist.is_initialized()
            if self._began:
                # here, because a torch that is built without distributed lacks it
                from torch.distributed.distributed_c10d import PrefixStore
                from torch.distributed.rendezvous import rendezvous

                on_gpu = self.device.type == "cuda"
                store, rank, world = next(rendezvous("env://"))
                dist.init_process_group(
                    "nccl" if on_gpu else "gloo",
                    # torchrun's store still has the addresses of a group that was closed
                    store=PrefixStore(f"fastbert-{next(_groups)}", store),
                    rank=rank,
                    world_size=world,
                    device_id=self.device if on_gpu else None,
                )
            on_host = self.device.type == "cpu"
            self._host = dist.group.WORLD if on_host else dist.new_group(backend="gloo")

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def close(self) -> None:
        """End the process groups that `__init__` has started."""
        if self._began:
            dist.destroy_process_group()
        elif self._host is not None and self._host is not dist.group.WORLD:
            dist.destroy_process_group(self._host)

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module to call instead of `module`; gradients are averaged over all processes.

        Raises:
            ValueError: several processes would skip other layers than each other.
        """
        if self.world > 1 and any(getattr(m, "layerdrop", 0) for m in module.modules()):
            raise ValueError("layerdrop: expected 0 with several processes, which exchange all gradients")
        if self.kind == "ddp":
            # without device_ids: it would move lengths that the loop leaves on the host
            return nn.parallel.DistributedDataParallel(
                module, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True
            )
        if self.kind == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            if self._mesh is None:
                self._mesh = init_device_mesh(self.device.type, (self.world,))
            policy = MixedPrecisionPolicy(
                param_dtype=None if self.dtype == torch.float32 else self.dtype, reduce_dtype=torch.float32
            )
            for each in module.modules():
                if isinstance(each, PackedLayer):
                    fully_shard(each, mesh=self._mesh, mp_policy=policy)
            fully_shard(module, mesh=self._mesh, mp_policy=policy)
        return module

    @contextlib.contextmanager
    def exchanging(self, wrapped: Any, exchange: bool) -> Iterator[None]:
        """A block whose backwards exchange gradients of what `wrap` returned, or only add them up."""
        if self.kind == "ddp" and not exchange:
            with wrapped.no_sync():
                yield
            return
        if self.kind == "fsdp":
            wrapped.set_requires_gradient_sync(exchange)
        yield

    def summed(self, numbers: Sequence[int]) -> list[int]:
        """The sum over all processes of each of some integers."""
        if self.kind == "none":
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, group=self._host)
        return values.tolist()

    def added(self, values: Tensor) -> Tensor:
        """The sum over all processes of a tensor on the device."""
        if self.kind != "none":
            dist.all_reduce(values)
        return values

    def fill(self, target: Any, value: Tensor) -> None:
        """Copy a whole value into a tensor that may be sharded."""
        with torch.no_grad():
            if hasattr(target, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                value = value.to(device=self.device, dtype=target.dtype)
                # without a source rank: every process has read the value itself
                value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
            target.copy_(value)

    def like(self, value: Tensor, parameter: Tensor) -> Tensor:
        """A whole value as `parameter` is: on its device, and sharded as it is."""
        made = torch.empty_like(parameter, dtype=value.dtype)
        self.fill(made, value)
        return made

    def broadcast(self, value: Any) -> Any:
        """The first process's value, in all processes."""
        if self.kind == "none":
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._host)
        return values[0]

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """A block without exchange. If it fails in one process, all processes raise the error."""
        error = None
        try:
            yield
        except Exception as found:
            error = found
        self.raise_any(error)

    def raise_any(self, error: Exception | None) -> None:
        """Raise this process's error, else that of the first process with an error. All processes call it.

        Raises:
            Exception: `error`, or a copy of another process's error. The copy has the same type if that is
                Python's or ours and takes only a text, else it is a RuntimeError.
        """
        if self.kind != "none":
            kind = type(error)
            known = kind.__module__.partition(".")[0] in ("builtins", "fastbert")
            if error is not None and not (known and error.args == (str(error),)):
                kind = RuntimeError
            found: list[Any] = [None] * self.world
            dist.all_gather_object(found, None if error is None else (kind, str(error)), group=self._host)
            if error is None:
                error = next((kind(text) for kind, text in filter(None, found)), None)
        if error is not None:
            raise error
