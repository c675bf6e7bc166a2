"""The engine in C++, built when it is first needed and loaded by ctypes."""

from __future__ import annotations

import ctypes
import functools
import pathlib
import platform

from tests.support import cpu_build

HERE = pathlib.Path(__file__).resolve().parent


class Request(ctypes.Structure):
    """`LaunchRequest` of api.cpp."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint32),
        ("late", ctypes.c_uint32),
        ("check_overlap", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("limit", ctypes.c_int64),
        ("parameters", ctypes.c_char_p),
        ("parameter_bytes", ctypes.c_uint64),
        ("allocations", ctypes.c_void_p),
        ("allocation_count", ctypes.c_uint64),
        ("shared_image", ctypes.c_char_p),
        ("shared_result", ctypes.c_void_p),
        ("image_bytes", ctypes.c_uint64),
        ("chained", ctypes.c_uint32),
        ("constant", ctypes.c_void_p),
        ("constant_count", ctypes.c_uint64),
    )


class Report(ctypes.Structure):
    """`Report` of api.cpp."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("line", ctypes.c_uint32),
        ("block", ctypes.c_uint32),
        ("warp", ctypes.c_uint32),
        ("lanes", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("executed", ctypes.c_int64),
        ("text", ctypes.c_char * 400),
    )


def instruction_set() -> str:
    """The widest that this machine has and the engine is compiled for."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "portable"
    words = pathlib.Path("/proc/cpuinfo").read_text().split()
    for name, needed in (
        ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ("avx2", {"avx2", "fma", "f16c"}),
    ):
        if needed <= set(words):
            return name
    return "portable"


@functools.cache
def engine() -> ctypes.CDLL:
    """The library; skips the test where no C++ compiler is."""
    isa = instruction_set()
    flags = ["-O1", "-fno-math-errno", "-fno-trapping-math", *cpu_build.ISA_FLAGS.get(isa, [])]
    if isa == "avx512":
        flags.append("-mprefer-vector-width=512")
    objects = {source.stem: (source, flags) for source in sorted(HERE.glob("*.cpp"))}
    path = cpu_build.ninja_build(f"ptx_emulator-{isa}", objects, "libptx.so", ["-shared"])
    library = ctypes.CDLL(str(path))
    library.ptx_forms.restype = ctypes.c_char_p
    library.ptx_warnings.restype = ctypes.c_char_p
    library.ptx_kernel.restype = ctypes.c_void_p
    library.ptx_kernel.argtypes = [*(ctypes.c_void_p, ctypes.c_uint64) * 3, *(ctypes.c_uint32,) * 5]
    library.ptx_kernel_free.argtypes = [ctypes.c_void_p]
    library.ptx_launch.argtypes = [ctypes.c_void_p, ctypes.POINTER(Request), ctypes.POINTER(Report)]
    return library


@functools.cache
def forms() -> dict[str, list[tuple[int, list[str]]]]:
    """name -> (number, operands) of each form of that name."""
    table: dict[str, list[tuple[int, list[str]]]] = {}
    for number, line in enumerate(engine().ptx_forms().decode().splitlines()):
        name, _, signature = line.partition("\t")
        table.setdefault(name, []).append((number, signature.split()))
    return table
