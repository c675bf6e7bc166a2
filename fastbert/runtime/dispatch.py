"""Which backend serves which op.

One literal table, `device -> op -> backends, best first`. `reference` closes every list. A backend is passed
over where it is not installed, does not run on the device or does not store the dtype; `explain()` says why.

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

OPS = (
    "attention",
    "attention_received",
    "cross_entropy",
    "embedding",
    "encoder_layers",
    "feed_forward",
    "first_attention",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_fp8",
    "linear_int8",
    "linear_norm",
    "packing",
    "pooling",
    "rotary",
)
# Ops without a backward.
INFERENCE_ONLY = (
    "attention_received",
    "encoder_layers",
    "first_attention",
    "linear_fp8",
    "linear_int8",
    "linear_norm",
)

HALF = (torch.bfloat16, torch.float16)

# A ranking is ordered by measurement, or by a count of bytes where bench/results has no row yet (see README).
# `cuda` (CUDA C++) comes first where it has a kernel: a self-check times it beside the next backend, so that
# it serves only on the devices where it is not slower. A key may name one kind of call: "linear activation"
# is for calls with an activation, "linear half" for calls in half precision, "linear activation half" for
# both. The most specific key counts. "attention training" is for calls that save for backward, and for their
# backward; "linear activation few" and "… some" for calls of inference with at most the rows that `ROWS`
# says. With such a key a self-check judges these calls apart: training by forward and backward together, few
# rows by forward of few rows. Other kernels are judged by all their times together. A kernel whose forward is
# faster may have a slower backward, and a kernel that is faster for many rows may be slower for few.
# "attention relative" is for calls with scores of distances, where the backend reads these itself.
TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        "attention": ("cpu", "aten", "reference"),
        "attention_received": ("cpu", "aten", "reference"),
        "cross_entropy": ("cpu", "aten", "reference"),
        "embedding": ("cpu", "aten", "reference"),
        # No model calls it on a CPU, where a layer is one call (ops/encoder_layer.py).
        "encoder_layers": ("aten", "reference"),
        "feed_forward": ("cpu", "aten", "reference"),
        "first_attention": ("aten", "reference"),
        "layer_norm": ("cpu", "aten", "reference"),
        "linear": ("cpu", "aten", "reference"),
        "linear_cross_entropy": ("cpu", "aten", "reference"),
        "linear_distillation": ("cpu", "aten", "reference"),
        # No model calls it on a CPU.
        "linear_fp8": ("aten", "reference"),
        "linear_int8": ("cpu", "aten", "reference"),
        # No model calls it on a CPU, where a launch costs nothing.
        "linear_norm": ("aten", "reference"),
        "packing": ("cpu", "aten", "reference"),
        "pooling": ("aten", "reference"),
        "rotary": ("cpu", "aten", "reference"),
    },
    # All of "cuda" was ranked by a count of bytes, before bench/results had a row of a GPU. What serves is
    # what a device's own self-checks find: on an H100 most as ranked, but LayerNorm's forward by `triton` (24
    # us for 16,384 x 768 in a forward of BERT-base, `cuda` 34).
    "cuda": {
        # No padded copies of q, k, v and no scores in memory. In half precision at length 512 and headdim 64,
        # backward moves 1.6 kB per token and head; aten moves 16 kB for the float32 scores and the three
        # tensors like them.
        "attention": ("cuda", "triton", "aten", "reference"),
        # The same passes without a compiler at run time, and a launch that costs the host less. In float32
        # `cuda` has no backward.
        "attention half": ("cuda", "triton", "aten", "reference"),
        # Scores of distances: 4 bytes per pair of tokens and head; as a dense bias they are 76, most of them
        # of the passes that make it (kernels/attention_relative.py). Without `triton` they are one.
        "attention relative": ("triton", "aten", "reference"),
        "attention training": ("triton", "aten", "reference"),
        "attention training half": ("cuda", "triton", "aten", "reference"),
        # No float32 copies and no scores in memory. In half precision at length 512 and headdim 64, it reads
        # 256 bytes per token and head; aten writes and reads 512 of copies and 2 kB of scores several times.
        "attention_received": ("triton", "aten", "reference"),
        # Reads the labelled logits once, and once more in backward; aten copies all rows in float32 first.
        "cross_entropy": ("triton", "aten", "reference"),
        # One pass; aten writes and reads three float32 sums. Backward writes a table's gradient once; aten
        # fills it with zeros, adds to it in float32 and casts it.
        "embedding": ("triton", "aten", "reference"),
        # The same kernels and cuBLAS's products, without the host's time for each.
        "encoder_layers": ("cuda", "aten", "reference"),
        # Two calls of `linear`, which is what models do in float32.
        "feed_forward": ("aten", "reference"),
        # The gradient between the two products is neither written nor read.
        "feed_forward half": ("cuda", "triton", "aten", "reference"),
        "feed_forward training half": ("cuda", "triton", "aten", "reference"),
        "first_attention": ("aten", "reference"),
        # No keys and values: for 32 x 512 tokens of BERT-base 1.3 GFLOP and 34 MB instead of the 64 GFLOP and
        # 279 MB of all rows (kernels/NOTES.md, "First tokens").
        "first_attention half": ("triton", "aten", "reference"),
        # One pass over z instead of three.
        "layer_norm": ("cuda", "triton", "aten", "reference"),
        "layer_norm training": ("cuda", "triton", "aten", "reference"),
        # cuBLAS moves not one byte more.
        "linear": ("aten", "reference"),
        # The same products, and the bias's gradient by our pass: PyTorch sums that of query, key and value in
        # a step of BERT-base, 16,384 x 2,304, at 0.4 of an H200's bandwidth.
        "linear training half": ("cuda", "aten", "reference"),
        # The activation moves once, not three times; backward reads its gradient once less, for the bias. In
        # float32 that is little compared with the products themselves.
        "linear activation half": ("cuda", "triton", "aten", "reference"),
        "linear activation training half": ("cuda", "triton", "aten", "reference"),
        # Parts of the depth, so that all multiprocessors read the weight, and a second launch to add them.
        "linear activation few half": ("cuda", "triton", "aten", "reference"),
        "linear activation some half": ("cuda", "triton", "aten", "reference"),
        # The product's columns, twice as many as the result's, are not written and read in between. The loops
        # are those of plain activations; which of the two backends is faster has not been measured.
        "linear gated half": ("cuda", "triton", "aten", "reference"),
        # cuBLAS's products with cross_entropy's kernels.
        "linear_cross_entropy": ("triton", "aten", "reference"),
        "linear_distillation": ("aten", "reference"),
        # Rows are rounded in one pass: 3 bytes move per element, by `aten` 39.
        "linear_fp8": ("triton", "aten", "reference"),
        # Two launches; `aten` takes some twenty, and writes and reads the sums as int32 and float32.
        "linear_int8": ("triton", "aten", "reference"),
        # Two calls, which is what models do in float32.
        "linear_norm": ("aten", "reference"),
        # Up to 256 rows one launch instead of two, or of three where cuBLAS splits the depth; or two, in
        # which all multiprocessors share the depth. Per element of the product it moves 8 bytes, as float32
        # sums, and not 4, within the L2 cache: whether that pays depends on the rows. More rows are two
        # calls, of which the norm is one pass.
        "linear_norm half": ("triton", "aten", "reference"),
        "linear_norm few half": ("triton", "aten", "reference"),
        "linear_norm some half": ("triton", "aten", "reference"),
        # Backward, which is `unpack`, writes each row once, where aten writes zeros first; forward is equal.
        "packing": ("triton", "aten", "reference"),
        # Reads the tokens once; aten writes them in float32 first, and their gradients too.
        "pooling": ("triton", "aten", "reference"),
        # One pass; aten writes and reads four float32 products of half the size.
        "rotary": ("triton", "aten", "reference"),
    },
}
# Kinds of calls by their rows -> the most rows of each kind; calls with more rows have no such word.
ROWS = {"few": 32, "some": 256}
BACKENDS = ("reference", "aten", "cpu", "triton", "cuda")
SELF_CHECKED = ("triton", "cuda")
# The module whose `is_proven` says whether a kernel passed its self-check. It is loaded by name and at its
# first use, like a backend: dispatch depends on neither.
_PROVER = "fastbert.testing.proving"


class BackendError(RuntimeError):
    """A pinned backend cannot serve an op, or no backend can."""


# Op -> pinned backend, "*" for all ops. Process-wide, because autograd runs backward in threads of its own.
_pins: dict[str, str] = {}
# What was chosen: by `call`, `serving_function`, `serving_functions` and `device_function`.
_resolved: dict[tuple[Any, ...], Any] = {}
_UNKNOWN: Any = object()
# The base class of torch.Tensor: torch.Tensor's own isinstance takes ten times as long.
_TensorBase = torch._C.TensorBase
# Asking for one device's type takes four times as long
_any_autocast = torch._C._is_any_autocast_enabled
_is_neg, _is_zero = _TensorBase.is_neg, _TensorBase._is_zerotensor
# How often the pins have changed. A choice made before a change is not kept after it.
_changes = 0
# Self-checks under way. Meanwhile nothing is kept in `_resolved`.
_trials = 0
# For the thread that runs a self-check: `_trial.pins`, like `_pins`; `_trial.resolved`, like `_resolved`.
_trial = threading.local()
# Guards the pins, the choices and the two counts. Never held while a kernel runs.
_lock = threading.RLock()


def plain(t: torch.Tensor) -> torch.Tensor:
    """`t` with its values in memory, where kernels read them.

    A negative bit (`x.conj().imag`) is resolved, and a tensor that is zero without memory
    (`torch._efficientzerotensor`) becomes a tensor of zeros.
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
    return tuple(name for name in BACKENDS if unsupported_reason(name, op, device, None) is None)


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


def call(function: str, key: torch.Tensor, *args: Any) -> Any:
    """Run `<op>_fwd` or `<op>_bwd` on the backend that serves `key`'s device and dtype.

    Args:
        function: the launcher's name, such as "layer_norm_fwd"; a kind of call that the table knows follows
            behind a space, as in "linear_fwd activation" or "linear_bwd activation training".
        key: the tensor whose device and dtype choose the backend.
        args: the contract's arguments, passed on as they are; some ops pass several as one NamedTuple.
    """
    if _any_not_plain(args):
        args = tuple(map(_plain_argument, args))
    device = key.device
    launch = _resolved.get((function, device, key.dtype))
    if launch is None:
        launch = _resolve(function, device, key.dtype)
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


# Types of most arguments that are no tensors. They are looked up first, because `isinstance` of a tensor's
# class is slow.
_NUMBERS = frozenset((bool, float, int, str, type(None)))


def _any_not_plain(args: tuple[Any, ...]) -> bool:
    """Whether `plain` would change one of the tensors among `args`, or in their NamedTuples.

    NamedTuples hold no tuples. This runs at every call: a recursion, or a list of the tensors, takes longer.
    """
    for a in args:
        if type(a) in _NUMBERS:
            continue
        if isinstance(a, tuple):
            for b in a:
                if type(b) not in _NUMBERS and isinstance(b, _TensorBase) and (_is_neg(b) or _is_zero(b)):
                    return True
        elif isinstance(a, _TensorBase) and (_is_neg(a) or _is_zero(a)):
            return True
    return False


def _plain_argument(a: Any) -> Any:
    """`plain` of a tensor, and of the tensors of a NamedTuple."""
    if isinstance(a, torch.Tensor):
        return plain(a)
    return type(a)(*map(_plain_argument, a)) if isinstance(a, tuple) else a


def _op_of(function: str) -> str:
    """The op of "linear_fwd" or "linear_bwd activation": "linear"."""
    return function.partition(" ")[0].rsplit("_", 1)[0]


def ranking(function: str, device_type: str, dtype: torch.dtype) -> tuple[str, ...]:
    """The backends for calls of `function` ("linear_fwd", "linear_fwd activation"), best first."""
    op, words = _op_of(function), function.split(" ")[1:]
    rankings = TABLE.get(device_type, {})
    half = ("half",) if dtype in HALF else ()
    # a call in training, or with few rows, that has no line of its own is ranked as any other in inference
    for count in range(len(words), -1, -1):
        each = words[:count]
        for name in (" ".join((op, *each, *half)), " ".join((op, *each))):
            if name in rankings:
                return rankings[name]
    return ("aten", "reference")


def rows_kind(rows: int) -> str:
    """The word of `ROWS` for calls with so many rows, behind a space; "" for more rows than all of them."""
    for word, most in ROWS.items():
        if rows <= most:
            return f" {word}"
    return ""


def call_kinds(op: str, device_type: str) -> tuple[str, ...]:
    """The kinds of the op's calls that the table has apart: "" for all calls, then such as "activation"."""
    keys = [key.split()[1:] for key in TABLE.get(device_type, {}) if key.split()[0] == op]
    return "", *sorted({" ".join(word for word in words if word != "half") for words in keys} - {""})


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

    Args:
        functions: names in the backend's namespace, such as "encoder_layer_fwd".
        ops: the ops that the functions belong to; a kind of call follows behind a space, as in
            "attention training".
        device, dtype: the tensors' device and dtype.

    Returns:
        The functions; None where several backends serve the ops, or the one backend lacks a function.
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
        name, lasting = _first_proven(function, _op_of(function), device, dtype, without=backend)
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
    op = _op_of(function)
    trial = getattr(_trial, "pins", {}).get(op)
    pinned = trial or _pins.get(op) or _pins.get("*")
    if pinned is None:
        return _first_proven(function, op, device, dtype)
    _refuse_unsupported(pinned, op, device.type, dtype, function.partition(" ")[0])
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


def _refuse_unsupported(pinned: str, op: str, device_type: str, dtype: torch.dtype, function: str) -> None:
    """Raise BackendError where the pinned backend cannot run the op."""
    reason = unsupported_reason(pinned, op, device_type, dtype, function)
    if reason is not None:
        others = [b for b in BACKENDS if unsupported_reason(b, op, device_type, dtype, function) is None]
        raise BackendError(
            f"use_backend({pinned!r}): op {op!r} cannot run on {device_type} in "
            f"{str(dtype).removeprefix('torch.')}: {reason}; "
            f"alternatives: {', '.join(others) or 'none'}"
        )


def _first_proven(
    function: str, op: str, device: torch.device, dtype: torch.dtype, without: str | None = None
) -> tuple[str, bool]:
    """(the first backend of the ranking that can serve, whether that choice will last)."""
    lasting = True
    for name in ranking(function, device.type, dtype):
        if name == without:
            continue
        if unsupported_reason(name, op, device.type, dtype, function.partition(" ")[0]) is not None:
            continue
        if name in SELF_CHECKED:
            kind = function.partition(" ")[2]
            proven = importlib.import_module(_PROVER).is_proven(name, op, device, dtype, kind)
            if proven is None:
                # nothing can be known now: this call takes the next backend
                lasting = False
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
