"""The error rule: what "correct" means.

The same thing is computed (a) in float64 by the reference, (b) by plain eager PyTorch in the dtype under
test, (c) by the backend under test. Then
  - half precision: max error of (c) <= max error of (b) + one rounding step of the output; mean error <= 1.0
    x (b)'s, unless the errors vary so much that the difference of the means may be chance;
  - float32 and float64: max error of (c) <= max error of (b) + the case's conditioning floor;
and nothing is NaN or infinite where (a) is finite. Over few elements the bounds are a little wider
(`chance_allowance`).
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward
from fastbert.runtime.table import HALF

Outputs = Tensor | tuple[Tensor, ...]


def chance_allowance(elements: int) -> float:
    """The factor by which the errors of two equally good results may differ by chance.

    The spread of their ratio falls with the root of the count of elements: the factor is 1.01 at 65,536
    elements and 1.09 at 512. Without it a correct kernel fails a tiny self-check every other time.
    """
    return 1.005 + 2.0 / elements**0.5


class Case:
    """One op on one set of shapes and options. Subclasses live in `fastbert/testing/op_cases/<op>.py`.

    Attributes:
        op: the op's name.
        id: shape and options for test and bench ids, such as "8x512x768-residual".
        shape: the id without options, a format of the case.
        marks: the options that the id names where they are not at their default: "option=format of its
            value", or the option alone where its name is the mark.
        options: attributes that the op and its reference take beside the inputs, by the same names.
        grad_inputs: names of the inputs to differentiate.
        output_names: a name for each tensor that `call` returns.
        kind: the kind of call, where the dispatch table ranks it apart, such as "activation".
        ranked_rows: its rows, where the dispatch table may rank calls with few rows apart; else None.
        parts: the ops that models call where no kernel of this op serves; () where they call this one.
        counts_host: whether a kernel is judged by the longer of the device's time and the host's.
    """

    op: ClassVar[str]
    kind: str = ""
    ranked_rows: int | None = None
    parts: ClassVar[tuple[str, ...]] = ()
    counts_host: ClassVar[bool] = False
    shape: ClassVar[str]
    marks: ClassVar[str] = ""
    options: ClassVar[tuple[str, ...]] = ()
    grad_inputs: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ("y",)

    @property
    def id(self) -> str:
        """Such as "8x512x768-residual"."""
        parts = [self.shape.format(self)]
        for option, _, mark in (each.partition("=") for each in self.marks.split()):
            value = getattr(self, option)
            if value != getattr(type(self), option):
                parts.append((mark or option).format(value))
        return "-".join(parts)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        """Keyword arguments of `call`, `eager` and `oracle`; floating tensors in `dtype`."""
        raise NotImplementedError

    def call(self, **inputs: Any) -> Outputs:
        """The public op, `fastbert.ops.<op>.<op>`."""
        return self._named(self.op)(**inputs)

    def in_parts(self, **inputs: Any) -> Outputs:
        """The same by the ops of `parts`, as models call them: what a kernel is timed beside."""
        raise NotImplementedError

    def eager(self, **inputs: Any) -> Outputs:
        """The same in plain eager PyTorch, as users write it, in the inputs' dtype: the error to beat."""
        raise NotImplementedError

    def oracle(self, **inputs: Any) -> Outputs:
        """The same by the op's reference, `<op>_ref`; called with float64 inputs. The truth."""
        return self._named(f"{self.op}_ref")(**inputs)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """Conditioning floor added to eager's error in float32, for the quantity `name`."""
        return 0.0

    def flops(self) -> int:
        """Floating-point operations of one forward."""
        raise NotImplementedError

    def bytes(self, dtype: torch.dtype) -> int:
        """Fewest bytes one forward moves: each input read once, each output written once."""
        raise NotImplementedError

    def _named(self, function: str) -> Callable[..., Any]:
        """A function of the op's module, with the case's options."""
        found = getattr(importlib.import_module(f"fastbert.ops.{self.op}"), function)
        return partial(found, **{name: getattr(self, name) for name in self.options})

    def __repr__(self) -> str:
        return f"{self.op}-{self.id}"


def draws(
    seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Generator, Callable[..., Any]]:
    """(a generator of random numbers, `randn(*shape, scale=1.0)`: normal ones in the dtype on the device)."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(device)

    return generator, randn


def ends_of(lengths: Iterable[int], device: torch.device | str) -> Tensor:
    """`cu_seqlens` of packed sequences of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


class Row(NamedTuple):
    """Error of one quantity (an output or a gradient), and eager PyTorch's error of the same."""

    op: str
    case: str
    backend: str
    dtype: str
    device: str
    quantity: str
    max_error: float
    eager_max_error: float
    mean_error: float
    eager_mean_error: float
    passed: bool
    reason: str


def rounding_step(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at |x| (float64 tensor): one unit in the last place."""
    info = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(x.abs().clamp_min(info.tiny)))
    return torch.exp2(exponent) * info.eps


def compare(
    actual: Tensor, eager: Tensor, oracle: Tensor, dtype: torch.dtype, floor: float = 0.0
) -> tuple[float, float, float, float, str]:
    """(max error, eager's, mean error, eager's, reason) of a tensor; reason is "" where the rule holds."""
    if actual.shape != oracle.shape:
        reason = f"shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
        return math.inf, math.inf, math.inf, math.inf, reason
    oracle = oracle.double()  # of an op that moves integers or booleans too
    finite = torch.isfinite(oracle)
    wide = actual.double()
    if not torch.equal(torch.isfinite(wide), finite) or not torch.equal(wide[~finite], oracle[~finite]):
        reason = "NaN or infinity where float64 has none, or the reverse"
        return math.inf, math.inf, math.inf, math.inf, reason
    if not finite.any():
        return 0.0, 0.0, 0.0, 0.0, ""
    truth, wide, eager64 = oracle[finite], wide[finite], eager.double()[finite]
    error, eager_error = (wide - truth).abs(), (eager64 - truth).abs()
    worst, eager_worst = error.max().item(), eager_error.nan_to_num(nan=float("inf")).max().item()
    mean, eager_mean = error.mean().item(), eager_error.mean().item()
    reason, chance = "", chance_allowance(truth.numel())
    if dtype in HALF:
        if (error > chance * eager_worst + rounding_step(truth, dtype)).any():
            reason = f"max error {worst:.3g} over eager's {eager_worst:.3g} and one rounding step"
        elif (
            mean > chance * eager_mean
            and mean > _mean_noise(truth, dtype)
            and mean - eager_mean > _chance_difference(error, eager_error)
        ):
            reason = f"mean error {mean:.4g} over eager's {eager_mean:.4g}"
    elif worst > chance * eager_worst + floor:
        reason = f"max error {worst:.3g} over eager's {eager_worst:.3g} and the floor {floor:.3g}"
    return worst, eager_worst, mean, eager_mean, reason


def _chance_difference(error: Tensor, eager_error: Tensor) -> float:
    """2.5 standard errors of the difference of the two means, from the errors themselves.

    It matters where the truth cancels to 0, as in the gradient of rows of two numbers: there a few rows make
    the mean. For errors of one size, such as rounding errors, it is less than what `chance_allowance` leaves.
    """
    if error.numel() < 2:
        return 0.0
    return 2.5 * (error - eager_error).std().item() / error.numel() ** 0.5


def _mean_noise(truth: Tensor, dtype: torch.dtype) -> float:
    """The mean error of correct rounding (a quarter step) and three standard deviations of that mean."""
    step = rounding_step(truth, dtype)
    return (0.25 * step.mean() + 3 * 0.1445 * step.square().mean().sqrt() / truth.numel() ** 0.5).item()


def with_grad(inputs: dict[str, Any], names: Iterable[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """The inputs, floating tensors in `dtype` (None: as they are); copies that want a gradient of `names`."""
    out = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach() if dtype is None else value.detach().to(dtype)
            if name in names:
                value = value.clone(memory_format=torch.preserve_format).requires_grad_()
        out[name] = value
    return out


def evaluate(
    function: Callable[..., Outputs],
    case: Case,
    inputs: dict[str, Any],
    dtype: torch.dtype | None,
    backward: bool,
    douts: list[Any],
) -> dict[str, Tensor]:
    """Outputs of `function` by name; with `backward` also the gradients, for `douts` of the outputs."""
    names = case.grad_inputs if backward else ()
    kwargs = with_grad(inputs, names, dtype)
    with torch.set_grad_enabled(backward):
        outputs = function(**kwargs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result = {name: out.detach() for name, out in zip(case.output_names, outputs, strict=True)}
    present = [n for n in names if isinstance(kwargs.get(n), Tensor)]
    if present:
        wanted = [kwargs[n] for n in present]
        heads = [(o, g.to(o.dtype)) for o, g in zip(outputs, douts, strict=False) if o.requires_grad]
        grads = torch.autograd.grad([o for o, _ in heads], wanted, [g for _, g in heads], allow_unused=True)
        for name, tensor, grad in zip(present, wanted, grads, strict=True):
            result[f"d{name}"] = torch.zeros_like(tensor) if grad is None else grad.detach()
    return result


def run_case(
    case: Case,
    backend: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    backward: bool = True,
    seed: int = 0,
    pin: Callable[..., AbstractContextManager[Any]] = dispatch.use_backend,
    calls: int = 1,
) -> list[Row]:
    """One case on one backend by the error rule: one row per output and per gradient, of each of `calls`.

    Gradients are compared only where the backend has the op's backward and the dtype has gradients. `pin` is
    the context manager that makes the backend serve the op.
    """
    backward = backward and dtype.is_floating_point and has_backward(backend, case.op)
    inputs = case.inputs(dtype, device, seed)
    with torch.no_grad():
        shapes = case.oracle(**with_grad(inputs, (), torch.float64))
    shapes = shapes if isinstance(shapes, tuple) else (shapes,)
    options = {"generator": torch.Generator().manual_seed(seed + 1), "dtype": torch.float64}
    douts = [torch.randn(o.shape, **options).to(dtype).to(device) for o in shapes]
    oracle = evaluate(case.oracle, case, inputs, torch.float64, backward, douts)
    eager = evaluate(case.eager, case, inputs, None, backward, douts)
    with pin(**{case.op: backend}):
        found = [evaluate(case.call, case, inputs, None, backward, douts) for _ in range(calls)]
    rows = []
    for actual, (name, truth) in itertools.product(found, oracle.items()):
        floor = case.floor(inputs, name) if dtype not in HALF else 0.0
        *errors, reason = compare(actual[name], eager[name], truth, dtype, floor)
        facts = case.op, case.id, backend, str(dtype).removeprefix("torch."), str(device), name
        rows.append(Row._make((*facts, *errors, not reason, reason)))
    return rows


def _module(op: str) -> Any:
    if op not in dispatch.OPS:
        raise ValueError(f"op: unknown op {op!r}; expected one of {', '.join(dispatch.OPS)}")
    return importlib.import_module(f"fastbert.testing.op_cases.{op}")


def cases(op: str) -> list[Case]:
    """All cases of an op, from `fastbert.testing.op_cases.<op>`."""
    return list(_module(op).CASES)


def small_cases(op: str) -> list[Case]:
    """The few tiny cases of an op that a self-check runs."""
    return list(_module(op).SMALL)


def gpu_cases(op: str) -> list[Case]:
    """Further cases of a self-check on a GPU: cheap there, and large enough for the configs of real work."""
    return list(getattr(_module(op), "ON_GPU", []))


def bench_cases(op: str, lengths: tuple[int, ...]) -> list[Case]:
    """The cases that BERT-base needs of an op for a batch of sequences of these lengths, in tokens."""
    return list(_module(op).bench(lengths))


def training_cases(op: str, lengths: tuple[int, ...]) -> list[Case]:
    """The cases that a training step of BERT-base needs of an op, with its dropout, for such a batch."""
    return list(getattr(_module(op), "training", _module(op).bench)(lengths))


def verify(
    ops: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    device: torch.device | str = "cpu",
    *,
    quick: bool = False,
) -> Iterator[Row]:
    """The numerics table, row by row: every case of the ops on every backend that can run on `device`.

    With `quick`, the few tiny cases of each op that a self-check runs.
    """
    device_type = torch.device(device).type
    dtypes = dtypes or (torch.float32, torch.bfloat16, torch.float16)
    for op, name, dtype in itertools.product(ops or dispatch.OPS, backends or dispatch.BACKENDS, dtypes):
        if dispatch.unsupported_reason(name, op, device_type, dtype) is None:
            for case in small_cases(op) if quick else cases(op):
                yield from run_case(case, name, dtype, device)


def self_check(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the op's tiny cases on one backend and device, with their backward if there is one.

    On a GPU `gpu_cases` run as well, and all run twice: a launch like an earlier one takes another path
    (kernels/launch.py). Other threads that call the op during the check do not get the backend
    on trial.

    Returns:
        None if every result keeps the error rule, else which result broke it and how.

    Raises:
        Exception: whatever the backend raises.
    """
    on_gpu = device.type == "cuda"
    for case in small_cases(op) + (gpu_cases(op) if on_gpu else []):
        for row in run_case(case, backend, dtype, device, pin=dispatch.trial, calls=2 if on_gpu else 1):
            if not row.passed:
                return f"{row.case} {row.quantity}: {row.reason}"
    return None
