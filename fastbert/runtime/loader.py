"""The compiled extension `fastbert._C`, loaded once, or the reason why it cannot be loaded.

Loading it starts no CUDA and needs no driver. It finds PyTorch's own OpenMP pool, so that our kernels run on
the same `torch.get_num_threads()` threads as PyTorch's ops (see csrc/cpu/parallel.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

# Where a tensor's storage begins. `data_ptr()` would ask PyTorch for memory to write to, and so remove the
# marks of prepared.py; this does not.
storage_address = getattr(torch._C, "_data_address", lambda t: t.untyped_storage().data_ptr())


def address(t: torch.Tensor) -> int:
    """The address of a tensor's first element, for reading only."""
    return storage_address(t) + t.storage_offset() * t.itemsize


def _functions(*names: str) -> dict[str, int]:
    """Addresses of functions of libtorch_cpu and its libraries, up to the first function that is missing."""
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
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
)
# Argument of `set_write_functions` -> PyTorch's C++ function, as its compiler names it
_WRITE_FUNCTIONS = {
    "version_counter": "_ZN5torch8autograd4impl15version_counterERKN2at6TensorE",
    "has_simple_data_ptr": "_ZN3c104impl3cow19has_simple_data_ptrERKNS_11StorageImplE",
}
# c10::ScalarType
_DTYPE_CODES = {torch.uint8: 0, torch.int32: 3, torch.int64: 4, torch.float32: 6, torch.bool: 11}


def _tells_places(module: ModuleType) -> bool:
    tensor = torch.empty(20, device="cpu").as_strided((2, 3), (7, 2), 5)
    if module.TensorPlaces([tensor._cdata]).places() != [address(tensor), 2, 2, 3, 7, 2]:
        return False
    made = {dtype: torch.empty(1, dtype=dtype, device="cpu") for dtype in _DTYPE_CODES}
    return all(module.tensor_codes(made[d]._cdata) == (code, 0) for d, code in _DTYPE_CODES.items())


def _tells_writes(module: ModuleType) -> bool:
    tensor = torch.zeros(2, device="cpu")
    storage = tensor.untyped_storage()._cdata

    def state() -> tuple[int, bool] | None:
        return module.tensor_write_state(tensor._cdata, storage)

    with torch.inference_mode(False), torch.no_grad():
        found = [state()]
        for _ in range(2):
            tensor.add_(1)
            tensor._lazy_clone()
            found.append(state())
        tensor.data_ptr()
        found.append(state())
    return found == [(0, False), (1, True), (2, True), (2, False)]


def _hand_over_tensor_functions(module: ModuleType) -> None:
    """Give the extension what csrc/cpu/tensor_places.h needs, if this PyTorch has it and it works."""
    none = dict.fromkeys(_TENSOR_FUNCTIONS, 0)
    module.set_tensor_functions(**(none | _functions(*_TENSOR_FUNCTIONS)))
    if not _tells_places(module):
        module.set_tensor_functions(**none)
    found = _functions(*_WRITE_FUNCTIONS.values())
    module.set_write_functions(**{name: found.get(symbol, 0) for name, symbol in _WRITE_FUNCTIONS.items()})
    try:
        works = _tells_writes(module)
    except (AttributeError, RuntimeError):  # this PyTorch cannot mark storages
        works = False
    if not works:
        module.set_write_functions(**dict.fromkeys(_WRITE_FUNCTIONS, 0))


def _load() -> tuple[ModuleType | None, str | None]:
    try:
        extension = importlib.import_module("fastbert._C")
    except ImportError as error:
        if any(Path(__file__).parents[1].glob("_C*.so")):
            return None, f"the compiled extension fastbert._C does not load: {error}"
        return None, "the compiled extension fastbert._C is not built (pip install -e . builds it)"
    extension.set_team_start(**_runtime())
    _hand_over_tensor_functions(extension)
    return extension, None


# The extension module or None, and why it is None. Not declared optional: each caller asks `cpu_gap` or
# `cuda_gap` before it uses the module.
extension: Any
missing: str | None
extension, missing = _load()

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
