"""The keys of a self-check's verdict: all that the verdict depends on.

On a user's disk (`key_of`) the source is that of the kernel, of what it imports and of its check. In the
shipped table (`proof_key_of`) it is that of the kernel alone, with what compiles it. For Triton's kernels
that is Triton's version and torch's major and minor; for CUDA's, nvcc's version and the architecture in the
extension. The extension knows the hash of the sources that it was built from.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

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
    """The dtype's name, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def key_of(unit: Unit, device: torch.device) -> Key:
    """All that a verdict depends on."""
    op, backend, dtype = unit
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


def proof_key_of(unit: Unit, device: torch.device) -> Key | None:
    """All that a shipped proof depends on; None where no proof counts, such as for a kernel with options."""
    op, backend, dtype = unit
    name, capability, _ = _device_facts(device)
    compilers = _compilers(backend, capability)
    if compilers is None or _options(op, backend):
        return None
    if op == "encoder_layers":  # whose products are those of PyTorch's cuBLASLt
        compilers |= {"torch": ".".join(torch.__version__.split(".")[:2])}
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
    # without code of its own the device runs another architecture's, or its driver compiles PTX
    found = [arch for arch in archs if arch.rstrip("af") == own]
    return {"nvcc": loader.extension.nvcc, "arch": ";".join(found or archs)}


def _options(op: str, backend: str) -> str:
    """The options that the user has set for the kernel."""
    exact = False
    # there may be no Triton
    with contextlib.suppress(ImportError):
        if backend == "triton":
            from fastbert.kernels.activation import EXACT_GELU as exact
        elif backend == "cuda":
            from fastbert.backends.cuda.linear import EXACT_GELU as exact
    return "exact gelu" if exact and op in ("encoder_layers", "feed_forward", "linear") else ""


def _tuned(op: str, backend: str, device_name: str, dtype: torch.dtype) -> str:
    """Hash of the configs in the device's table that the op's kernels use in that dtype; "" for none."""
    entries = None
    if backend == "triton":
        with contextlib.suppress(ImportError):
            from fastbert.kernels import tuning

            entries = tuning.entries(device_name, op, dtype)
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
    """Hash of the code of the kernel's files and of those they import; see `code`.

    For CUDA it has the hash of the sources that the extension was built from.
    """
    built = dict(part.split("=") for part in getattr(loader.extension, "cuda_sources", "").split(";") if part)
    # feed_forward's products are linear's
    family = {"feed_forward": "linear"}.get(op, op)
    more = built.get(family, "") if backend == "cuda" else ""
    return _hash(_kernel(op, backend, package), more, lambda text: code(text).encode())


def _hash(files: Iterable[Path], more: str = "", part: Callable[[bytes], bytes] = bytes) -> str:
    digest = hashlib.sha256(more.encode())
    for path in files:
        with contextlib.suppress(OSError):
            digest.update(f"{path.name}\0".encode() + part(path.read_bytes()) + b"\0")
    return digest.hexdigest()


def code(source: bytes) -> str:
    """What Python executes of a file, alike for every Python version.

    Comments, docstrings and unused imports are left out, and so are annotations. A decorated function keeps
    its annotations, because Triton reads them.
    """
    tree = ast.parse(source)
    body = _rendered([node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))])
    used = set(re.findall(r"id='(\w+)'", body))
    imports = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a for a in node.names if (a.asname or a.name.partition(".")[0]) in used]
            place = getattr(node, "module", None)
            imports += [f"{place}:{a.name}:{a.asname}" for a in names]
    return "\n".join([*sorted(imports), body])


def _is_text(node: object) -> bool:
    """Whether a statement is a docstring, or a text like one."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


_NO_CODE = {"annotation", "returns", "type_comment", "type_params", "ctx", "kind"}


def _rendered(node: object, annotated: bool = False) -> str:
    if isinstance(node, list):
        return f"[{', '.join(_rendered(each, annotated) for each in node if not _is_text(each))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        annotated = isinstance(node, ast.FunctionDef) and bool(node.decorator_list)
    kept = {k: v for k, v in fields.items() if v not in (None, []) and (annotated or k not in _NO_CODE)}
    kept.pop("ctx", None)
    inner = ", ".join(f"{name}={_rendered(value, annotated)}" for name, value in kept.items())
    return f"{type(node).__name__}({inner})"


# Where they are not named after the op: the files in ops/ that make the contract and the reference, and those
# in kernels/ that the launchers import by name, at the first launch.
_CONTRACTS = {
    "attention": (
        *("attention", "attention_grid", "attention_inputs", "attention_places", "attention_relative"),
    )
}
_KERNELS = {
    "attention": ("attention", "attention_backward"),
    "linear": ("linear", "linear_backward", "linear_gated"),
    "linear_cross_entropy": ("cross_entropy",),
    # more rows than its own kernels take are normalised by layer_norm's
    "linear_norm": ("linear_norm", "layer_norm"),
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
    others = {"encoder_layers": ("attention", "linear"), "feed_forward": ("linear",)}
    names = "__init__", "device", op, *others.get(op, ())
    return [folder / f"{name}.py" for name in names]


def _with_imports(starts: list[Path], package: Path) -> set[Path]:
    """The files and all that they import, directly or not, of the kernels and of the triton backend."""
    found: set[Path] = set()
    left = list(starts)
    while left:
        path = left.pop()
        if path not in found and path.is_file():
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
    rooms = "fastbert.kernels.", "fastbert.backends.triton."
    return tuple(name for name in names if name.startswith(rooms))
