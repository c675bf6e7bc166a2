"""`fastbert env`: versions, devices, and which backend serves which op and why."""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fastbert.runtime import loader
from fastbert.runtime.version import VERSION
from fastbert.testing import serving, verdicts

_PACKAGES = ("triton", "numpy", "tokenizers", "safetensors", "transformers", "sentence-transformers")
# instruction set -> the benefit of bf16 (csrc/cpu/NOTES.md)
_BF16 = dict.fromkeys(("avx2", "avx2_vnni", "avx512"), "half the memory; multiplied as fp32, at its speed")
_BF16 |= {"none": "PyTorch's", "avx512_bf16": "half the memory; products at up to twice the speed of fp32"}


def environment() -> dict[str, Any]:
    """What `fastbert env --json` prints: versions, extension, devices, and each op's and dtype's backend."""
    cpu = {"device": "cpu", "name": _cpu_name(), "threads": torch.get_num_threads()}
    devices: list[dict[str, Any]] = [cpu]
    for index in range(torch.cuda.device_count()):
        info = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": info.name,
                "capability": f"{info.major}.{info.minor}",
                "memory_bytes": info.total_memory,
                "multiprocessors": info.multi_processor_count,
            }
        )
    return {
        "versions": {
            "fastbert": VERSION,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "torch": torch.__version__,
            "torch_cuda": torch.version.cuda,
            **{name: _version(name) for name in _PACKAGES},
        },
        "extension": _extension(),
        "devices": devices,
        "backends": [vars(row) for entry in devices for row in serving.choices(entry["device"])],
        "gpu_kernels": [
            vars(row) | {"times": [time._asdict() for time in row.times]}
            for entry in devices
            for row in serving.proofs(entry["device"])
        ],
        "verdicts": None if (where := verdicts.folder()) is None else str(where),
    }


def _extension() -> dict[str, Any]:
    extension = loader.extension
    if extension is None:
        return {"built": False, "reason": loader.missing}
    return {
        "built": True,
        "compiler": getattr(extension, "compiler", None),
        "cpu_isa": extension.cpu_isa(),
        "best_cpu_isa": extension.best_cpu_isa(),
        "preferred_cpu_isa": extension.preferred_cpu_isa(),
        "bf16_on_a_cpu": _BF16[extension.cpu_isa()],
        "cuda_archs": extension.cuda_archs or None,
        "path": extension.__file__,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def run(args: argparse.Namespace) -> int:
    """Print the report; returns the exit status."""
    report = environment()
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    for title in ("versions", "extension"):
        print(title)
        for key, value in report[title].items():
            print(f"  {key:<21} {'none' if value is None else value}")
    print("devices")
    for entry in report["devices"]:
        print("  " + ", ".join(f"{key} {value}" for key, value in entry.items()))
    print("backends")
    _table(("op", "device", "dtype", "backend", "why"), report["backends"])
    print(f"GPU kernels (verdicts in {report['verdicts'] or 'no folder: FASTBERT_CACHE is empty'})")
    if report["gpu_kernels"]:
        _table(("op", "device", "dtype", "backend", "state", "detail"), report["gpu_kernels"])
    else:
        print("  no GPU to run them")
    return 0


def _table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    widths = [max([len(c), *(len(str(row[c])) for row in rows)]) for c in columns[:-1]] + [0]
    print("  " + "  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)))
    for row in rows:
        print("  " + "  ".join(str(row[c]).ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip())
