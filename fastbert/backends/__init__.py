"""The implementations of the ops, one namespace per backend: `<op>_fwd` and `<op>_bwd` of each op it has.

May import `ops`, `runtime` and the Triton kernels of `kernels/`. `runtime.dispatch` chooses among them.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import FunctionType

import torch


def gather(backend: str) -> dict[str, tuple[torch.dtype, ...]]:
    """Put the functions of a backend's modules into its package; returns the dtypes of each op.

    A module named after an op has `DTYPES` and the op's launchers, of its own or made by another backend.
    """
    package, dtypes = sys.modules[f"fastbert.backends.{backend}"], {}
    for found in pkgutil.iter_modules(package.__path__):
        module, op = importlib.import_module(f"fastbert.backends.{backend}.{found.name}"), found.name
        for name, value in vars(module).items():
            own = isinstance(value, FunctionType) and value.__module__ == module.__name__
            if (own and not name.startswith("_")) or name in (f"{op}_fwd", f"{op}_bwd"):
                setattr(package, name, value)
        if hasattr(module, "DTYPES"):
            dtypes |= module.DTYPES if isinstance(module.DTYPES, dict) else {op: module.DTYPES}
    return dtypes
