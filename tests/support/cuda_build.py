"""Build of `_C` for the PTX emulator: csrc/cuda as nvcc compiles it, with a stand-in for the CUDA runtime.

The host code and the PTX are of one compilation: nvcc puts the PTX, uncompressed, into the object, and the
stand-in (tests/ptx/emulator/cudart.cpp) finds it there. Results are kept in build/tests.
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
RUNTIME = ROOT / "tests" / "ptx" / "emulator" / "cudart.cpp"
# The architecture whose PTX every build of the extension has (setup.py).
ARCH = "80"
HOST_FLAGS = "-fPIC,-fvisibility=hidden,-Wall"


def nvcc() -> str:
    """Path of nvcc, found as setup.py finds it; skips the test where there is none."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=os.path.join(home, "bin") if home else None)
    if found is None:
        pytest.skip("needs nvcc")
    return found


def emulated_extension() -> Path:
    """The extension, in build/tests. It fails to build if its host code calls what the stand-in lacks."""
    cxx, compiler = cpu_build.compiler(), nvcc()
    host = cpu_build.host_objects(f"ptx_{ARCH}")
    base = [compiler, "-std=c++17", "-Xcompiler", HOST_FLAGS]
    ptx = ["-O3", f"-gencode=arch=compute_{ARCH},code=compute_{ARCH}", "--no-compress"]
    kernels = {f"cuda_{p.stem}": (p, ptx) for p in sorted((ROOT / "csrc" / "cuda").glob("*.cu"))}
    kernels["cudart"] = (RUNTIME, ["-O1"])
    lines = cpu_build.compile_lines(host, [cxx, *cpu_build.FLAGS], ["-x", "c++"])
    lines += cpu_build.compile_lines(kernels, base, [])
    device, rest = (" ".join(f"{stem}.o" for stem in objects) for objects in (kernels, host))
    name = cpu_build.extension_name()
    for rule, flags in (("complete", ["-Wl,--no-undefined"]), ("link", [])):
        lines += [f"rule {rule}", f"  command = {shlex.join([cxx, '-shared', *flags])} $in -o $out"]
    # Python's own symbols are missing in an extension; in this part of it nothing may be.
    lines += [f"build kernels.so: complete {device}", f"build {name}: link {rest} {device} | kernels.so"]
    lines += [f"default {name}"]
    return cpu_build.run_ninja(f"cuda_ptx-{sys.implementation.cache_tag}", lines) / name
