"""The backends' namespaces, `fastbert.backends.<name>`, and what each of them can run."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from fastbert.runtime.table import BACKENDS


class BackendError(RuntimeError):
    """A pinned backend cannot serve an op, or no backend can."""


def backend_module(name: str) -> ModuleType:
    """The namespace `fastbert.backends.<name>`. Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend: unknown name {name!r}; expected one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"fastbert.backends.{name}")


def has_backward(name: str, op: str) -> bool:
    """Whether backend `name` differentiates `op`."""
    return hasattr(backend_module(name), f"{op}_bwd")


def unsupported_reason(
    name: str, op: str, device: str, dtype: torch.dtype | None, function: str | None = None
) -> str | None:
    """Why backend `name` cannot run `op`, or None if it can.

    Args:
        name: the backend.
        op: the op.
        device: a device type, such as "cuda".
        dtype: the dtype that it must store; None = any.
        function: a launcher that it must have, such as "linear_bwd"; None = any.
    """
    module = backend_module(name)
    if op not in module.DTYPES:
        return "has no kernel for this op"
    if function is not None and not hasattr(module, function):
        return f"has no {function}"
    reason = module.available(device)
    if reason is not None:
        return reason
    if dtype is not None and dtype not in module.DTYPES[op]:
        return f"does not store {str(dtype).removeprefix('torch.')}"
    return None


def refuse_unsupported(pinned: str, op: str, device_type: str, dtype: torch.dtype, function: str) -> None:
    """Raise BackendError where the pinned backend cannot run the op."""
    reason = unsupported_reason(pinned, op, device_type, dtype, function)
    if reason is not None:
        others = [b for b in BACKENDS if unsupported_reason(b, op, device_type, dtype, function) is None]
        raise BackendError(
            f"use_backend({pinned!r}): op {op!r} cannot run on {device_type} in "
            f"{str(dtype).removeprefix('torch.')}: {reason}; "
            f"alternatives: {', '.join(others) or 'none'}"
        )
