"""Part of a self-check on a GPU: is the kernel slower than the backend that would serve without it?

BERT-base's calls of the op are timed at three sizes: forward alone, and forward and backward as in training
where both backends have a backward. Both backends take turns. A sample is as many calls, queued one after
the other as a model queues them, as last a few milliseconds; the host waits at its end. The kernel counts as
slower if the geometric mean of its times over the other's is above `SLOWER`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from fastbert.runtime import dispatch
from fastbert.testing import error_rule, verdict_keys, verdicts
from fastbert.testing.verdicts import Time

# Lengths of the sequences of a batch, in tokens: one short question; lengths as in SQuAD; a full batch.
SIZES = ((128,), (384, 272, 210, 178, 164, 150, 128, 96), (512,) * 8)
# Of the other backend's time: what a repeated measurement may differ by.
SLOWER = 1.03
SAMPLES = 7
SAMPLE_SECONDS = 0.003
MOST_CALLS = 64


def compare(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Time, ...]:
    """Times of a kernel and of the next backend; none of calls that the table does not give to the kernel.

    A size that does not fit into the device's memory is left out.
    """
    found: list[Time] = []
    for lengths in SIZES:
        with contextlib.suppress(torch.OutOfMemoryError):
            for case, training in _calls(op, lengths, dtype):
                other = _next(backend, case, device, dtype, training)
                if other is not None:
                    ms, other_ms = _times(case, (backend, other), device, dtype, training)
                    passes = "training" if training else "forward"
                    found.append(Time(case.id, passes, ms, other, other_ms))
    return tuple(found)


def why_slower(times: tuple[Time, ...], ratio: float | None) -> str | None:
    """What a verdict says of a kernel that is slower than the next backend; None where it is not.

    Args:
        times: of the kernel.
        ratio: their geometric mean, as in `Verdict.ratio`.
    """
    if ratio is None or ratio <= SLOWER:
        return None
    others = ", ".join(dict.fromkeys(t.other for t in times))
    return f"slower than {others}: {ratio:.2f} x its time (geometric mean of {len(times)})"


def _calls(op: str, lengths: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[error_rule.Case, bool]]:
    """(case, whether it is timed as in training)."""
    for case in error_rule.bench_cases(op, lengths):
        yield case, False
    if dtype.is_floating_point:
        for case in error_rule.training_cases(op, lengths):
            yield case, True


def _next(
    backend: str, case: error_rule.Case, device: torch.device, dtype: torch.dtype, training: bool
) -> str | None:
    """The backend that would serve the case without `backend`; None where nothing is to be compared.

    A kernel that needs a self-check itself counts where it has passed it; `proving` checks it first.
    """
    ranking = dispatch.ranking(f"{case.op}_fwd {case.kind}".rstrip(), device.type, dtype)
    if backend not in ranking:
        return None
    for name in ranking[ranking.index(backend) + 1 :]:
        if dispatch.unsupported_reason(name, case.op, device.type, dtype) is None:
            if name in dispatch.SELF_CHECKED:
                verdict = verdicts.load(verdict_keys.key_of(case.op, name, device, dtype))
                if verdict is None or not verdict.passed:
                    continue
            both = all(dispatch.has_backward(each, case.op) for each in (backend, name))
            return name if both or not training else None
    return None


def _times(
    case: error_rule.Case, backends: tuple[str, str], device: torch.device, dtype: torch.dtype, training: bool
) -> list[float]:
    """Median milliseconds per call of each backend."""
    inputs = error_rule.with_grad(case.inputs(dtype, device), case.grad_inputs if training else (), None)
    call = functools.partial(case.call, **inputs)
    if training:
        call = _step(call, [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad])
    counts = [_count(call, case.op, backend, device, training) for backend in backends]
    samples: list[list[float]] = [[] for _ in backends]
    for _ in range(SAMPLES):
        for backend, count, mine in zip(backends, counts, samples, strict=True):
            mine.append(_seconds(call, case.op, backend, count, device, training) / count * 1e3)
    return [statistics.median(each) for each in samples]


def _step(call: Callable, wanted: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward, the gradients of the outputs being ones."""

    def step() -> object:
        outputs = call()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [o for o in outputs if o.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return step


def _count(call: Callable, op: str, backend: str, device: torch.device, training: bool) -> int:
    """How many calls a sample takes, after those that compile and warm up."""
    _seconds(call, op, backend, 2, device, training)
    each = _seconds(call, op, backend, 3, device, training) / 3
    return max(1, min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / max(each, 1e-9))))


def _seconds(
    call: Callable, op: str, backend: str, count: int, device: torch.device, training: bool
) -> float:
    """Seconds of `count` calls that `backend` serves."""
    with dispatch.trial(**{op: backend}), torch.set_grad_enabled(training):
        _wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        return time.perf_counter() - begin


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
