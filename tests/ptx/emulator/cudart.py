"""The `cuda` backend on CPU tensors: its kernels, as nvcc compiled them, run in the PTX emulator.

    with emulated_cuda(schedule="late", seed=3) as emulated:
        y = emulated.backend.layer_norm_fwd(inputs, save)
        print(emulated.launches[-1])

Host code and PTX are of one build (tests/support/cuda_build.py). A kernel may touch what its launcher gets
and makes, and nothing else: each tensor's own bytes, not the storage around them. What a launcher allocates
holds NaN until it is written. A report of the emulator is raised out of the launcher's call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastbert.backends import cuda
from fastbert.runtime import dispatch
from fastbert.runtime.loader import address
from tests.ptx import emulator
from tests.ptx.emulator.parse import Parameter
from tests.support import cuda_build

# cudaError_t
INVALID_VALUE, INVALID_CONFIGURATION, LAUNCH_FAILURE = 1, 9, 719
# cudaFuncAttribute
MAX_DYNAMIC_SHARED, PREFERRED_CARVEOUT = 8, 9
# What a device takes: threads of a block, its sides, the grid's sides; bytes of shared memory of a block,
# without asking, and after asking for them: of a kernel for 8.0 and later, and of one for 9.0 ("hopper").
THREADS, BLOCK, GRID = 1024, (1024, 1024, 64), (2**31 - 1, 65535, 65535)
SHARED, SHARED_OPT_IN = 48 * 1024, (163 * 1024, 227 * 1024)

_ENTRY = re.compile(r"^(?:\.visible\s+|\.weak\s+)?\.entry\s+(\w+)", re.MULTILINE)
_BRACE = re.compile(r"[{}]")
_MAXNTID = re.compile(r"^\.maxntid\s+([\d, ]+)", re.MULTILINE)


def entries(ptx: str) -> dict[str, str]:
    """By kernel: a PTX module with this kernel alone, and with everything outside of kernels."""
    common, found, at = [], {}, 0
    for match in _ENTRY.finditer(ptx):
        common.append(ptx[at : match.start()])
        depth = 0
        for brace in _BRACE.finditer(ptx, match.end()):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                break
        at = brace.end()
        found[match[1]] = ptx[match.start() : at]
    common.append(ptx[at:])
    return {name: "".join(common) + "\n" + text for name, text in found.items()}


class Library:
    """A shared library of host code with the stand-in: the kernels that it registered, and their PTX."""

    def __init__(self, path: Path) -> None:
        self.calls = ctypes.CDLL(str(path))
        # by kernel: the dynamic shared memory that it may have; host code asks for it once
        self.allowed: dict[str, int] = {}
        self.calls.emulator_ptx.restype = ctypes.c_void_p
        self.calls.emulator_kernel.restype = ctypes.c_char_p
        texts = [self._ptx(i) for i in range(self.calls.emulator_modules())]
        module = ctypes.c_int()
        self.names: list[str] = []
        self.texts: dict[str, str] = {}
        for i in range(self.calls.emulator_kernels()):
            self.names.append(self.calls.emulator_kernel(i, ctypes.byref(module)).decode())
            self.texts[self.names[-1]] = texts[module.value][self.names[-1]]

    def _ptx(self, module: int) -> dict[str, str]:
        size = ctypes.c_size_t()
        start = self.calls.emulator_ptx(module, ctypes.byref(size))
        assert start, "a fat binary without exactly one uncompressed PTX"
        return entries(ctypes.string_at(start, size.value).decode().rstrip("\0"))

    @functools.cache  # noqa: B019 (one library per process)
    def program(self, name: str, contract: bool = False) -> emulator.Program:
        """The kernel, parsed at its first launch."""
        return emulator.Program(self.texts[name], contract)


class Extension(Library):
    """`_C` with csrc/cuda in the emulator, as the Python module `module` too."""

    def __init__(self, path: Path) -> None:
        # a name of its own: pybind11 gives a second `fastbert._C` the first one's module
        spec = importlib.util.spec_from_file_location("fastbert_on_ptx._C", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        super().__init__(path)


@functools.cache
def extension() -> Extension:
    """Build and load the extension; skips the test where there is no nvcc."""
    path = cuda_build.emulated_extension()
    # before the host code looks for it
    products = ctypes.CDLL(str(path.parent / cuda_build.CUBLAS_LT))
    found = Extension(path)
    found.set_products = products.emulator_products
    return found


# --- memory ---


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """(address of the first byte, address past the last one) of a tensor's own elements."""
    start = address(tensor)
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument: of tuples, lists and dictionaries, and of objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)) and not callable(value):
        yield from tensors_in(vars(value))


def regions(tensors: Iterable[torch.Tensor]) -> list[np.ndarray]:
    """The bytes of the tensors' own elements, as disjoint arrays."""
    merged: list[list[int]] = []
    for start, end in sorted({extent(t) for t in tensors if t.numel()}):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [np.ctypeslib.as_array((ctypes.c_uint8 * (end - at)).from_address(at)) for at, end in merged]


_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_FILLED = {"zeros", "new_zeros", "zeros_like", "full", "new_full", "full_like", "ones", "new_ones"}
_PAD = 256


class Memory(TorchDispatchMode):
    """Sees each tensor that is made or used. New ones get guards around them, and NaN if they are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.given: list[torch.Tensor] = []
        self._guards: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name in _EMPTY | _FILLED:
            out = self._guarded(out, name in _FILLED)
        self.tensors += tensors_in((args, kwargs, out))
        return out

    def _guarded(self, tensor: torch.Tensor, filled: bool) -> torch.Tensor:
        size = extent(tensor)[1] - extent(tensor)[0]
        memory = torch.full((size + 3 * _PAD,), 0xFF, dtype=torch.uint8)
        start = _PAD + -address(memory) % _PAD  # as a GPU's allocator aligns
        self._guards += [memory[:start], memory[start + size :]]
        inner = torch.empty(0, dtype=tensor.dtype).set_(
            memory.untyped_storage(), start // tensor.itemsize, tensor.shape, tensor.stride()
        )
        return inner.copy_(tensor) if filled else inner

    def check_guards(self) -> None:
        """AssertionError if something was written beside a new tensor."""
        for guard in self._guards:
            assert (guard == 0xFF).all(), "written beside an output"


# --- launches ---


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's mangled name, and its configuration."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cluster: int = 1
    chained: bool = False


@dataclass
class Emulation:
    """What `emulated_cuda` gives. The settings may be changed between calls."""

    library: Library
    schedule: str = "late"
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    memory: list[torch.Tensor] = field(default_factory=list)
    backend: ModuleType = cuda
    launches: list[Launch] = field(default_factory=list)
    contract: bool = False
    allowed: dict[str, int] = field(default_factory=dict)
    _scopes: list[Memory] = field(default_factory=list)
    _raised: BaseException | None = None

    def register(self, *tensors: torch.Tensor) -> None:
        """Let kernels touch further tensors, for calls of the extension without a launcher."""
        self.memory += tensors

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """Take the launches of the library's host code."""
        numbers = ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
        launch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, *numbers)(self._launch)
        set_attribute = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] * 3)(self._set_attribute)
        static_shared = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(self._get_static_shared)
        self.library.calls.emulator_set_callbacks(launch, set_attribute, static_shared)
        try:
            yield
        finally:
            self.library.calls.emulator_set_callbacks(None, None, None)

    @contextlib.contextmanager
    def without_maps(self, after: int = 0) -> Iterator[None]:
        """The driver refuses every tensor map but the first `after`."""
        self.library.calls.emulator_refuse_maps(after)
        try:
            yield
        finally:
            self.library.calls.emulator_refuse_maps(-1)

    def raise_report(self) -> None:
        """Raise what the emulator reported since the last call, if anything."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    # what the stand-in calls; the first two return a cudaError_t

    def _set_attribute(self, kernel: int, attribute: int, value: int) -> int:
        try:
            name = self.library.names[kernel]
            if attribute == PREFERRED_CARVEOUT:
                return 0 if -1 <= value <= 100 else INVALID_VALUE
            most = SHARED_OPT_IN["hopper" in name] - self._static_shared(name)
            if attribute != MAX_DYNAMIC_SHARED or not 0 <= value <= most:
                return INVALID_VALUE
            self.allowed[name] = value
        except BaseException as error:
            self._raised = error
            return LAUNCH_FAILURE
        return 0

    def _get_static_shared(self, kernel: int) -> int:
        """Bytes, or minus a cudaError_t."""
        try:
            return self._static_shared(self.library.names[kernel])
        except BaseException as error:
            self._raised = error
            return -LAUNCH_FAILURE

    def _static_shared(self, name: str) -> int:
        return self.library.program(name).kernels[name].shared_bytes

    def _configuration_error(self, launch: Launch) -> int:
        threads = math.prod(launch.block)
        if not all(0 < n <= most for n, most in zip(launch.grid, GRID, strict=True)):
            return INVALID_CONFIGURATION
        if not all(0 < n <= most for n, most in zip(launch.block, BLOCK, strict=True)) or threads > THREADS:
            return INVALID_CONFIGURATION
        bounds = _MAXNTID.search(self.library.texts[launch.kernel])
        if bounds and threads > math.prod(int(n) for n in bounds[1].split(",")):
            return INVALID_VALUE
        left = SHARED - self._static_shared(launch.kernel)
        allowed = max(left, self.allowed.get(launch.kernel, 0))
        return INVALID_VALUE if left < 0 or launch.shared_bytes > allowed else 0

    def _launch(self, kernel: int, sizes, shared_bytes: int, arguments) -> int:
        try:
            name = self.library.names[kernel]
            launch = Launch(name, tuple(sizes[:3]), tuple(sizes[3:6]), shared_bytes, sizes[6], bool(sizes[7]))
            error = self._configuration_error(launch)
            if error:
                return error
            self.launches.append(launch)
            program = self.library.program(name, self.contract)
            seen = [*self.memory, *(t for scope in self._scopes for t in scope.tensors)]
            given = [*self.memory, *(t for scope in self._scopes for t in scope.given)]
            chained = {"constant": regions(given)} if launch.chained else {}
            clusters = {"cluster": (launch.cluster, 1, 1)} if launch.cluster > 1 else {}
            program.launch(
                name,
                grid=launch.grid,
                block=launch.block,
                parameters=parameter_block(program.kernels[name].parameters, arguments),
                shared_bytes=shared_bytes,
                schedule=self.schedule,
                seed=self.seed,
                memory=regions(seen),
                **(chained | clusters | self.options),
            )
        except BaseException as error:
            self._raised = error
            return LAUNCH_FAILURE
        return 0

    # the stand-in of the backend

    def launcher(self, function: Callable) -> Callable:
        """The backend's launcher; the emulator knows its tensors, and nothing but its outputs may change."""

        @functools.wraps(function)
        def call(*args, **kwargs):
            given = list(tensors_in((args, kwargs)))
            before = [t.clone() for t in given]
            with Memory() as scope:
                scope.tensors += given
                scope.given += given
                self._scopes.append(scope)
                try:
                    out = function(*args, **kwargs)
                finally:
                    self._scopes.pop()
            scope.check_guards()
            for tensor, copy in zip(given, before, strict=True):
                assert torch.equal(_bits(tensor), _bits(copy)), "an input was written"
            return out

        return call


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def parameter_block(parameters: Iterable[Parameter], arguments) -> bytes:
    """A kernel's parameters as one block: each copied from where `arguments` points to its offset."""
    block = bytearray(max((p.offset + p.size for p in parameters), default=0))
    for i, p in enumerate(parameters):
        block[p.offset : p.offset + p.size] = ctypes.string_at(arguments[i], p.size)
    return bytes(block)


class Raising:
    """The extension, whose functions raise the emulator's report in place of the launch's error."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation

    def __getattr__(self, name: str) -> object:
        value = getattr(self._emulation.library.module, name)
        if not callable(value):
            return value

        def call(*args, **kwargs):
            try:
                out = value(*args, **kwargs)
            except RuntimeError:
                self._emulation.raise_report()
                raise
            self._emulation.raise_report()  # the host code may have missed the error
            return out

        return call


@contextlib.contextmanager
def emulated_cuda(schedule: str = "late", seed: int = 0, **options: object) -> Iterator[Emulation]:
    """Run the `cuda` backend on CPU tensors, its kernels in the emulator.

    Args:
        schedule, seed: see `Program.launch`.
        options: further arguments of `Program.launch`.
    """
    library = extension()
    emulation = Emulation(library, schedule, seed, options, allowed=library.allowed)
    patched = [
        (cuda, "available", lambda device_type: None if device_type == "cpu" else "emulated on cpu alone"),
        (cuda.device, "extension", Raising(emulation)),
        (cuda.device, "place", lambda device: (0, 0)),
        (cuda.device, "multiprocessors", lambda device: 2),
        (cuda.device, "is_hopper", lambda device: True),
        (cuda.device, "has_group_products", lambda device: False),
        (torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ]
    patched += [
        (cuda, name, emulation.launcher(getattr(cuda, name)))
        for name in vars(cuda)
        if name.endswith(("_fwd", "_bwd"))
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in patched:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(emulation.connected())
        # what dispatch has kept knows the launchers outside
        dispatch._resolved.clear()
        stack.callback(dispatch._resolved.clear)
        yield emulation
