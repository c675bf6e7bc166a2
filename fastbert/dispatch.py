"""Which backend serves which op.

One literal table, `device -> op -> backends, best first`. `reference` closes every list. A backend that is
not installed, does not run on the device or does not store the dtype is passed over; `explain()` says why.

A hand-written GPU kernel (`triton`, `cuda`) serves only after a self-check on the user's own device: a few
tiny `testing.Case`s of its op against the reference, once per process, op, dtype and device. A failure drops
the backend for that op with one warning. `use_backend` pins a backend and skips the check; a pinned gap
raises.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

OPS = ("attention", "cross_entropy", "embedding", "layer_norm", "linear", "linear_int8", "padding")
INFERENCE_ONLY = ("linear_int8",)  # ops without a backward

# Order within a line is by measurement, or by count of bytes where no results row exists yet (see README).
# `cuda` (CUDA C++) is absent until a row in bench/results proves it on a device of that compute capability.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "attention": ("cpu", "aten", "reference"),
        "cross_entropy": ("cpu", "aten", "reference"),
        "embedding": ("cpu", "aten", "reference"),
        "layer_norm": ("cpu", "aten", "reference"),
        "linear": ("cpu", "aten", "reference"),
        "linear_int8": ("cpu", "aten", "reference"),
        "padding": ("cpu", "aten", "reference"),
    },
    "cuda": {
        "attention": ("aten", "reference"),
        "cross_entropy": ("aten", "reference"),
        "embedding": ("aten", "reference"),
        "layer_norm": ("triton", "aten", "reference"),  # one pass over z instead of three: count of bytes
        "linear": ("aten", "reference"),
        "linear_int8": ("aten", "reference"),
        "padding": ("aten", "reference"),
    },
}
BACKENDS = ("reference", "aten", "cpu", "triton", "cuda")
SELF_CHECKED = ("triton", "cuda")


class BackendError(RuntimeError):
    """A pinned backend cannot serve an op, or no backend can."""


@dataclass(frozen=True)
class Choice:
    """One line of `explain()`: the backend that serves `op` for `dtype` on `device`, and why no other."""

    op: str
    device: str
    dtype: str
    backend: str
    why: str


_pins: dict[
    str, str
] = {}  # op -> backend; process-wide, because autograd runs backward in threads of its own
_resolved: dict[tuple[str, torch.device, torch.dtype], Callable | None] = {}
_UNKNOWN = object()
_verdicts: dict[tuple[str, str, str, int | None, torch.dtype], str | None] = {}
_lock = threading.RLock()


def backend_module(name: str) -> ModuleType:
    """The namespace `fastbert.backends.<name>`. Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend: unknown name {name!r}; expected one of {', '.join(BACKENDS)}")
    return importlib.import_module(f"fastbert.backends.{name}")


def backends_for(op: str, device: str) -> tuple[str, ...]:
    """All backends that have `op`, whether or not the table serves them on `device`."""
    return tuple(name for name in BACKENDS if gap(name, op, device, None) is None)


def has_backward(name: str, op: str) -> bool:
    """Whether backend `name` differentiates `op`; `pack` and `unpack` are each other's backward."""
    return op == "padding" or hasattr(backend_module(name), f"{op}_bwd")


def gap(
    name: str, op: str, device: str, dtype: torch.dtype | None, function: str | None = None
) -> str | None:
    """Why backend `name` cannot run `op` on `device` for `dtype` (None = any); None if it can."""
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


def call(function: str, key: torch.Tensor, *args):
    """Run `<op>_fwd` / `<op>_bwd` on the backend that serves `key`'s device and dtype.

    Args:
        function: name in the backend's namespace, such as "layer_norm_fwd".
        key: the tensor whose device and dtype choose the backend.
        args: the contract's arguments, passed on as they are.
    """
    device = key.device
    launch = _resolved.get((function, device, key.dtype))
    if launch is None:
        launch = _resolve(function, device, key.dtype)
    if torch.is_autocast_enabled(device.type):  # the op has cast already; kernels must not be cast again
        with torch.autocast(device.type, enabled=False):
            return launch(*args)
    return launch(*args)


def _op_of(function: str) -> str:
    return {"pack": "padding", "unpack": "padding"}.get(
        function.rsplit("_", 1)[0], function.rsplit("_", 1)[0]
    )


def optional(function: str, device: torch.device, dtype: torch.dtype) -> Callable | None:
    """`function` (such as "linear_int8_pack") of the backend that now serves its op's forward.

    None where that backend has no such function.
    """
    key = (function, device, dtype)
    found = _resolved.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        with _lock:
            name, cacheable = _choose(f"{_op_of(function)}_fwd", device, dtype)
            found = getattr(backend_module(name), function, None)
            if cacheable:
                _resolved[key] = found
    return found


def _resolve(function: str, device: torch.device, dtype: torch.dtype) -> Callable:
    with _lock:
        name, cacheable = _choose(function, device, dtype)
        launch = getattr(backend_module(name), function)
        if cacheable:
            _resolved[(function, device, dtype)] = launch
        return launch


def _choose(function: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """(the backend that is pinned or serves, whether that will stay so)."""
    op = _op_of(function)
    pinned = _pins.get(op) or _pins.get("*")
    if pinned is None:
        return _first_proven(function, op, device, dtype)
    reason = gap(pinned, op, device.type, dtype, function)
    if reason is not None:
        others = [b for b in BACKENDS if gap(b, op, device.type, dtype, function) is None]
        raise BackendError(
            f"use_backend({pinned!r}): op {op!r} cannot run on {device.type} in "
            f"{str(dtype).removeprefix('torch.')}: {reason}; "
            f"alternatives: {', '.join(others) or 'none'}"
        )
    return pinned, True


def _first_proven(function: str, op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    cacheable = True
    for name in TABLE.get(device.type, {}).get(op, ("aten", "reference")):
        if gap(name, op, device.type, dtype, function) is not None:
            continue
        if name in SELF_CHECKED:
            key = (name, op, device.type, device.index, dtype)
            if key not in _verdicts and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                cacheable = False  # a check cannot run inside a capture: this call takes the next backend
                continue
            if _verdict(key, device) is not None:
                continue
        return name, cacheable
    raise BackendError(f"no backend serves op {op!r} on {device.type} in {str(dtype).removeprefix('torch.')}")


def _verdict(key: tuple, device: torch.device) -> str | None:
    """None if the backend passed its self-check on this device, else what went wrong. Runs the check once."""
    if key not in _verdicts:
        from fastbert import testing

        name, op, _, _, dtype = key
        _verdicts[key] = testing.self_check(op, name, device, dtype)
        if _verdicts[key] is not None:
            warnings.warn(
                f"fastbert: the {name} kernel of {op!r} failed its self-check on {device} in "
                f"{str(dtype).removeprefix('torch.')} and will not serve there: {_verdicts[key]}",
                RuntimeWarning,
                stacklevel=4,
            )
    return _verdicts[key]


@contextlib.contextmanager
def use_backend(name: str | None = None, /, **per_op: str) -> Iterator[None]:
    """Pin a backend for all ops, or for named ones, within a `with` block (process-wide, re-entrant).

    Args:
        name: backend for every op ("reference", "aten", "cpu", "triton", "cuda").
        per_op: backend for one op, such as `layer_norm="triton"`; stands before `name`.

    Raises:
        ValueError: unknown op or backend.
        BackendError: at the first call of an op that the pinned backend cannot serve.
    """
    wanted = dict(per_op)
    if name is not None:
        wanted["*"] = name
    for op, backend in wanted.items():
        if op != "*" and op not in OPS:
            raise ValueError(f"use_backend: unknown op {op!r}; expected one of {', '.join(OPS)}")
        if backend not in BACKENDS:
            raise ValueError(
                f"use_backend: unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}"
            )
    with _lock:
        before = dict(_pins)
        _pins.update(wanted)
        _resolved.clear()
    try:
        yield
    finally:
        with _lock:
            _pins.clear()
            _pins.update(before)
            _resolved.clear()


def explain(device: str | torch.device = "cpu") -> list[Choice]:
    """Which backend serves every op and dtype on `device` now, and why the better ones do not.

    Pins made by `use_backend` are not counted. GPU kernels that have not been checked yet are said to be
    unverified.
    """
    device = torch.device(device)
    rows = []
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            passed_over = []
            for name in TABLE.get(device.type, {}).get(op, ("aten", "reference")):
                reason = gap(name, op, device.type, dtype)
                key = (name, op, device.type, device.index, dtype)
                if reason is None and name in SELF_CHECKED:
                    if key not in _verdicts:
                        passed_over.append(f"{name}: to be self-checked at first use")
                        continue
                    reason = _verdicts[key]
                if reason is None:
                    break
                passed_over.append(f"{name}: {reason}")
            rows.append(
                Choice(
                    op,
                    device.type,
                    str(dtype).removeprefix("torch."),
                    name,
                    "; ".join(passed_over) or "first in the table",
                )
            )
    return rows
