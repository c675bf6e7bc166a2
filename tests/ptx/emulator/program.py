"""PTX text that can be launched on CPU tensors."""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.ptx.emulator import library
from tests.ptx.emulator.contraction import contracted
from tests.ptx.emulator.decode import Decoded, decode
from tests.ptx.emulator.parse import BYTES, Parameter, parse, triple
from tests.ptx.emulator.reports import KINDS, EmulatorError, ProxyWarning

FLOATS = {"f32": "<f", "f64": "<d", "f16": "<e"}


@dataclass(frozen=True)
class KernelInfo:
    """What a kernel asks of its launcher."""

    name: str
    parameters: tuple[Parameter, ...]
    shared_bytes: int
    cluster: tuple[int, int, int] | None  # blocks of a cluster by axis, if the text says


def extent(memory: object) -> tuple[int, int]:
    """(start, end) of the memory of a tensor, with all of its storage, or of an array."""
    if hasattr(memory, "untyped_storage"):
        storage = memory.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    if isinstance(memory, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(memory)
        return low, high
    start, size = memory
    return start, start + size


def merged(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, with those that overlap as one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(e for e in extents if e[0] < e[1]):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


class Program:
    """The kernels of PTX text; with `contract`, sums of products are multiply-adds (contraction.py)."""

    def __init__(self, text: str, contract: bool = False) -> None:
        self.lines = text.splitlines()
        module = parse(text)
        self.target = module.target
        self.decoded: dict[str, Decoded] = {}
        self.kernels: dict[str, KernelInfo] = {}
        self.handles: dict[str, int] = {}
        for name, kernel in module.kernels.items():
            if contract:
                kernel = contracted(kernel)
            made = self.decoded[name] = decode(module, kernel)
            self.kernels[name] = KernelInfo(name, tuple(kernel.parameters), made.shared_bytes, kernel.cluster)
            self.handles[name] = self.handle(made)

    def handle(self, made: Decoded) -> int:
        stream = np.array(made.stream, np.int64)
        constants = np.array(made.constants, np.uint64)
        specials = np.array(made.specials, np.uint32)
        return library.engine().ptx_kernel(
            stream.ctypes.data,
            stream.size,
            constants.ctypes.data,
            len(made.constants),
            specials.ctypes.data,
            len(made.specials),
            made.constant_slots,
            made.slots,
            made.shared_bytes,
            made.local_bytes,
            made.waits,
        )

    def __del__(self) -> None:
        for handle in getattr(self, "handles", {}).values():
            library.engine().ptx_kernel_free(handle)

    def packed(self, name: str, arguments: Sequence[object]) -> tuple[bytes, list]:
        """The block of parameters, and the tensors among the arguments."""
        parameters = self.kernels[name].parameters
        if len(arguments) != len(parameters):
            raise ValueError(f"{name}: {len(arguments)} arguments, expected {len(parameters)}")
        block = bytearray(max((p.offset + p.size for p in parameters), default=0))
        tensors = []
        for p, value in zip(parameters, arguments, strict=True):
            if isinstance(value, (bytes, bytearray)):
                data = bytes(value)
            elif hasattr(value, "data_ptr"):
                tensors.append(value)
                data = struct.pack("<Q", value.data_ptr())
            elif isinstance(value, np.ndarray):
                tensors.append(value)
                data = struct.pack("<Q", value.ctypes.data)
            elif p.type in FLOATS:
                data = struct.pack(FLOATS[p.type], value)
            elif value is None:
                data = bytes(p.size)
            else:
                data = (int(value) & (2 ** (8 * BYTES[p.type]) - 1)).to_bytes(p.size, "little")
            if len(data) != p.size:
                raise ValueError(f"{name}: {p.name} has {p.size} bytes, got {len(data)}")
            block[p.offset : p.offset + p.size] = data
        return bytes(block), tensors

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[object] = (),
        *,
        shared_bytes: int = 0,
        schedule: str = "late",
        seed: int = 0,
        memory: Sequence[object] = (),
        parameters: bytes | None = None,
        check_overlap: bool = True,
        limit: int = 2_000_000_000,
        shared: bytes | None = None,
        cluster: Sequence[int] | None = None,
        constant: Sequence[object] | None = None,
    ) -> bytes | None:
        """Run a kernel.

        Args:
            name: the kernel's name.
            grid: blocks by axis.
            block: threads by axis.
            arguments: tensors, arrays, numbers, None, or bytes of a struct: one per parameter.
            shared_bytes: bytes of dynamic shared memory.
            schedule: "late", so that an asynchronous copy lands when its group is waited for, or "early".
            seed: seed of the order of blocks and warps.
            memory: further tensors, arrays or (address, bytes) that the kernel may touch.
            parameters: the whole block of parameters, in place of `arguments`.
            check_overlap: report a byte that two blocks write.
            limit: statements of one block, or of one cluster, after which it counts as endless.
            shared: what shared memory holds at first.
            cluster: blocks of a cluster by axis; by default what the text requires, or single blocks.
            constant: the launch is chained, and this memory is not written by kernels before it: without
                griddepcontrol.wait a thread may only read this.

        Returns: what the first block's shared memory holds in the end, if `shared` was given.
        Raises: EmulatorError, by what the kernel does wrong; ValueError for a wrong schedule or cluster.
        """
        if schedule not in ("late", "early"):
            raise ValueError(f"schedule: got {schedule!r}, expected 'late' or 'early'")
        tensors: list = []
        if parameters is None:
            parameters, tensors = self.packed(name, arguments)
        extents = merged(extent(m) for m in (*tensors, *memory))
        bounds = np.array(extents, np.uint64)
        grid, block = triple(grid), triple(block)
        required = self.kernels[name].cluster
        cluster = triple(cluster or required or ())
        if cluster != (required or cluster) or any(n % c for n, c in zip(grid, cluster, strict=True)):
            raise ValueError(
                f"cluster: got {cluster}; {name} requires {required}, and it must divide the grid {grid}"
            )
        request = library.Request(
            grid=grid, threads=block, cluster=cluster, dynamic_shared_bytes=shared_bytes
        )
        request.late, request.check_overlap = schedule == "late", check_overlap
        request.seed, request.limit = seed % 2**32, limit
        request.parameters, request.parameter_bytes = parameters, len(parameters)
        request.allocations, request.allocation_count = bounds.ctypes.data, len(extents)
        result = ctypes.create_string_buffer(len(shared)) if shared else None
        if shared:
            request.shared_image, request.image_bytes = shared, len(shared)
            request.shared_result = ctypes.addressof(result)
        early = np.array(merged(map(extent, constant or ())), np.uint64)
        request.chained, request.constant = constant is not None, early.ctypes.data
        request.constant_count = len(early)
        report = library.Report()
        if 0 not in grid:
            library.engine().ptx_launch(self.handles[name], request, report)
        self.warn(name)
        if report.kind:
            raise self.error(name, report, grid, seed, schedule)
        return result.raw if result else None

    def warn(self, name: str) -> None:
        """Tell Python what the launch was warned of."""
        for warning in library.engine().ptx_warnings().decode().splitlines():
            number, _, text = warning.partition("\t")
            line = self.lines[int(number) - 1].strip() if int(number) else ""
            warnings.warn(f"{text}: kernel {name}, line {number}: {line}", ProxyWarning, stacklevel=3)

    def error(self, name: str, report: library.Report, grid, seed: int, schedule: str) -> EmulatorError:
        x, y, _ = grid
        index = report.block % x, report.block // x % y, report.block // (x * y)
        text = self.lines[report.line - 1].strip() if report.line else ""
        lanes = [lane for lane in range(32) if report.lanes >> lane & 1]
        return KINDS[report.kind - 1](
            f"{report.text.decode()}: kernel {name}, line {report.line}: {text}; block {index}, "
            f"warp {report.warp}, lanes {lanes}, address {report.address:#x}; "
            f"seed {seed}, schedule {schedule}"
        )
