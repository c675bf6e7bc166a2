"""Which backend serves a call, by the table in `table.py`.

A hand-written GPU kernel (`triton`, `cuda`) serves only where it is proven: by the shipped table of proofs,
or by a self-check on the user's own device, which `fastbert.testing.proving` runs at the first use of an op
and dtype and whose verdict it keeps. A failure drops the backend for that op with one warning. `use_backend`
pins a backend and skips the check; a pinned backend that cannot serve raises.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from fastbert.runtime.namespaces import BackendError, backend_module, refuse_unsupported, unsupported_reason
from fastbert.runtime.plain import any_not_plain, plain_argument
from fastbert.runtime.table import BACKENDS, OPS, SELF_CHECKED, op_of, ranking

# The module whose `is_proven` says whether a kernel passed its self-check. It is loaded by name and at its
# first use, like a backend: dispatch depends on neither.
_PROVER = "fastbert.testing.proving"

# Op -> pinned backend, "*" for all ops. Process-wide, because autograd runs backward in threads of its own.
_pins: dict[str, str] = {}
# What was chosen: by `call`, `serving_function`, `serving_functions` and `device_function`.
_resolved: dict[tuple[Any, ...], Any] = {}
_UNKNOWN: Any = object()
# Asking for one device's type takes four times as long
_any_autocast = torch._C._is_any_autocast_enabled
# How often the pins have changed. A choice made before a change is not kept after it.
_changes = 0
# Self-checks under way. Meanwhile nothing is kept in `_resolved`.
_trials = 0
# For the thread that runs a self-check: `_trial.pins`, like `_pins`; `_trial.resolved`, like `_resolved`.
_trial = threading.local()
# Guards the pins, the choices and the two counts. Never held while a kernel runs.
_lock = threading.RLock()


def call(function: str, key: torch.Tensor, *args: Any) -> Any:
    """Run `<op>_fwd` or `<op>_bwd` on the backend that serves `key`'s device and dtype.

    Args:
        function: the launcher's name, such as "layer_norm_fwd"; a kind of call that the table knows follows
            behind a space, as in "linear_fwd activation" or "linear_bwd activation training".
        key: the tensor whose device and dtype choose the backend.
        args: the contract's arguments, passed on as they are; some ops pass several as one NamedTuple.
    """
    if any_not_plain(args):
        args = tuple(map(plain_argument, args))
    device = key.device
    launch = _resolved.get((function, device, key.dtype)) or _resolve(function, device, key.dtype)
    if _any_autocast() and torch.is_autocast_enabled(device.type):
        # The op has cast its inputs already; kernels must not cast them again. The context manager that does
        # the same takes the host as long as a launch.
        torch.set_autocast_enabled(device.type, False)
        try:
            return launch(*args)
        finally:
            torch.set_autocast_enabled(device.type, True)
    return launch(*args)


def launcher(function: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """The launcher that `call` would run now. The caller keeps to plain tensors and has autocast off."""
    return _resolved.get((function, device, dtype)) or _resolve(function, device, dtype)


def serving_function(
    function: str, ops: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """The function where `serving_functions` is asked for one alone; None where it returns None."""
    key = (function, ops, device, dtype)
    found = _resolved.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        changes = _changes
        backend, lasting = _one_serving(ops, device, dtype)
        found = getattr(backend, function, None)
        _keep(key, found, changes, lasting)
    return found


def serving_functions(
    functions: tuple[str, ...], ops: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> tuple[Callable[..., Any], ...] | None:
    """Several functions of the one backend that now serves the forward of all `ops`, found by one look-up.

    None where several backends serve the ops, or the one backend lacks a function.

    Args:
        functions: names in the backend's namespace, such as "encoder_layer_fwd".
        ops: the ops that the functions belong to; a kind of call follows behind a space, as in
            "attention training".
        device, dtype: the tensors' device and dtype.
    """
    key = (functions, ops, device, dtype)
    found = _resolved.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        changes = _changes
        backend, lasting = _one_serving(ops, device, dtype)
        both: tuple[Any, ...] = tuple(getattr(backend, function, None) for function in functions)
        found = None if None in both else both
        _keep(key, found, changes, lasting)
    return found


def device_function(
    function: str, op: str, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """`function` of the first backend ranked for `op` that has it, whichever backend is pinned or serves.

    It is for facts of the device, such as how many rows are best at a time.

    Args:
        function: name in the backend's namespace, such as "sequence_blocks".
        op, device, dtype: choose the ranking.

    Returns:
        The function; None where no backend of the ranking has it.
    """
    key = (function, op, device.type, dtype)
    found = _resolved.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        changes = _changes
        backends = map(backend_module, ranking(f"{op}_fwd", device.type, dtype))
        found = next((getattr(b, function) for b in backends if hasattr(b, function)), None)
        _keep(key, found, changes, True)
    return found


def next_function(
    backend: str, function: str, device: torch.device, dtype: torch.dtype
) -> Callable[..., Any]:
    """The launcher that serves `function` where `backend` does not: for calls that its kernel cannot take.

    Args:
        backend: the backend to pass over.
        function: a launcher's name, such as "attention_fwd"; a kind of call follows behind a space.
        device, dtype: the tensors' device and dtype.

    Raises:
        BackendError: no other backend of the table can run it.
    """
    key = (function, backend, device, dtype)
    found = _resolved.get(key)
    if found is None:
        changes = _changes
        name, lasting = _first_proven(function, op_of(function), device, dtype, without=backend)
        found = getattr(backend_module(name), function.partition(" ")[0])
        _keep(key, found, changes, lasting)
    return found


def serving_backend(function: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend that is pinned for `function`, such as "attention_fwd", or serves it now.

    Raises:
        BackendError: the pinned backend cannot run it, or none can.
    """
    return _serving(function, device, dtype)[0]


def pins() -> tuple[tuple[str, str], ...]:
    """(op, backend) pairs that `use_backend` pins now, sorted; "*" means all ops."""
    return tuple(sorted(dict(_pins).items())) if _pins else ()


def _resolve(function: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    """The launcher of the backend that is pinned or serves, kept for later calls if the choice will last."""
    changes, key = _changes, (function, device, dtype)
    own = getattr(_trial, "resolved", {})
    if key in own:
        return own[key]
    name, lasting = _serving(function, device, dtype)
    launch = getattr(backend_module(name), function.partition(" ")[0])
    if in_trial() and lasting:
        own[key] = launch
    _keep(key, launch, changes, lasting)
    return launch


def _serving(function: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """(the backend that is pinned for `function` or serves it, whether that choice will last)."""
    op = op_of(function)
    pinned = getattr(_trial, "pins", {}).get(op) or _pins.get(op) or _pins.get("*")
    if pinned is None:
        return _first_proven(function, op, device, dtype)
    refuse_unsupported(pinned, op, device.type, dtype, function.partition(" ")[0])
    return pinned, True


def _one_serving(
    ops: tuple[str, ...], device: torch.device, dtype: torch.dtype
) -> tuple[ModuleType | None, bool]:
    """(the one backend that serves the forward of all `ops` or None, whether that choice will last)."""
    calls = (op.partition(" ") for op in ops)
    chosen = [_serving(f"{op}_fwd {kind}".rstrip(), device, dtype) for op, _, kind in calls]
    names = {name for name, _ in chosen}
    backend = backend_module(names.pop()) if len(names) == 1 else None
    return backend, all(lasting for _, lasting in chosen)


def _keep(key: tuple[Any, ...], found: Any, changes: int, lasting: bool) -> None:
    """Keep a choice that will last, unless the pins have changed since `changes` or a self-check runs."""
    with _lock:
        if lasting and _trials == 0 and changes == _changes:
            _resolved[key] = found


def _first_proven(
    function: str, op: str, device: torch.device, dtype: torch.dtype, without: str | None = None
) -> tuple[str, bool]:
    """(the first backend of the ranking that can serve, whether that choice will last)."""
    lasting = True
    for name in ranking(function, device.type, dtype):
        launch, _, kind = function.partition(" ")
        if name == without or unsupported_reason(name, op, device.type, dtype, launch) is not None:
            continue
        if name in SELF_CHECKED:
            proven = importlib.import_module(_PROVER).is_proven(name, op, device, dtype, kind)
            # None: nothing can be known now, and this call takes the next backend
            lasting = lasting and proven is not None
            if not proven:
                continue
        return name, lasting
    raise BackendError(f"no backend serves op {op!r} on {device.type} in {str(dtype).removeprefix('torch.')}")


def in_trial() -> bool:
    """Whether this thread runs a self-check."""
    return hasattr(_trial, "pins")


@contextlib.contextmanager
def trial(**per_op: str) -> Iterator[None]:
    """Pin backends in this thread alone, for a self-check; other threads use the table as before.

    Backward runs in this thread too. No other kernel is checked until the block ends.
    """
    global _trials
    with _lock:
        _trials += 1
        # it stays empty during the trial, so every call looks for its own thread's pins
        _resolved.clear()
    before = getattr(_trial, "pins", None)
    _trial.pins, _trial.resolved = {**(before or {}), **per_op}, {}
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        if before is None:
            del _trial.pins, _trial.resolved
        else:
            _trial.pins, _trial.resolved = before, {}
        with _lock:
            _trials -= 1


@contextlib.contextmanager
def use_backend(name: str | None = None, /, **per_op: str) -> Iterator[None]:
    """Pin a backend for all ops, or for named ones, within a `with` block (process-wide, re-entrant).

    Args:
        name: backend for every op ("reference", "aten", "cpu", "triton", "cuda").
        per_op: backend for one op, such as `layer_norm="triton"`; overrides `name`.

    Raises:
        ValueError: unknown op or backend.
        BackendError: at the first call of an op that the pinned backend cannot serve.
    """
    wanted = per_op if name is None else {**per_op, "*": name}
    for op, backend in wanted.items():
        if op != "*" and op not in OPS:
            raise ValueError(f"use_backend: unknown op {op!r}; expected one of {', '.join(OPS)}")
        if backend not in BACKENDS:
            raise ValueError(
                f"use_backend: unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}"
            )
    global _changes
    with _lock:
        before = dict(_pins)
        _pins.update(wanted)
        _changes += 1
        _resolved.clear()
    try:
        yield
    finally:
        with _lock:
            _pins.clear()
            _pins.update(before)
            _changes += 1
            _resolved.clear()
