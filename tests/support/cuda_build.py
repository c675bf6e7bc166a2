"""Builds for the PTX emulator: CUDA sources as nvcc compiles them, with a stand-in for the CUDA runtime.

The host code and the PTX are of one compilation: nvcc puts the PTX, uncompressed, into the object, and the
stand-in (tests/ptx/cuda/cudart.cpp) finds it there. Results are kept in build/tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import cpu_build

ROOT = cpu_build.ROOT
RUNTIME = ROOT / "tests" / "ptx" / "cuda" / "cudart.cpp"
PRODUCTS = ROOT / "tests" / "ptx" / "cuda" / "cublas_lt.cpp"
# a name by which the host code finds it in the process
CUBLAS_LT = "libcublasLt.so.0"
# One for all files: kernels that a launch chains wait for those before them on compute capability 9.0 alone.
ARCH = "90a"
HOST_FLAGS = "-fPIC,-fvisibility=hidden,-Wall"


def nvcc() -> str:
    """Path of nvcc, found as setup.py finds it; skips the test where there is none."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if found is None:
        pytest.skip("needs nvcc")
    return found


def cuda_lines(objects: dict[str, tuple[Path, list[str]]]) -> list[str]:
    """Lines of a build.ninja that compile `objects`, CUDA sources, and the stand-in; and a rule `link`.

    Their target kernels.so fails to link if the host code calls what the stand-in lacks. (Python's own
    symbols are always missing in an extension.)
    """
    cxx = cpu_build.compiler()
    base = [nvcc(), "-std=c++17", "-Xcompiler", HOST_FLAGS]

    ptx = ["-O3", f"-gencode=arch=compute_{ARCH},code=compute_{ARCH}", "--no-compress"]
    every = {stem: (source, [*ptx, *flags]) for stem, (source, flags) in objects.items()}
    lines = cpu_build.compile_lines({**every, "cudart": (RUNTIME, ["-O1"])}, base, [])
    for rule, flags in (("complete", ["-Wl,--no-undefined"]), ("link", [])):
        lines += [f"rule {rule}", f"  command = {shlex.join([cxx, '-shared', *flags])} $in -o $out"]
    return [*lines, f"build kernels.so: complete {' '.join(f'{stem}.o' for stem in every)} cudart.o"]


def emulated_extension() -> Path:
    """`_C` with csrc/cuda as nvcc compiles it, no CPU kernels, and the stand-in."""
    host = cpu_build.host_objects(f"ptx_{ARCH}")
    kernels = {f"cuda_{p.stem}": (p, []) for p in sorted((ROOT / "csrc" / "cuda").glob("*.cu"))}
    lines = cpu_build.compile_lines(host, [cpu_build.compiler(), *cpu_build.FLAGS], ["-x", "c++"])
    lines += cuda_lines(kernels)
    name = cpu_build.extension_name()
    objects = " ".join(f"{stem}.o" for stem in (*host, *kernels, "cudart"))
    lines += [f"build {name}: link {objects} | kernels.so {CUBLAS_LT}", f"default {name}"]
    lines += ["rule products", f"  command = {cpu_build.compiler()} -std=c++17 -O2 -shared -fPIC $in -o $out"]
    lines += [f"build {CUBLAS_LT}: products {PRODUCTS}"]
    return cpu_build.run_ninja(f"cuda_ptx-{sys.implementation.cache_tag}", lines) / name


if __name__ == "__main__":
    print(emulated_extension())
