"""Launches of our Triton kernels, compiled to PTX and run in the emulator on the launch's own CPU tensors.

Triton compiles only with its interpreter off, so that this runs in a process of its own (`emulated_ops.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from tests.ptx.emulator import Program, tensor_map
from tests.support.triton_compile import source

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = [m.name for m in pkgutil.iter_modules([str(ROOT / "kernels")])]


def only_ptx() -> None:
    """Let this process compile to PTX and no further, and keep that where no other use of Triton finds it."""
    triton.knobs.cache.dir = str(ROOT / "build" / "tests" / "ptx_of_triton")
    CUDABackend.make_cubin = lambda self, *rest: b""


@dataclass
class Compiled:
    """One kernel as PTX."""

    program: Program
    name: str
    threads: int
    shared: int
    scratch: int  # bytes per block that the kernel wants in global memory
    wanted: list[int]  # the arguments that are parameters
    ptx: str
    tiles: list[dict]  # of the tensor descriptors among the arguments, in order


@dataclass
class Emulation:
    """How launches run, and what has run."""

    arch: int = 80
    schedule: str = "late"
    seed: int = 0
    check_overlap: bool = True
    contract: bool = False
    kernels: dict[str, Compiled] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)

    def compiled(self, kernel, args: tuple, config: dict) -> Compiled:
        src, options = source(kernel, args, config)
        key = repr(
            (kernel.fn.__module__, kernel.fn.__name__, src.signature, src.constants, src.attrs, options)
        )
        if key not in self.kernels:
            made = triton.compile(src, target=GPUTarget("cuda", self.arch, 32), options=options)
            text = made.asm["ptx"]
            program = Program(text, self.contract)
            (name,) = program.kernels
            wanted = [i for i, p in enumerate(kernel.params) if src.signature[p.name] != "constexpr"]
            metadata = made.metadata
            self.kernels[key] = Compiled(
                program,
                name,
                metadata.num_warps * 32,
                metadata.shared,
                metadata.global_scratch_size,
                wanted,
                text,
                list(metadata.tensordesc_meta or ()),
            )
        return self.kernels[key]

    def launch(self, kernel, grid: tuple[int, ...], device: torch.device, *args, **config) -> None:
        """In the place of `fastbert.kernels.launch.launch`."""
        found = self.compiled(kernel, args, config)
        names = [p.name for p in kernel.params]
        values = [args[i] if i < len(args) else config[names[i]] for i in found.wanted]
        tiles = iter(found.tiles)
        memory = [v.base for v in values if hasattr(v, "block_shape")]
        values = [
            part for v in values for part in (described(v, tiles) if hasattr(v, "block_shape") else [v])
        ]
        grid = (*grid, 1, 1)[:3]
        scratch = None
        if found.scratch:
            scratch = torch.zeros(found.scratch * grid[0] * grid[1] * grid[2], dtype=torch.uint8)
        found.program.launch(
            found.name,
            grid,
            (found.threads,),
            [*values, scratch, None],
            shared_bytes=found.shared,
            schedule=self.schedule,
            seed=self.seed,
            check_overlap=self.check_overlap,
            memory=memory,
        )
        self.launched.append(kernel.fn.__name__)


def described(descriptor, tiles: Iterator[dict]) -> list:
    """The parameters that a tensor descriptor made on the host becomes: a tensor map, sizes and strides."""
    tile, base = next(tiles), descriptor.base
    swizzle = (0, 32, 64, 128)[tile["swizzle"]]
    sizes, strides = list(descriptor.shape), list(descriptor.strides)
    made = tensor_map(base.data_ptr(), tile["elem_size"], sizes, strides, tile["block_size"], swizzle)
    return [made, *sizes, *strides]


@contextlib.contextmanager
def emulated(emulation: Emulation, multiprocessors: int = 2) -> Iterator[Emulation]:
    """Kernels of fastbert run in the emulator, and choose their configs as on a GPU of that generation."""
    from fastbert.backends import triton as backend
    from fastbert.kernels import tuning

    only_ptx()
    device = tuning.Device("", divmod(emulation.arch, 10), multiprocessors)
    patched = [(tuning, "device_of", lambda _: device), (backend, "available", lambda device_type: None)]
    for name in MODULES:
        module = importlib.import_module(f"fastbert.kernels.{name}")
        if hasattr(module, "launch") and name != "launch":
            patched.append((module, "launch", emulation.launch))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patched]
    for owner, name, value in patched:
        setattr(owner, name, value)
    try:
        yield emulation
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)
