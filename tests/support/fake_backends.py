"""Backends that tests of dispatch plant in the place of a GPU's."""

from __future__ import annotations

import types

import torch

from fastbert.backends import aten
from fastbert.ops.layer_norm import layer_norm
from fastbert.runtime import dispatch, namespaces
from fastbert.runtime.table import TABLE
from fastbert.testing import proving, verdicts

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def fake_backend(monkeypatch, name="triton", **functions):
    """A module in the place of GPU backend `name`, first in the CPU's table for layer_norm."""
    module = types.ModuleType(f"fastbert.backends.{name}")
    module.DTYPES = {"layer_norm": FLOATS}
    module.available = lambda device_type: None
    module.layer_norm_fwd, module.layer_norm_bwd = aten.layer_norm_fwd, aten.layer_norm_bwd
    for key, value in functions.items():
        setattr(module, key, value)
    real = dispatch.backend_module
    for where in (dispatch, namespaces):
        monkeypatch.setattr(where, "backend_module", lambda n: module if n == name else real(n))
    monkeypatch.setitem(TABLE["cpu"], "layer_norm", (name, "aten", "reference"))
    dispatch._resolved.clear()
    return module


def run(dtype=torch.float32):
    return layer_norm(torch.ones(2, 16, dtype=dtype), torch.ones(16, dtype=dtype))


def next_process():
    """Forget everything that a new process would not know: only the disk counts."""
    verdicts.found.clear()
    proving._alone.clear()
    dispatch._resolved.clear()
