"""A sanitizer of Triton's interpreter, and tensors larger than memory. `sanitized()` checks every launch:

- a load or store outside the elements of the launched tensors (strides included: the padding between rows
  is outside), before it happens, so that an int32 offset that wrapped is a report and not a crash;
- two programs that write one address, two lanes of one store that write different values to one address;
- a program that reads what another program of the launch writes, unless barriers and atomics order the two
  (memory_order.py).
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from fastbert.testing.triton_interpreter import interpreting
from tests.support.memory_order import Order


class SanitizerError(AssertionError):
    """A kernel touched memory that it must not touch."""


@dataclass
class _Region:
    """The elements of one launched tensor."""

    name: str
    start: int
    itemsize: int
    dims: list[tuple[int, int]]  # (size, stride in bytes), widest stride first
    end: int

    @classmethod
    def of(cls, name: str, t: torch.Tensor) -> _Region:
        size = t.element_size()
        pairs = [(n, s * size) for n, s in zip(t.shape, t.stride(), strict=True) if n > 1 and s != 0]
        dims = sorted(pairs, key=lambda pair: -pair[1])
        extent = sum((n - 1) * s for n, s in dims) + size if t.numel() else 0
        return cls(name, t.data_ptr(), size, dims, t.data_ptr() + extent)

    def contains(self, addresses: np.ndarray, itemsize: int) -> np.ndarray:
        inside = (addresses >= self.start) & (addresses + itemsize <= self.end)
        if inside.any():
            rest = addresses - self.start
            for size, stride in self.dims:
                rest = rest - np.minimum(rest // stride, size - 1) * stride
            inside &= rest + itemsize <= self.itemsize
        return inside


@dataclass
class _Launch:
    """What the programs of one launch touch: addresses and the moment."""

    kernel: str
    regions: list[_Region]
    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)
    atomics: list[tuple[np.ndarray, int]] = field(default_factory=list)
    order: Order = field(default_factory=Order)

    def check(self, kind: str, program: tuple, ptrs, mask) -> np.ndarray:
        """Addresses of the active lanes, all of them inside a tensor."""
        itemsize = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        active = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        addresses = ptrs.data[active].astype(np.int64)
        outside = np.ones(addresses.shape, bool)
        for region in self.regions:
            if not outside.any():
                break
            outside &= ~region.contains(addresses, itemsize)
        if outside.any():
            first = int(addresses[outside][0])
            near = min(self.regions, key=lambda r: max(r.start - first, first - r.end, 0), default=None)
            where = "no tensor launched" if near is None else f"{near.name} + {first - near.start} bytes"
            raise SanitizerError(
                f"{self.kernel}: program {program} {kind}s {int(outside.sum())} of {addresses.size} elements "
                f"outside its tensors, the first at {where}"
            )
        return addresses

    def named(self, address: int) -> str:
        for r in self.regions:
            if r.start <= address < r.end:
                return f"{r.name} + {address - r.start} bytes"
        return hex(address)

    def check_races(self) -> None:
        """Written by two programs, or read by one and written by another; atomics only among themselves."""
        stores, loads, atomics = (_Entries.of(log) for log in (self.stores, self.loads, self.atomics))
        self._clash(stores, stores, "is written by program")
        self._clash(stores, loads, "is read by program")
        self._clash(stores, atomics, "is updated atomically by program")
        self._clash(atomics, loads, "is read by program")

    def _clash(self, writes: _Entries, others: _Entries, what: str) -> None:
        """Report an address of `others` that another program of `writes` writes, in no order."""
        programs = np.array(self.order.programs, np.int64)
        low = np.searchsorted(writes.addresses, others.addresses, side="left")
        high = np.searchsorted(writes.addresses, others.addresses, side="right")
        each = np.repeat(np.arange(len(low)), high - low)  # of `others`, once per write of its address
        first = np.repeat(np.cumsum(high - low) - (high - low), high - low)
        write = low[each] + np.arange(len(each)) - first
        one, other = writes.moments[write], others.moments[each]
        clash = np.flatnonzero(programs[one] != programs[other])
        pairs, at = np.unique(np.stack([one[clash], other[clash]], 1), axis=0, return_index=True)
        for (a, b), index in zip(pairs.tolist(), at.tolist(), strict=True):
            if not self.order.ordered(a, b):
                raise SanitizerError(
                    f"{self.kernel}: {self.named(int(others.addresses[each[clash[index]]]))} {what} "
                    f"{programs[b]} and written by program {programs[a]}"
                )


@dataclass
class _Entries:
    """Unique (address, moment) pairs, sorted by address and then by moment."""

    addresses: np.ndarray
    moments: np.ndarray

    @classmethod
    def of(cls, log: list[tuple[np.ndarray, int]]) -> _Entries:
        addresses = np.concatenate([a for a, _ in log] or [np.empty(0, np.int64)])
        moments = np.repeat(np.array([m for _, m in log], np.int64), [len(a) for a, _ in log])
        order = np.lexsort((moments, addresses))
        addresses, moments = addresses[order], moments[order]
        new = np.ones(len(addresses), bool)
        new[1:] = (addresses[1:] != addresses[:-1]) | (moments[1:] != moments[:-1])
        return cls(addresses[new], moments[new])


@dataclass
class Report:
    """What `sanitized()` has seen."""

    launches: int = 0
    accesses: int = 0
    atomics: int = 0


@contextlib.contextmanager
def sanitized() -> Iterator[Report]:
    """Check every launch in the interpreter by raising SanitizerError. No-op where Triton compiles."""
    report = Report()
    if not interpreting():
        yield report
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    originals = {
        (cls, name): getattr(cls, name)
        for cls, name in (
            (GridExecutor, "__call__"),
            (GridExecutor, "_init_args_hst"),
            (InterpreterBuilder, "create_masked_load"),
            (InterpreterBuilder, "create_masked_store"),
            (InterpreterBuilder, "create_atomic_rmw"),
            (InterpreterBuilder, "create_atomic_cas"),
            (InterpreterBuilder, "create_barrier"),
        )
    }
    current: list[_Launch] = []

    def original(cls, name, *args, **kwargs):
        return originals[(cls, name)](*args, **kwargs)

    def call(self, *args, **kwargs):
        current.append(_Launch(self.fn.__name__, []))
        try:
            with np.errstate(all="ignore"):  # a GPU does not warn of an overflow in a masked lane
                original(GridExecutor, "__call__", self, *args, **kwargs)
        except Exception as error:
            cause = error.__cause__
            raise cause if isinstance(cause, SanitizerError) else error from None
        finally:
            launch = current.pop()
        launch.check_races()
        report.launches += 1

    def init_args_hst(self, args, kwargs):
        hosted, hosted_kwargs = original(GridExecutor, "_init_args_hst", self, args, kwargs)
        named = [*zip(self.arg_names, hosted, strict=False), *hosted_kwargs.items()]
        current[-1].regions = [_Region.of(name, t) for name, t in _tensors(named)]
        return hosted, hosted_kwargs

    def program(builder):
        x, y, z = builder.grid_idx
        nx, ny, _ = builder.grid_dim
        return x + nx * (y + ny * z)

    def access(builder, kind, ptrs, mask):
        launch = current[-1]
        addresses = launch.check(kind, builder.grid_idx, ptrs, mask)
        report.accesses += addresses.size
        log = {"load": launch.loads, "store": launch.stores}[kind]
        log.append((addresses, launch.order.now(program(builder))))
        return addresses

    def update(builder, ptrs, mask, semantics, scope):
        launch = current[-1]
        addresses = launch.check("update", builder.grid_idx, ptrs, mask)
        report.accesses += addresses.size
        report.atomics += addresses.size
        names = (str(value).rpartition(".")[2] for value in (semantics, scope))
        launch.atomics.append((addresses, launch.order.atomic(program(builder), addresses, *names)))

    def masked_load(self, ptrs, mask, *args, **options):  # by name where a tensor descriptor loads
        access(self, "load", ptrs, mask)
        return original(InterpreterBuilder, "create_masked_load", self, ptrs, mask, *args, **options)

    def masked_store(self, ptrs, value, mask, *args):
        addresses = access(self, "store", ptrs, mask)
        order = np.argsort(addresses, kind="stable")
        active = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        values = np.broadcast_to(value.data, ptrs.data.shape)[active][order]
        bits = values.view(f"u{values.itemsize}")
        if ((np.diff(addresses[order]) == 0) & (bits[1:] != bits[:-1])).any():
            raise SanitizerError(
                f"{current[-1].kernel}: program {self.grid_idx} stores different values "
                "from two lanes to one address"
            )
        return original(InterpreterBuilder, "create_masked_store", self, ptrs, value, mask, *args)

    def atomic_rmw(self, op, ptr, value, mask, *order):
        update(self, ptr, mask, *order)
        return original(InterpreterBuilder, "create_atomic_rmw", self, op, ptr, value, mask, *order)

    def atomic_cas(self, ptr, old, new, *order):
        update(self, ptr, _All(), *order)
        return original(InterpreterBuilder, "create_atomic_cas", self, ptr, old, new, *order)

    def barrier(self):
        current[-1].order.barrier(program(self))
        return original(InterpreterBuilder, "create_barrier", self)

    GridExecutor.__call__, GridExecutor._init_args_hst = call, init_args_hst
    InterpreterBuilder.create_masked_load = masked_load
    InterpreterBuilder.create_masked_store = masked_store
    InterpreterBuilder.create_atomic_rmw = atomic_rmw
    InterpreterBuilder.create_atomic_cas = atomic_cas
    InterpreterBuilder.create_barrier = barrier
    try:
        yield report
    finally:
        for (cls, name), function in originals.items():
            setattr(cls, name, function)


class _All:
    data = np.True_


def _tensors(named: list[tuple[str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a launch's arguments: plain ones, in tuples, under host descriptors."""
    for name, value in named:
        if isinstance(value, tuple):
            yield from _tensors([(f"{name}[{i}]", v) for i, v in enumerate(value)])
        elif isinstance(value, torch.Tensor):
            yield name, value
        elif hasattr(value, "base"):
            yield from _tensors([(name, value.base)])


def lazy_rows(rows: int, cols: int, row_stride: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, cols) of zeros, `row_stride` elements apart, on pages that exist only once they are touched."""
    size = ((rows - 1) * row_stride + cols) * dtype.itemsize
    noreserve = 0x4000  # MAP_NORESERVE on Linux; the mmap module names it from Python 3.13
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    return torch.frombuffer(pages, dtype=dtype).as_strided((rows, cols), (row_stride, 1))
