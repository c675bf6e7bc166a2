"""Which backend serves which op.

One literal table, `device -> op -> backends, best first`. `reference` closes every list. A backend that is
not installed, does not run on the device or does not store the dtype is passed over; `explain()` says why.

A hand-written GPU kernel (`triton`, `cuda`) serves only after a self-check on the user's own device: a few
tiny `testing.Case`s of its op against the reference, at the first use of op and dtype. The verdict is kept on
disk (`verdicts.py`); during the capture of a CUDA graph only verdicts that are there count. A failure drops
the backend for that op with one warning. `use_backend` pins a backend and skips the check; a pinned gap
raises.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

OPS = (
    "attention", "cross_entropy", "embedding", "layer_norm", "linear", "linear_cross_entropy", "linear_int8",
    "padding", "pooling",
)  # fmt: skip
INFERENCE_ONLY = ("linear_int8",)  # ops without a backward

HALF = (torch.bfloat16, torch.float16)

# Order within a line is by measurement, or by count of bytes where no results row exists yet (see README).
# `cuda` (CUDA C++) is absent until a row in bench/results proves it on a device of that compute capability.
# A line may stand for a part of an op's calls: "linear activation" for those with an activation, "linear
# half" for those in half precision, "linear activation half". The narrowest line counts.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "attention": ("cpu", "aten", "reference"),
        "cross_entropy": ("cpu", "aten", "reference"),
        "embedding": ("cpu", "aten", "reference"),
        "layer_norm": ("cpu", "aten", "reference"),
        "linear": ("cpu", "aten", "reference"),
        "linear_cross_entropy": ("cpu", "aten", "reference"),
        "linear_int8": ("cpu", "aten", "reference"),
        "padding": ("cpu", "aten", "reference"),
        "pooling": ("aten", "reference"),
    },
    # All of "cuda" is by count of bytes: bench/results has no row of a GPU yet.
    "cuda": {
        # No padded copies of q, k, v; no scores in memory. A token and head of 64, of 512, in half precision:
        # backward moves 1.6 kB, aten's 16 kB for the scores and their three like in float32 alone.
        "attention": ("triton", "aten", "reference"),
        # Reads the labelled logits once, and once more in backward; aten copies all rows in float32 first.
        "cross_entropy": ("triton", "aten", "reference"),
        # One pass; aten writes and reads three float32 sums. Backward writes a table's gradient once; aten
        # fills it with zeros, adds to it in float32 and casts it.
        "embedding": ("triton", "aten", "reference"),
        "layer_norm": ("triton", "aten", "reference"),  # one pass over z instead of three
        "linear": ("aten", "reference"),  # cuBLAS moves no byte more
        # The activation moves once, not three times; in backward its gradient is read once less, for the
        # bias. In float32 that is little beside the products themselves.
        "linear activation half": ("triton", "aten", "reference"),
        "linear_cross_entropy": ("triton", "aten", "reference"),  # cuBLAS's products, cross_entropy's kernels
        "linear_int8": ("aten", "reference"),
        "padding": ("triton", "aten", "reference"),  # unpack writes a row once, aten zeros first; pack: equal
        # Reads the tokens once; aten writes them in float32 first, and their gradients too.
        "pooling": ("triton", "aten", "reference"),
    },
}
BACKENDS = ("reference", "aten", "cpu", "triton", "cuda")
SELF_CHECKED = ("triton", "cuda")
_PROVER = "fastbert.testing.proving"  # loaded by name, like a backend: dispatch knows neither


class BackendError(RuntimeError):
    """A pinned backend cannot serve an op, or no backend can."""


_pins: dict[
    str, str
] = {}  # op -> backend; process-wide, because autograd runs backward in threads of its own
_resolved: dict[tuple, Callable | None] = {}
_UNKNOWN = object()
_TensorBase = torch._C.TensorBase  # of torch.Tensor, whose own isinstance takes ten times as long
_changes = 0  # of the pins; what was chosen before one is not kept after it
_trials = 0  # self-checks under way; meanwhile nothing is kept in `_resolved`
_trial = threading.local()  # .pins: as `_pins`, for the thread that runs a self-check
_lock = threading.RLock()  # guards the four above; never held while a kernel runs


def plain(t: torch.Tensor) -> torch.Tensor:
    """`t` with its values in memory, where kernels read them: a negative bit (`x.conj().imag`) is resolved,
    and a tensor that is zero without memory (`torch._efficientzerotensor`) becomes one of zeros.
    """
    if t.is_neg():
        return t.resolve_neg()
    return t.clone() if t._is_zerotensor() else t


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
    tensors = [a for a in args if isinstance(a, _TensorBase)]
    if any(map(_TensorBase.is_neg, tensors)) or any(map(_TensorBase._is_zerotensor, tensors)):
        args = [plain(a) if isinstance(a, torch.Tensor) else a for a in args]
    device = key.device
    launch = _resolved.get((function, device, key.dtype))
    if launch is None:
        launch = _resolve(function, device, key.dtype)
    if torch.is_autocast_enabled(device.type):  # the op has cast already; kernels must not be cast again
        with torch.autocast(device.type, enabled=False):
            return launch(*args)
    return launch(*args)


def _op_of(function: str) -> str:
    op = function.partition(" ")[0].rsplit("_", 1)[0]
    return "padding" if op in ("pack", "unpack") else op


def line(function: str, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The table's narrowest line for calls of `function`, such as "linear_fwd" or "linear_fwd activation"."""
    op, part = _op_of(function), function.partition(" ")[2]
    lines = TABLE.get(device_type, {})
    half = " half" if dtype in HALF else ""
    for name in (f"{op} {part}{half}", f"{op} {part}", f"{op}{half}", op):
        if name in lines:
            return lines[name]
    return ("aten", "reference")


def parts(op: str, device_type: str) -> tuple[str, ...]:
    """What of the op's calls has a line of its own: "" for all, and such as "activation"."""
    named = [name.split()[1:] for name in TABLE.get(device_type, {}) if name.split()[0] == op]
    return "", *sorted({words[0] for words in named if words and words[0] != "half"})


def optional(function: str, device: torch.device, dtype: torch.dtype) -> Callable | None:
    """`function` (such as "linear_int8_pack") of the backend that now serves its op's forward.

    None where that backend has no such function.
    """
    found = _resolved.get((function, device, dtype), _UNKNOWN)
    if found is _UNKNOWN:
        found = _choose(function, f"{_op_of(function)}_fwd", device, dtype)
    return found


def fused(function: str, ops: tuple[str, ...], device: torch.device, dtype: torch.dtype) -> Callable | None:
    """`function` of the backend that now serves the forward of every one of `ops`.

    None where several backends share them, or the one has no such function.
    """
    key = (function, ops, device, dtype)
    found = _resolved.get(key, _UNKNOWN)
    if found is _UNKNOWN:
        changes = _changes
        chosen = [_serving(f"{op}_fwd", device, dtype) for op in ops]
        names = {name for name, _ in chosen}
        found = getattr(backend_module(names.pop()), function, None) if len(names) == 1 else None
        _keep(key, found, changes, all(cacheable for _, cacheable in chosen))
    return found


def _resolve(function: str, device: torch.device, dtype: torch.dtype) -> Callable:
    launch = _choose(function, function, device, dtype)
    assert launch is not None  # a backend without the function was passed over
    return launch


def _choose(function: str, serving: str, device: torch.device, dtype: torch.dtype) -> Callable | None:
    """`function` of the backend that is pinned for `serving`, or serves it; None where it has none.

    Kept for the calls to come, unless that will not stay so.
    """
    changes = _changes
    name, cacheable = _serving(serving, device, dtype)
    found = getattr(backend_module(name), function.partition(" ")[0], None)
    _keep((function, device, dtype), found, changes, cacheable)
    return found


def _serving(function: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """(the backend that is pinned for `function` or serves it, whether that will stay so)."""
    op = _op_of(function)
    trial = getattr(_trial, "pins", {}).get(op)
    pinned = trial or _pins.get(op) or _pins.get("*")
    if pinned is None:
        return _first_proven(function, op, device, dtype)
    _refuse_gap(pinned, op, device.type, dtype, function.partition(" ")[0])
    return pinned, True


def _keep(key: tuple, found: Callable | None, changes: int, cacheable: bool) -> None:
    """Remember what was chosen when the pins had changed `changes` times, if it will stay so."""
    with _lock:
        if cacheable and _trials == 0 and changes == _changes:
            _resolved[key] = found


def _refuse_gap(pinned: str, op: str, device_type: str, dtype: torch.dtype, function: str) -> None:
    reason = gap(pinned, op, device_type, dtype, function)
    if reason is not None:
        others = [b for b in BACKENDS if gap(b, op, device_type, dtype, function) is None]
        raise BackendError(
            f"use_backend({pinned!r}): op {op!r} cannot run on {device_type} in "
            f"{str(dtype).removeprefix('torch.')}: {reason}; "
            f"alternatives: {', '.join(others) or 'none'}"
        )


def _first_proven(function: str, op: str, device: torch.device, dtype: torch.dtype) -> tuple[str, bool]:
    """(the first backend of the line that can serve, whether that will stay so)."""
    cacheable = True
    for name in line(function, device.type, dtype):
        if gap(name, op, device.type, dtype, function.partition(" ")[0]) is not None:
            continue
        if name in SELF_CHECKED:
            proven = importlib.import_module(_PROVER).is_proven(name, op, device, dtype)
            if proven is None:
                # not to be known now: this call takes the next backend
                cacheable = False
            if not proven:
                continue
        return name, cacheable
    raise BackendError(f"no backend serves op {op!r} on {device.type} in {str(dtype).removeprefix('torch.')}")


def in_trial() -> bool:
    """Whether this thread runs a self-check."""
    return hasattr(_trial, "pins")


@contextlib.contextmanager
def trial(**per_op: str) -> Iterator[None]:
    """Pin backends in this thread alone, for a self-check; other threads go on as the table says.

    Backward runs in this thread too. There is no check of other kernels within.
    """
    global _trials
    with _lock:
        _trials += 1
        _resolved.clear()  # and it stays empty: every call looks for its own thread's pins
    before = getattr(_trial, "pins", None)
    _trial.pins = {**(before or {}), **per_op}
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        if before is None:
            del _trial.pins
        else:
            _trial.pins = before
        with _lock:
            _trials -= 1


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
