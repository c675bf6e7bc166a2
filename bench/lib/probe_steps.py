"""What the probe measures, step by step; `probe.py` runs the steps and records the rows."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator

import torch

from bench.lib.timing import Timing, interleave, memory_bytes, rotations, synchronize


def reason_of(error: Exception) -> str:
    """An exception as the text of a row."""
    return f"{type(error).__name__}: {str(error).strip()}"[:2000]


@dataclasses.dataclass
class Candidate:
    """A row to measure: `make` builds the call (or several over different buffers) and may raise."""

    make: Callable[[], object]
    flops: float = 0.0
    bytes: float = 0.0
    facts: dict = dataclasses.field(default_factory=dict)


class Bench:
    """What a step gets: the device, the scale, and where its rows go."""

    def __init__(self, device: torch.device, smoke: bool, emit: Callable[[dict], None]):
        self.device, self.smoke, self.emit, self.step = device, smoke, emit, ""
        self.cuda = device.type == "cuda"

    def pick(self, cuda, cpu, smoke):
        """The value for this device, or the tiny one of --smoke."""
        return smoke if self.smoke else cuda if self.cuda else cpu

    def row(
        self, name: str, timing: Timing | None = None, flops: float = 0.0, bytes: float = 0.0, **facts
    ) -> None:
        row = {"step": self.step, "name": name, "status": "ok"}
        if timing is not None:
            row |= timing.facts()
            if flops:
                row["gflops"] = flops / timing.median_ms / 1e6
            if bytes:
                row["gbs"] = bytes / timing.median_ms / 1e6
        self.emit(row | facts)

    def error(self, name: str, error: Exception | str, **facts) -> None:
        """Hand over a row that could not be measured."""
        text = error if isinstance(error, str) else reason_of(error)
        self.emit({"step": self.step, "name": name, "status": "error", "error": text[:2000]} | facts)

    @contextlib.contextmanager
    def recorded(self, name: str, **facts) -> Iterator[None]:
        """Turn an exception of the body into the row's error."""
        try:
            yield
        except Exception as error:
            self.error(name, error, **facts)
            self.free()

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def measure(self, candidates: dict[str, Candidate], *, clock: str | None = None, **options) -> None:
        """Build, try and time the candidates interleaved: a row each, or an error row."""
        if self.smoke:
            options |= {"seconds": 0.0, "samples": (2, 2), "warmup": 1}
        calls = {}
        for name, candidate in candidates.items():
            with self.recorded(name, **candidate.facts):
                made = candidate.make()
                (made if callable(made) else made[0])()
                synchronize(self.device)
                calls[name] = made
        try:
            timings = interleave(calls, self.device, clock=clock, **options)
        except Exception as error:
            for name in calls:
                self.error(name, error, **candidates[name].facts)
            self.free()
            return
        for name, timing in timings.items():
            candidate = candidates[name]
            self.row(name, timing, candidate.flops, candidate.bytes, **candidate.facts)


# ---- Roofs ----


def step_matrix(bench: Bench) -> None:
    """Peak of a square matrix product per dtype."""
    n = bench.pick(8192, 2048, 64)
    options = {"seconds": bench.pick(1.0, 1.5, 0.0), "samples": (5, 200)}
    device = bench.device

    def floats(dtype: torch.dtype, precision: str = "highest"):
        def make():
            torch.set_float32_matmul_precision(precision)
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            out = torch.empty(n, n, dtype=dtype, device=device)
            return lambda: torch.mm(a, b.t(), out=out)

        return make

    def packed(dtype: torch.dtype):
        def make():
            a, b = (torch.randn(n, n).to(dtype) for _ in range(2))
            weight = torch.ops.mkldnn._reorder_linear_weight(b, n)
            return lambda: torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")

        return make

    def fp8(rowwise: bool):
        def make():
            a, b = (torch.randn(n, n, device=device).to(torch.float8_e4m3fn) for _ in range(2))
            scale_a = torch.ones((n, 1) if rowwise else (), device=device)
            scale_b = torch.ones((1, n) if rowwise else (), device=device)
            return lambda: torch._scaled_mm(
                a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return make

    def int8():
        a, b = (torch.randint(-127, 128, (n, n), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())

    if bench.cuda:
        makers = {
            "torch-bf16": floats(torch.bfloat16),
            "torch-fp16": floats(torch.float16),
            "torch-tf32": floats(torch.float32, "high"),
            "torch-fp32": floats(torch.float32),
            "scaled_mm-fp8_tensorwise": fp8(False),
            "scaled_mm-fp8_rowwise": fp8(True),
            "int_mm-int8": int8,
        }
    else:
        makers = {
            "torch-fp32": floats(torch.float32),
            "onednn_packed-fp32": packed(torch.float32),
            "torch-bf16": floats(torch.bfloat16),
            "int_mm-int8": int8,
        }
        # oneDNN has bf16 products where the processor has AVX-512.
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            makers["onednn_packed-bf16"] = packed(torch.bfloat16)
    with torch.inference_mode():
        try:
            for name, make in makers.items():  # one after the other, because they share the power limit
                bench.measure({f"matmul-{name}-{n}x{n}x{n}": Candidate(make, flops=2.0 * n**3)}, **options)
                bench.free()
        finally:
            torch.set_float32_matmul_precision("highest")


def step_bandwidth(bench: Bench) -> None:
    """Copy (read + write), read and write of a large buffer; copy and add of a layer's activations."""
    with torch.inference_mode():
        _large_buffers(bench)
        bench.free()
        _activations(bench)


def _large_buffers(bench: Bench) -> None:
    size = min(bench.pick(1 << 30, 512 << 20, 1 << 20), memory_bytes(bench.device) // 32 // 4 * 4)
    source, target = (torch.rand(size // 4, device=bench.device) for _ in range(2))
    calls = {
        "copy-torch": (lambda: target.copy_(source), 2 * size),
        "read-torch_sum": (lambda: source.sum(), size),
        "write-torch_fill": (lambda: target.fill_(1.5), size),
    }
    candidates = {
        f"{name}-fp32-{size >> 20}MiB": Candidate(lambda call=call: call, 0, moved, {"buffer_bytes": size})
        for name, (call, moved) in calls.items()
    }
    bench.measure(candidates, seconds=0.5, samples=(5, 100))


def _activations(bench: Bench) -> None:
    tokens, hidden = bench.pick(16384, 4096, 8), 768
    one = tokens * hidden * 2
    sets = rotations(3 * one, bench.device, limit=bench.pick(16, 32, 2))
    tensors = [
        [torch.randn(tokens, hidden, device=bench.device).to(torch.bfloat16) for _ in range(3)]
        for _ in range(sets)
    ]
    calls = {
        "copy-torch": ([functools.partial(torch.Tensor.copy_, z, x) for x, _, z in tensors], 2 * one),
        "add-torch": ([functools.partial(torch.add, x, y, out=z) for x, y, z in tensors], 3 * one),
    }
    facts = {"buffer_bytes": one, "rotated_sets": sets}
    candidates = {
        f"{name}-bf16-{tokens}x{hidden}": Candidate(lambda rotated=rotated: rotated, 0, moved, facts)
        for name, (rotated, moved) in calls.items()
    }
    bench.measure(candidates, clock="graph" if bench.cuda else "wall", seconds=0.3, samples=(5, 100))


STEPS = {"matrix": step_matrix, "bandwidth": step_bandwidth}  # in order of priority
