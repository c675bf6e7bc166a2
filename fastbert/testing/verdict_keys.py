"""The keys of a self-check's verdict: all that the verdict depends on.

On a user's disk (`key_of`): op, backend and dtype; the device's name, compute capability and driver; the
versions of torch, Triton and fastbert; the source of the kernel, of what it imports and of its check; the
op's tuned configs in that dtype; options that change the kernel.

In the shipped table (`proof_key_of`): op, backend and dtype; the source of the kernel alone and its tuned
configs; the device's name and compute capability; what compiles it there. For Triton's kernels that is
Triton's version and torch's major and minor; for CUDA's, nvcc's version and the architecture in the
extension. The extension knows the hash of the sources that it was built from.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastbert.runtime import loader
from fastbert.runtime.version import VERSION

PACKAGE = Path(__file__).resolve().parents[1]

Key = dict[str, str]


class Unit(NamedTuple):
    """A kernel in a dtype."""

    op: str
    backend: str
    dtype: torch.dtype


def name_of(dtype: torch.dtype) -> str:
    """Such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def key_of(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Key:
    """All that a verdict depends on."""
    name, capability, driver = _device_facts(device)
    return {
        "op": op,
        "backend": backend,
        "dtype": name_of(dtype),
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


def proof_key_of(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> Key | None:
    """All that a shipped proof depends on; None where none can count, as of a kernel with options."""
    name, capability, _ = _device_facts(device)
    compilers = _compilers(backend, capability)
    if compilers is None or _options(op, backend):
        return None
    kernel = {"op": op, "backend": backend, "dtype": name_of(dtype)}
    source = {"source": kernel_hash(op, backend), "tuned": _tuned(op, backend, name, dtype)}
    return kernel | source | {"device": name, "capability": capability} | compilers


def _compilers(backend: str, capability: str) -> Key | None:
    """What compiles the backend's kernels for a device; None where that is not known."""
    if backend == "triton":
        return {"triton": _triton_version(), "torch": ".".join(torch.__version__.split(".")[:2])}
    if not getattr(loader.extension, "cuda_sources", ""):
        return None
    own = capability.replace(".", "")
    archs = loader.extension.cuda_archs.split(";")
    # without code of its own the device uses another's, or has PTX compiled by its driver
    found = [arch for arch in archs if arch.rstrip("af") == own]
    return {"nvcc": loader.extension.nvcc, "arch": ";".join(found or archs)}


def _triton_module(name: str) -> Any:
    """A module beside Triton's kernels; None where there is no Triton."""
    try:
        return importlib.import_module(f"fastbert.kernels.{name}")
    except ImportError:
        return None


def _options(op: str, backend: str) -> str:
    """What the user has asked of the kernel."""
    if op not in ("feed_forward", "linear") or backend not in ("triton", "cuda"):
        return ""
    options = _triton_module("activation")
    if backend == "cuda":
        from fastbert.backends.cuda import linear as options
    return "exact gelu" if options is not None and options.EXACT_GELU else ""


def _tuned(op: str, backend: str, device_name: str, dtype: torch.dtype) -> str:
    """Hash of the configs in the device's table that the op's kernels use in that dtype; "" without any."""
    tuning = _triton_module("tuning") if backend == "triton" else None
    entries = tuning and tuning.entries(device_name, op, dtype)
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest() if entries else ""


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
    files = [*_checks(op, package), *_kernel(op, backend, package)]
    if backend == "cuda" and loader.extension is not None:
        files.append(Path(loader.extension.__file__))
    return _hash(files)


@cache
def kernel_hash(op: str, backend: str, package: Path = PACKAGE) -> str:
    """Hash of the kernel's files and of those they import; of CUDA's as the extension was built from them."""
    built = dict(part.split("=") for part in getattr(loader.extension, "cuda_sources", "").split(";") if part)
    # feed_forward's products are linear's
    family = {"feed_forward": "linear"}.get(op, op)
    return _hash(_kernel(op, backend, package), built.get(family, "") if backend == "cuda" else "")


def _hash(files: Iterable[Path], more: str = "") -> str:
    digest = hashlib.sha256(more.encode())
    for path in files:
        with contextlib.suppress(OSError):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


# The files in ops/ that make the contract and the reference, where they are not the one named after the op.
_CONTRACTS = {"attention": ("attention", "attention_grid", "attention_inputs", "attention_places")}
# The files in kernels/ that the launchers import by name, at the first launch, where they are not named after
# the op.
_KERNELS = {
    "attention": ("attention", "attention_backward"),
    "linear": ("linear", "linear_backward"),
    "linear_cross_entropy": ("cross_entropy",),
}


def _checks(op: str, package: Path) -> list[Path]:
    """The contract, the reference, and what checks the kernel."""
    names = ("error_rule", "speed", "device_time", f"op_cases/{op}")
    files = [package / "testing" / f"{name}.py" for name in names]
    return files + [package / "ops" / f"{name}.py" for name in _CONTRACTS.get(op, (op,))]


def _kernel(op: str, backend: str, package: Path) -> list[Path]:
    """The files of the kernel and its launcher, as far as they are Python."""
    folder = package / "backends" / backend
    if backend == "triton":
        starts = [folder / f"{name}.py" for name in ("forwarders", op)]
        starts += [package / "kernels" / f"{name}.py" for name in _KERNELS.get(op, (op,))]
        return sorted(_with_imports(starts, package))
    names = "__init__", "device", op, *(("linear",) if op == "feed_forward" else ())
    return [folder / f"{name}.py" for name in names]


def _with_imports(starts: list[Path], package: Path) -> set[Path]:
    """The files and all that they import, directly or not, of the kernels and of the triton backend."""
    found: set[Path] = set()
    left = list(starts)
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        left += [package.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in _imports(path)]
    return found


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """What a file imports of the kernels and of the triton backend."""
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(
        name for name in names if name.startswith(("fastbert.kernels.", "fastbert.backends.triton."))
    )
