"""Part of a self-check on a GPU: is the kernel slower than the backend that would serve without it?

BERT-base's calls of the op are timed at three sizes: forward alone, and forward and backward as in training
where both backends have a backward. A fourth size has few rows, for the ops that choose by them. An op that
models replace by other ops where no kernel serves it (`Case.parts`) is timed beside these. The two are
interleaved. The times are the device's (`device_time`); the host's own are kept beside them, and count where
they are longer for an op whose purpose is the host's time (`Case.counts_host`). The kernel counts as slower
if the geometric mean of its times over the other's is above `SLOWER`.

The kernel is judged by all times of an op together, except where the dispatch table has a line for the op's
calls in training, or with few rows: then these calls are judged by their own times, and the rest by the rest
of the times of forward alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastbert.runtime import dispatch
from fastbert.runtime.namespaces import has_backward
from fastbert.runtime.table import ROWS, call_kinds, rows_kind
from fastbert.testing import error_rule, verdicts
from fastbert.testing.device_time import DeviceClock, Sample
from fastbert.testing.verdict_keys import Unit
from fastbert.testing.verdicts import FORWARD, TRAINING, Time, Verdict, ratio_of

# Lengths of the sequences of a batch, in tokens: one short question; lengths as in SQuAD; a full batch.
SIZES = ((128,), (384, 272, 210, 178, 164, 150, 128, 96), (512,) * 16)
# The smallest size, for ops that choose by rows: one search query.
FEWEST = (32,)
# The ratio by which a repeated measurement may differ.
SLOWER = 1.03
SAMPLES = 7
SAMPLE_MS = 2.0
# How long the host may take to enqueue the calls of a sample.
ENQUEUE_MS = 2.0
MOST_CALLS = 64


def compare(op: str, backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Time, ...]:
    """Times of a kernel and of the next backend.

    Calls that the table does not rank the kernel for are left out, and calls that do not fit into the
    device's memory.
    """
    found: list[Time] = []
    seen = set()
    by_rows = any(_of_rows(word) in judged_passes(op, device.type) for word in ROWS)
    for lengths in (FEWEST, *SIZES) if by_rows else SIZES:
        for case, training in _calls(op, lengths, dtype):
            passes = TRAINING if training else passes_of(op, _kind(case, False), device.type) or FORWARD
            other = _next(backend, case, device, dtype, training)
            if other is None or (case.id, passes) in seen or (training and lengths is FEWEST):
                continue
            seen.add((case.id, passes))
            with contextlib.suppress(torch.OutOfMemoryError):
                (ms, host_ms), (other_ms, other_host_ms) = _times(
                    case, (backend, other), device, dtype, training
                )
                if case.counts_host:
                    ms, other_ms = max(ms, host_ms), max(other_ms, other_host_ms)
                found.append(Time(case.id, passes, ms, other, other_ms, host_ms, other_host_ms))
    return tuple(found)


def _of_rows(word: str) -> str:
    return f"{FORWARD} of {word} rows"


def judged_passes(op: str, device_type: str) -> tuple[str, ...]:
    """The passes by which a kernel of the op is judged, each apart; "" means all together.

    They are such as "forward", "forward of few rows" and "training". "forward" is then the rest of forward.
    """
    words = {word for kind in call_kinds(op, device_type) for word in kind.split()}
    apart = [_of_rows(word) for word in ROWS if word in words]
    apart += [TRAINING] if TRAINING in words else []
    return (FORWARD, *apart) if apart else ("",)


def passes_of(op: str, kind: str, device_type: str) -> str:
    """The member of `judged_passes` that counts for a kind of call, such as "training"."""
    judged = judged_passes(op, device_type)
    named = [TRAINING if word == TRAINING else _of_rows(word) for word in kind.split()]
    return next((passes for passes in named if passes in judged), judged[0])


def _kind(case: error_rule.Case, training: bool) -> str:
    """The kind of call that a case is, with the word for its rows."""
    rows = "" if case.ranked_rows is None else rows_kind(case.ranked_rows)
    return f"{case.kind}{f' {TRAINING}' if training else rows}".lstrip()


def why_slower(times: tuple[Time, ...], passes: str = "") -> str | None:
    """Why a kernel counts as slower in `passes` ("": all) than the next backend; None if it does not."""
    ratio = ratio_of(times, passes)
    if ratio is None or ratio <= SLOWER:
        return None
    others = [t.other for t in times if passes in ("", t.passes)]
    of, names = f" in {passes}" if passes else "", ", ".join(dict.fromkeys(others))
    return f"slower{of} than {names}: {ratio:.2f} x its time (geometric mean of {len(others)})"


def why_never(op: str, device_type: str, times: tuple[Time, ...]) -> str | None:
    """Why a kernel serves no call of the op, because it is slower wherever it is timed; None if it may."""
    timed = [p for p in judged_passes(op, device_type) if ratio_of(times, p) is not None]
    reasons = [reason for p in timed if (reason := why_slower(times, p)) is not None]
    return "; ".join(reasons) if timed and len(reasons) == len(timed) else None


def why_not(verdict: Verdict, op: str, kind: str, device_type: str) -> str | None:
    """Why a kernel of that verdict may not serve a kind of the op's calls; None if it may."""
    passes = passes_of(op, kind, device_type)
    return verdict.reason or (why_slower(verdict.times, passes) if passes else None)


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

    Where models would call other ops instead, it is the names of these. A kernel that needs a self-check
    counts only if it has passed; `proving` checks it first.
    """
    kind = _kind(case, training)
    ranking = dispatch.ranking(f"{case.op}_fwd {kind}".rstrip(), device.type, dtype)
    if backend not in ranking:
        return None
    if case.parts and not training:
        return " + ".join(case.parts)
    for name in ranking[ranking.index(backend) + 1 :]:
        if dispatch.unsupported_reason(name, case.op, device.type, dtype) is None:
            if name in dispatch.SELF_CHECKED:
                verdict = verdicts.known(Unit(case.op, name, dtype), device)
                if verdict is None or why_not(verdict, case.op, kind, device.type) is not None:
                    continue
            both = all(has_backward(each, case.op) for each in (backend, name))
            return name if both or not training else None
    return None


def _times(
    case: error_rule.Case, backends: tuple[str, str], device: torch.device, dtype: torch.dtype, training: bool
) -> list[tuple[float, float]]:
    """(median milliseconds per call, those of the host) of each backend, the second perhaps `case.parts`."""
    parts = " + ".join(case.parts)
    with DrawnThere(device):
        inputs = case.inputs(dtype, device)
    inputs = error_rule.with_grad(inputs, case.grad_inputs if training else (), None)
    call = functools.partial(case.call, **inputs)
    if training:
        call = _step(call, [t for t in inputs.values() if isinstance(t, torch.Tensor) and t.requires_grad])
    timed = [_Timed(call, {case.op: backend}, training) for backend in backends if backend != parts]
    if parts in backends:
        timed.append(_Timed(functools.partial(case.in_parts, **inputs), {}, training))
    for _ in range(SAMPLES):
        for each in timed:
            each.sample()
    return [each.medians() for each in timed]


class DrawnThere(TorchFunctionMode):
    """`torch.randn` draws on the device, which is faster than the host, from a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0) if device.type == "cuda" else None
        self.there = {"device": device, "generator": generator}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}) | (self.there if func is torch.randn else {}))


def _step(call: Callable[..., Any], wanted: list[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward, the gradients of the outputs being ones."""

    def step() -> object:
        made = call()
        outputs = [o for o in (made if isinstance(made, tuple) else (made,)) if o.requires_grad]
        return torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return step


class _Timed:
    """Calls with some backends pinned, after a warm-up, in samples of several calls."""

    def __init__(self, call: Callable[..., Any], pins: dict[str, str], training: bool):
        self.call, self.pins, self.training = call, pins, training
        self.clock = DeviceClock()
        self.samples: list[Sample] = []
        # to compile
        self._timed(self.clock.once, 2)
        warm = self._timed(self.clock.once, 3)
        wanted = math.ceil(SAMPLE_MS / max(warm.ms, 1e-6)), int(ENQUEUE_MS / max(warm.host_ms, 1e-6))
        self.count = max(1, min(*wanted, MOST_CALLS))
        self.clock.spin_for(warm.host_ms * self.count)

    def _timed(self, clock: Callable[[Callable[..., Any], int], Sample], count: int) -> Sample:
        with dispatch.trial(**self.pins), torch.set_grad_enabled(self.training):
            return clock(self._run, count)

    def _run(self, count: int) -> None:
        for _ in range(count):
            self.call()

    def sample(self) -> None:
        found = self._timed(self.clock.sample, self.count)
        # the device clock may have found that fewer can be enqueued in time
        self.count = found.count
        self.samples.append(found)

    def medians(self) -> tuple[float, float]:
        times, host_times = zip(*((each.ms, each.host_ms) for each in self.samples), strict=True)
        return statistics.median(times), statistics.median(host_times)
