"""Peers held to AVX2: what `cpuid` returns in a copied library."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib import held

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("c++", "objdump", "readelf"))),
    reason="needs an x86 processor, a compiler and binutils",
)
# leaf 7 of cpuid, and a number with the same two bytes, which must stay
SOURCE = """
#include <cpuid.h>
extern "C" unsigned features(int which) {
    unsigned a, b, c, d;
    __cpuid_count(7, 0, a, b, c, d);
    return which == 0 ? b : which == 1 ? c : d;
}
extern "C" unsigned same_bytes() { return 0x0fa20fa2u; }
"""
ASK = """
import ctypes, sys
sys.path.insert(0, {root!r})
from bench.lib import held
held.answer()
library = ctypes.CDLL({library!r})
library.same_bytes.restype = library.features.restype = ctypes.c_uint
print(*(library.features(i) for i in range(3)), library.same_bytes())
"""


def test_a_held_library_sees_no_avx512(tmp_path, monkeypatch):
    package = tmp_path / "site" / "asks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "asks.cpp").write_text(SOURCE)
    library = package / "asks.so"
    subprocess.run(
        ["c++", "-O1", "-shared", "-fPIC", str(tmp_path / "asks.cpp"), "-o", str(library)], check=True
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(held, "COPIED", ("asks", "not_installed"))
    monkeypatch.setattr(held.importlib.metadata, "version", lambda name: "1.0")
    environment = held.environment(tmp_path / "copies")
    copy = tmp_path / "copies" / "asks-1.0" / "asks" / "asks.so"
    assert environment["PYTHONPATH"].split(":")[0] == str(copy.parents[1])
    before = copy.stat().st_mtime_ns
    assert held.environment(tmp_path / "copies") == environment
    assert copy.stat().st_mtime_ns == before

    def features(path: Path) -> list[int]:
        code = ASK.format(root=str(held.ROOT), library=str(path))
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        return list(map(int, run.stdout.split()))

    *mine, same = features(library)
    *held_to, same_there = features(copy)
    assert same == same_there == 0x0FA20FA2
    avx512 = 0xDC230000, 0x5842, 0x3C0010C
    for had, has, bits in zip(mine, held_to, avx512, strict=True):
        assert has == had & ~bits
