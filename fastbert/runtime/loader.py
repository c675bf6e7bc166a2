"""The compiled extension `fastbert._C`, loaded once; or the reason why it cannot be loaded.

Loading it starts no CUDA and needs no driver. It finds PyTorch's own OpenMP pool, so that our kernels run on
the same `torch.get_num_threads()` threads as PyTorch's ops (see csrc/cpu/parallel.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from types import ModuleType

import torch

# Where a tensor's storage begins. `data_ptr()` would ask PyTorch for memory to write to, and so remove the
# marks of prepared.py; this does not.
storage_address = getattr(torch._C, "_data_address", lambda t: t.untyped_storage().data_ptr())


def address(t: torch.Tensor) -> int:
    """The address of a tensor's first element, for reading only."""
    return storage_address(t) + t.storage_offset() * t.itemsize


def _functions(*names: str) -> dict[str, int]:
    """Addresses of functions of libtorch_cpu and of the libraries that it is linked to, up to the first that
    is missing.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    found = dict.fromkeys(names[:1], 0)
    with contextlib.suppress(OSError, AttributeError):
        loaded = ctypes.CDLL(str(library))  # torch has loaded it: this returns its handle
        for name in names:
            found[name] = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0
    return found


def _runtime() -> dict[str, int]:
    """Addresses of the functions of PyTorch's OpenMP runtime that csrc/cpu/parallel.h needs."""
    found = _functions("GOMP_parallel", "GOMP_parallel_start", "GOMP_parallel_end", "omp_get_num_threads")
    return {name.lower(): address for name, address in found.items()}


_TENSOR_FUNCTIONS = (
    "torch_get_const_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
)


def _hand_over_tensor_functions(module: ModuleType) -> None:
    """Give the extension what csrc/cpu/tensor_places.h needs, if this PyTorch has it and it works."""
    found = _functions(*_TENSOR_FUNCTIONS)
    none = dict.fromkeys(_TENSOR_FUNCTIONS, 0)
    module.set_tensor_functions(**(none | found))
    tensor = torch.empty(20, device="cpu").as_strided((2, 3), (7, 2), 5)
    places = module.TensorPlaces([tensor._cdata]).places()
    if places != [address(tensor), 2, 2, 3, 7, 2]:
        module.set_tensor_functions(**none)


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from fastbert import _C
    except ImportError as error:
        if any(Path(__file__).parents[1].glob("_C*.so")):
            return None, f"the compiled extension fastbert._C does not load: {error}"
        return None, "the compiled extension fastbert._C is not built (pip install -e . builds it)"
    _C.set_team_start(**_runtime())
    _hand_over_tensor_functions(_C)
    return _C, None


extension, missing = _load()
"""The extension module or None, and why it is None."""

_isa_error: str | None = None
if extension is not None and os.environ.get("FASTBERT_ISA"):
    try:
        extension.set_cpu_isa(os.environ["FASTBERT_ISA"])
    except ValueError as error:
        extension.set_cpu_isa("none")
        _isa_error = str(error)


def cpu_gap() -> str | None:
    """Why the C++ CPU kernels cannot run, or None."""
    if extension is None:
        return missing
    if extension.cpu_isa() != "none":
        return None
    if _isa_error is not None:
        return _isa_error
    if extension.best_cpu_isa() == "none":
        return "this processor has no AVX2 with FMA and F16C"
    return "switched off by FASTBERT_ISA=none"


def cuda_gap() -> str | None:
    """Why the CUDA C++ kernels cannot run, or None."""
    if extension is None:
        return missing
    if not extension.cuda_archs:
        return "fastbert._C was built without CUDA (FASTBERT_CUDA=1 pip install -e . builds it; needs nvcc)"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False: no CUDA device, no driver, or a PyTorch without CUDA"
    return None
