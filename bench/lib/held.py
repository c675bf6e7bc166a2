"""All engines held to AVX2 on a processor with AVX-512, for `bench/avx2.py`.

Ours, PyTorch, oneDNN and MKL have an environment variable for it. ONNX Runtime and OpenVINO's fp32 product go
by `cpuid` alone (`ONEDNN_MAX_CPU_ISA` does not reach that product). They run from copies in which each
`cpuid` is replaced by an instruction that held.cpp handles.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.lib import roofs

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("onnxruntime", "openvino")
HELD = "FASTBERT_BENCH_HELD"
VARIABLES = {
    HELD: "avx2",
    "FASTBERT_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "PYTEST_ADDOPTS": "-p no:faulthandler",  # it wants the signal for itself
}
CPUID, UD2 = b"\x0f\xa2", b"\x0f\x0b"


def environment(folder: Path) -> dict[str, str]:
    """The environment of processes that are held to AVX2; copies of the peers are made in `folder`.

    Raises RuntimeError where the tools are missing.
    """
    for tool in ("objdump", "readelf"):
        if shutil.which(tool) is None:
            raise RuntimeError(f"{tool} is missing: the peers cannot be held to AVX2")
    places = [str(copy.parent) for name in COPIED if (copy := copy_of(name, folder)) is not None]
    path = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, **VARIABLES, "PYTHONPATH": path}


def copy_of(package: str, folder: Path) -> Path | None:
    """A copy of an installed package, without `cpuid`, made once per version; None if it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    place = folder / f"{package}-{importlib.metadata.version(package)}"
    if not place.exists():
        unfinished = folder / f"{place.name}-{os.getpid()}"
        shutil.copytree(Path(spec.origin).parent, unfinished / package)
        for library in unfinished.rglob("*.so*"):
            replace_cpuid(library)
        unfinished.rename(place)
    return place / package


def replace_cpuid(library: Path) -> int:
    """Replace every `cpuid` of a shared library; returns how many there were."""
    code = bytearray(library.read_bytes())
    if CPUID not in code:
        return 0
    # the two bytes also stand within other instructions
    listing = _output("objdump", "-d", "--no-show-raw-insn", library)
    found = [int(line.partition(":")[0], 16) for line in listing if line.split()[1:] == ["cpuid"]]
    segments = [
        line.split() for line in _output("readelf", "-lW", library) if line.lstrip().startswith("LOAD")
    ]
    for address in found:
        for offset, start, size in ((int(each[i], 16) for i in (1, 2, 4)) for each in segments):
            if start <= address < start + size:
                at = offset + address - start
        assert code[at : at + 2] == CPUID
        code[at : at + 2] = UD2
    library.write_bytes(code)
    return len(found)


def answer() -> None:
    """Handle the replaced instructions of this process, if it is to be held. Before a peer is imported."""
    if HELD in os.environ and not _answering:
        with tempfile.TemporaryDirectory() as folder:
            _answering.append(roofs.build(Path(folder), "held"))
        if _answering[0].held_answer() != 0:
            raise RuntimeError("SIGILL has no handler: the peers cannot be held to AVX2")


_answering: list = []


def _output(*command: object) -> list[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout.splitlines()
