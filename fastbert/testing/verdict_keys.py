"""The key of a self-check's verdict: all that the verdict depends on.

Op, backend and dtype; the device's name, compute capability and driver; the versions of torch, Triton and
fastbert; the source of the kernel, of what it imports and of its check; the op's tuned configs in that dtype;
options that change the kernel.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path

import torch

from fastbert.runtime.version import VERSION

PACKAGE = Path(__file__).resolve().parents[1]

Key = dict[str, str]


def key_of(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Key:
    """All that a verdict depends on."""
    name, capability, driver = _device_facts(device)
    return {
        "op": op,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "device": name,
        "capability": capability,
        "driver": driver,
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "fastbert": VERSION,
        "source": source_hash(op, backend),
        "tuned": _tuned(op, backend, name, dtype),
        "options": _options(op, backend),
    }


def _options(op: str, backend: str) -> str:
    """What the user has asked of the kernel."""
    if op not in ("feed_forward", "linear") or backend not in ("triton", "cuda"):
        return ""
    if backend == "cuda":
        from fastbert.backends.cuda import linear

        return "exact gelu" if linear.EXACT_GELU else ""
    try:
        from fastbert.kernels import activation
    except ImportError:  # there is no Triton
        return ""
    return "exact gelu" if activation.EXACT_GELU else ""


def _tuned(op: str, backend: str, device_name: str, dtype: torch.dtype) -> str:
    """Hash of the configs in the device's table that the op's kernels use in that dtype; "" without any."""
    if backend != "triton":
        return ""
    try:
        from fastbert.kernels import tuning
    except ImportError:  # there is no Triton
        return ""
    entries = tuning.entries(device_name, op, dtype)
    if not entries:
        return ""
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


@cache
def _device_facts(device: torch.device) -> tuple[str, str, str]:
    if device.type != "cuda":
        return device.type, "", ""
    facts = torch.cuda.get_device_properties(device)
    driver = [str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "")())]
    # the driver's release, such as 580.65.06; only Linux has this file
    with contextlib.suppress(OSError):
        driver.append(Path("/sys/module/nvidia/version").read_text().strip())
    return facts.name, f"{facts.major}.{facts.minor}", " ".join(driver)


@cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def source_hash(op: str, backend: str, package: Path = PACKAGE) -> str:
    """Hash of the kernel's files, of those they import and of what checks it."""
    digest = hashlib.sha256()
    for path in _sources(op, backend, package):
        with contextlib.suppress(OSError):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


# The files in ops/ that make the contract and the reference, where they are not the one named after the op.
_CONTRACTS = {"attention": ("attention", "attention_grid", "attention_places")}
# The files in kernels/ that the launchers import by name, at the first launch, where they are not named after
# the op.
_KERNELS = {
    "attention": ("attention", "attention_backward"),
    "linear": ("linear", "linear_backward"),
    "linear_cross_entropy": ("cross_entropy",),
}


def _sources(op: str, backend: str, package: Path) -> list[Path]:
    backends = package / "backends"
    checks = package / "testing"
    files = [checks / f"{name}.py" for name in ("error_rule", "speed", "device_time", f"op_cases/{op}")]
    files += [package / "ops" / f"{name}.py" for name in _CONTRACTS.get(op, (op,))]
    if backend == "triton":
        starts = [backends / "triton" / f"{name}.py" for name in ("forwarders", op)]
        starts += [package / "kernels" / f"{name}.py" for name in _KERNELS.get(op, (op,))]
        files += sorted(_with_imports(starts, package))
    else:
        from fastbert.runtime import loader

        # feed_forward's products are linear's
        names = "__init__", "device", op, *(("linear",) if op == "feed_forward" else ())
        files += [backends / backend / f"{name}.py" for name in names]
        if loader.extension is not None:
            files.append(Path(loader.extension.__file__))
    return files


def _with_imports(starts: list[Path], package: Path) -> set[Path]:
    """The files and all that they import, directly or not, of the kernels and of the triton backend."""
    found: set[Path] = set()
    left = list(starts)
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith(("fastbert.kernels.", "fastbert.backends.triton.")):
                    left.append(package.joinpath(*name.split(".")[1:]).with_suffix(".py"))
    return found
