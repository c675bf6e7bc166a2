"""Triton's interpreter made fit for tests: bfloat16 as the GPU computes it, and a sanitizer.

`choose()` decides, before anything imports Triton, whether this process interprets (no GPU) or compiles.
`patch_bfloat16()` repairs what the interpreter gets silently wrong: casts truncate, and `dot`, arithmetic,
sums and comparisons work on the raw 16-bit patterns. `sanitized()` checks every launch within it:

  - a load or store outside the elements of the launched tensors (strides included: the padding between rows
    is outside), before it happens, so that an int32 offset that wrapped is a report and not a crash;
  - two programs that write one address, two lanes of one store that write different values to one address;
  - a program that reads what another program of the launch writes, unless barriers and atomics order the two
    (memory_order.py).

Not modelled: memory order within a program, float atomics' order, TF32.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from fastbert.testing import interpreter_types
from fastbert.testing.memory_order import Order


def choose() -> bool:
    """Interpret if there is no CUDA device, unless TRITON_INTERPRET says otherwise. Returns whether."""
    if importlib.util.find_spec("triton") is None:
        return False
    if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
        if "triton" in sys.modules:
            raise RuntimeError("triton_interpreter.choose() must run before anything imports Triton")
        os.environ["TRITON_INTERPRET"] = "1"
    if interpreting():
        patch_bfloat16()
        launch_in_turns()
        patch_language_once()
        interpreter_types.patch_once()
    return interpreting()


def interpreting() -> bool:
    """Whether Triton interprets in this process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def device() -> torch.device:
    """Where kernels under test run: the CPU in the interpreter, else the GPU."""
    return torch.device("cpu" if interpreting() else "cuda")


# --- bfloat16 -----------------------------------------------------------------------------------------------


def bits_to_float(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) as float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float_to_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 bit patterns: to nearest, ties to even; a NaN stays a (quiet) NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet_nan = ((bits >> 16) | 0x40).astype(np.uint16)
    return np.where(np.isnan(values), quiet_nan, rounded).reshape(np.shape(values))


def patch_bfloat16() -> None:
    """Make the interpreter do bfloat16 in float32 with one rounding at the end. Idempotent."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

    if getattr(InterpreterBuilder, "bfloat16_is_patched", False):
        return
    InterpreterBuilder.bfloat16_is_patched = True

    def is_bf16(handle: TensorHandle) -> bool:
        return handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16

    def widen(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(bits_to_float(handle.data), tl.float32) if is_bf16(handle) else handle

    def narrow(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(float_to_bits(handle.data), tl.bfloat16)

    def binary_op(self, lhs, rhs, op, original=InterpreterBuilder.binary_op):
        bf16 = is_bf16(lhs) or is_bf16(rhs)
        result = original(self, widen(lhs), widen(rhs), op) if bf16 else original(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:  # the interpreter would label a comparison with its operands' dtype
            return TensorHandle(result.data, tl.int1)
        return narrow(result) if bf16 else result

    def unary_op(self, arg, op, original=InterpreterBuilder.unary_op):
        return narrow(original(self, widen(arg), op)) if is_bf16(arg) else original(self, arg, op)

    def ternary_op(self, lhs, rhs, other, op, original=InterpreterBuilder.ternary_op):
        if not is_bf16(other):
            return original(self, lhs, rhs, other, op)
        return narrow(original(self, widen(lhs), widen(rhs), widen(other), op))

    def cast_impl(self, src, dst_type, original=InterpreterBuilder.cast_impl):
        to_bf16 = dst_type.scalar == tl.bfloat16
        if not is_bf16(src) and not to_bf16:
            return original(self, src, dst_type)
        if is_bf16(src) and to_bf16:
            return src
        wide = widen(src) if is_bf16(src) else original(self, src, tl.float32)
        return narrow(wide) if to_bf16 else original(self, wide, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding, original=InterpreterBuilder.create_fp_to_fp):
        bits = {src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth}
        truncating = rounding is not None and rounding != interpreter._ir.ROUNDING_MODE.RTNE
        if (is_bf16(src) or dst_type.scalar == tl.bfloat16) and 8 not in bits and not truncating:
            return cast_impl(self, src, dst_type)
        return original(self, src, dst_type, rounding)

    def create_dot(self, a, b, d, *args, original=InterpreterBuilder.create_dot):
        return original(self, widen(a), widen(b), d, *args)

    def create_fma(self, x, y, z, original=InterpreterBuilder.create_fma):
        return narrow(original(self, widen(x), widen(y), widen(z))) if is_bf16(z) else original(self, x, y, z)

    def widened_apply(cls):
        original = cls.apply_impl

        def apply_impl(self, input):  # sums, maxima, scans: in float32, rounded once
            builtin = self.combine_fn.fn.__module__ == "triton.language.standard"
            if not builtin or not any(is_bf16(t.handle) for t in input):
                return original(self, input)
            wide = [
                t if not is_bf16(t.handle) else self.to_tensor(widen(t.handle).data, tl.float32)
                for t in input
            ]
            result = original(self, tuple(wide))
            results = result if isinstance(result, (list, tuple)) else [result]
            return [
                self.to_tensor(float_to_bits(r.handle.data), tl.bfloat16) if r.dtype == tl.float32 else r
                for r in results
            ]

        cls.apply_impl = apply_impl

    for function in (binary_op, unary_op, ternary_op, cast_impl, create_fp_to_fp, create_dot, create_fma):
        setattr(InterpreterBuilder, function.__name__, function)
    widened_apply(ReduceOps)
    widened_apply(ScanOps)


def launch_in_turns() -> None:
    """Let one thread at a time interpret: Triton keeps the program's place and its language in globals.

    Of two launches side by side the one that ends last would leave `triton.language` redirected, and whatever
    is compiled in this process afterwards would fail. Idempotent.
    """
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__
    if getattr(original, "in_turns", False):
        return
    turn = threading.RLock()

    def call(self, *args, **kwargs):
        with turn:
            return original(self, *args, **kwargs)

    call.in_turns = True
    GridExecutor.__call__ = call


def patch_language_once() -> None:
    """Redirect `triton.language` once per launch, not at every device function: a quarter of the time.

    Afterwards all of it is as it was, for what is compiled in this process: Triton never restores what device
    functions of other modules see, such as `tl.core`, with which `tl.sum` is written. And let a loop bound be
    an array of one element, which NumPy 2.4 refuses to Triton 3.6.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    if getattr(original, "once", False):
        return
    done: set[int] = set()
    restores: list[Callable[[], None]] = []  # of the launch that runs

    def restore_all():
        while restores:
            restores.pop()()
        done.clear()

    def patch_lang(fn):
        namespace = id(fn.__globals__)
        if namespace in done:
            return interpreter._LangPatchScope()
        done.add(namespace)
        scope = original(fn)
        restores.append(scope.restore)
        if len(restores) == 1:
            scope.restore = restore_all
        return scope

    original_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        original_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patch_lang.once = True
    interpreter._patch_lang = patch_lang
    interpreter._patch_lang_tensor = patch_lang_tensor


# --- sanitizer ----------------------------------------------------------------------------------------------


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


# --- tensors larger than memory -----------------------------------------------------------------------------


def lazy_rows(rows: int, cols: int, row_stride: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, cols) of zeros, `row_stride` elements apart, on pages that exist only once they are touched."""
    size = ((rows - 1) * row_stride + cols) * dtype.itemsize
    noreserve = 0x4000  # MAP_NORESERVE on Linux; the mmap module names it from Python 3.13
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    return torch.frombuffer(pages, dtype=dtype).as_strided((rows, cols), (row_stride, 1))
