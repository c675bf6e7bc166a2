"""What the probe measures, step by step; `probe.py` runs the steps and records the rows."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.lib import workloads
from bench.lib.timing import Timing, interleave, measure, memory_bytes, rotations, summarise, synchronize

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        """Hand over one finished row."""
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

    def measure(
        self,
        candidates: dict[str, Candidate],
        *,
        clock: str | None = None,
        **options,
    ) -> None:
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


class _CloneFunction(torch.autograd.Function):
    """An autograd function that does nothing: its cost is the overhead."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


def _clone_op():
    if hasattr(torch.ops.fastbert_probe, "clone"):
        return torch.ops.fastbert_probe.clone

    @torch.library.custom_op("fastbert_probe::clone", mutates_args=())
    def clone(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    clone.register_fake(torch.empty_like)
    return torch.ops.fastbert_probe.clone


def step_launch(bench: Bench) -> None:
    """Host time per eager call; on a GPU also device time per tiny kernel, eager and in a CUDA graph."""
    x = torch.rand(8, device=bench.device)
    count = 8 if bench.smoke else 300  # fewer than the driver's launch queue holds, so that it never blocks
    rounds = 3 if bench.smoke else 30

    def host(name: str, call: Callable[[], object]) -> None:
        with bench.recorded(name):
            samples = []
            for _ in range(rounds + 2):
                synchronize(bench.device)
                start = time.perf_counter()
                for _ in range(count):
                    call()
                samples.append((time.perf_counter() - start) * 1e3 / count)
            bench.row(name, summarise(samples[2:], count, "wall"), measures="host time per call, not waiting")

    host("launch-host-add_", lambda: x.add_(1.0))
    host("launch-host-clone", lambda: x.clone())
    host("launch-host-autograd_function", lambda: _CloneFunction.apply(x))
    with bench.recorded("launch-host-custom_op"):
        op = _clone_op()
        host("launch-host-custom_op", lambda: op(x))
    if not bench.cuda:
        return

    def both_ends(name: str, call: Callable[[], object], what: str) -> None:
        with bench.recorded(name):
            timing = measure(call, bench.device, clock="wall", seconds=0.2, samples=(5, 200))
            bench.row(name, timing, measures=what)

    def launch_and_wait():
        x.add_(1.0)
        torch.cuda.synchronize(bench.device)

    both_ends("launch-eager-add_-synchronize", launch_and_wait, "one kernel, launched and waited for")
    tiny = Candidate(
        lambda: [lambda: x.add_(1.0)] * count, facts={"measures": "time per kernel of a stream of them"}
    )
    for name, clock in (("launch-eager-kernel", "event"), ("launch-graph-kernel", "graph")):
        bench.measure({name: tiny}, clock=clock, seconds=0.2)
    for kernels in (1, 60):
        name = f"launch-graph-{kernels}_kernels-synchronize"
        with bench.recorded(name):
            x.add_(1.0)
            torch.cuda.synchronize(bench.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(kernels):
                    x.add_(1.0)

            def replay_and_wait(graph=graph):
                graph.replay()
                torch.cuda.synchronize(bench.device)

            both_ends(name, replay_and_wait, f"a graph of {kernels} tiny kernels, launched and waited for")


# A kernel that does nothing: occupancy of clusters depends on threads and shared memory, given at the query.
CLUSTER_PTX = """\
.version 7.8
.target sm_90
.address_size 64
.visible .entry cluster_probe()
{
    ret;
}
"""


class _LaunchAttribute(ctypes.Structure):  # CUlaunchAttribute: id, padding to 8, a union of 64 bytes
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    ]


CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class ClusterQuery:
    """cuOccupancyMaxActiveClusters of an empty kernel, through the driver, in torch's current context."""

    def __init__(self, driver: ctypes.CDLL | None = None):
        self.driver = driver or ctypes.CDLL("libcuda.so.1")
        device, module, self.kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        most = ctypes.c_int()
        attribute = ctypes.c_int(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self._call("cuDeviceGetAttribute", ctypes.byref(most), attribute, device)
        self.most_shared_bytes = most.value
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(CLUSTER_PTX.encode()))
        name = ctypes.c_char_p(b"cluster_probe")
        self._call("cuModuleGetFunction", ctypes.byref(self.kernel), module, name)
        self._set(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, self.most_shared_bytes)
        self._set(CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def _call(self, name: str, *args) -> None:
        code = getattr(self.driver, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise RuntimeError(f"{name} returned {code} ({(text.value or b'unknown').decode()})")

    def _set(self, attribute: int, value: int) -> None:
        self._call("cuFuncSetAttribute", self.kernel, ctypes.c_int(attribute), ctypes.c_int(value))

    def clusters(self, size: int, threads: int, shared_bytes: int, sms: int) -> int:
        """How many clusters of `size` blocks can be resident on the device at once."""
        attribute = _LaunchAttribute(id=CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
        attribute.value[0], attribute.value[1], attribute.value[2] = size, 1, 1
        config = _LaunchConfig(
            grid=(size * sms, 1, 1),
            block=(threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=None,
            attributes=ctypes.pointer(attribute),
            attribute_count=1,
        )
        count = ctypes.c_int()
        self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self.kernel, ctypes.byref(config))
        return count.value


def step_cluster(bench: Bench) -> None:
    """How many clusters of 1 to 16 blocks fit, for blocks that fill an SM's shared memory and small ones."""
    torch.zeros(1, device=bench.device)  # makes the primary context current
    major, minor = torch.cuda.get_device_capability(bench.device)
    if major < 9:
        bench.error("clusters", f"needs compute capability 9.0, this device has {major}.{minor}")
        return
    sms = torch.cuda.get_device_properties(bench.device).multi_processor_count
    query = ClusterQuery()
    for shared_bytes in (query.most_shared_bytes, 32 << 10):
        for size in (1, 2, 4, 8, 16):
            name = f"clusters-size{size}-384threads-{shared_bytes}B"
            with bench.recorded(name):
                clusters = query.clusters(size, 384, shared_bytes, sms)
                bench.row(name, clusters=clusters, blocks=clusters * size, sms=sms)


# ---- torch's own kernels at the encoder's shapes ----


def step_gemm(bench: Bench) -> None:
    """torch's product at every shape of base and large: plain, bias, bias and GELU, bias and fused GELU."""
    device = bench.device
    models = [workloads.TINY] if bench.smoke else [workloads.BASE, workloads.LARGE]
    tokens = bench.pick((16384, 384, 128, 8192, 4096, 2048), (128, 512, 1024), (8,))  # workloads' own first
    dtypes = bench.pick(("bf16",), ("fp32", "bf16"), ("bf16",))

    def variants(t: int, n: int, k: int, dtype: torch.dtype) -> dict[str, Callable[[], list]]:
        sets = rotations((t * k + n * k) * dtype.itemsize, device, limit=bench.pick(16, 4, 1))
        xs = [torch.randn(t, k, device=device).to(dtype) for _ in range(sets)]
        ws = [(torch.randn(n, k, device=device) / math.sqrt(k)).to(dtype) for _ in range(sets)]
        b = torch.randn(n, device=device).to(dtype)
        over = list(zip(xs, ws, strict=True))
        return {
            "plain": lambda: [functools.partial(F.linear, x, w) for x, w in over],
            "bias": lambda: [functools.partial(F.linear, x, w, b) for x, w in over],
            "bias_gelu": lambda: [lambda x=x, w=w: F.gelu(F.linear(x, w, b)) for x, w in over],
            # tanh GELU on CUDA, erf GELU on CPU: a yardstick
            "bias_fused_gelu": lambda: [
                functools.partial(torch._addmm_activation, b, x, w.t(), use_gelu=True) for x, w in over
            ],
        }

    with torch.inference_mode():
        for dtype in dtypes:
            for t in tokens:
                for model in models:
                    for gemm, (n, k) in model.gemms().items():
                        facts = {"model": model.name, "gemm": gemm, "tokens_dim": t, "n_dim": n, "k_dim": k}
                        with bench.recorded(f"linear-torch-{dtype}-{t}x{n}x{k}", **facts):
                            rows = {
                                f"linear-torch-{dtype}-{t}x{n}x{k}-{variant}": Candidate(
                                    make, 2.0 * t * n * k, 0, facts | {"variant": variant}
                                )
                                for variant, make in variants(t, n, k, DTYPES[dtype]).items()
                            }
                            clock = "graph" if bench.cuda else "wall"
                            bench.measure(rows, clock=clock, seconds=0.08, samples=(3, 30), warmup=1)
                bench.free()


def step_sdpa(bench: Bench) -> None:
    """SDPA at 512 x head_dim 64: each backend, forward and backward, on a GPU also with dropout."""
    device = bench.device
    length, dim = (16, 16) if bench.smoke else (512, 64)
    sizes = bench.pick(((32, 12), (32, 16)), ((2, 12),), ((1, 2),))
    dtypes = bench.pick(("bf16",), ("fp32", "bf16"), ("fp32",))
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if bench.cuda:
        backends = {
            "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "cudnn": SDPBackend.CUDNN_ATTENTION,
            "math": SDPBackend.MATH,
        }
    options = {"seconds": 0.2, "samples": (5, 50)}

    def build(
        batch: int, heads: int, dtype: torch.dtype, dropout: float, backend: SDPBackend, backward: bool
    ):
        def make():
            # (batch, length, 3, heads, dim) as a fused QKV product leaves it
            qkv = torch.randn(batch, length, 3, heads, dim, device=device).to(dtype).requires_grad_(backward)
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)

            def forward():
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

            if not backward:
                return forward
            out = forward()
            dout = torch.randn(out.shape, device=device).to(dtype)
            return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        return make

    for dtype in dtypes:
        for batch, heads in sizes:
            for backward in (False, True):
                for dropout in (0.0, 0.1) if bench.cuda else (0.0,):
                    op = "attention_bwd" if backward else "attention_fwd"
                    flops = 4.0 * batch * heads * length * length * dim * (2.5 if backward else 1.0)
                    end = f"-dropout{dropout}" if dropout else ""
                    rows = {
                        f"{op}-sdpa_{name}-{dtype}-{batch}x{length}x{heads}x{dim}{end}": Candidate(
                            build(batch, heads, DTYPES[dtype], dropout, backend, backward), flops
                        )
                        for name, backend in backends.items()
                    }
                    # inference_mode would hide what backward needs
                    with contextlib.nullcontext() if backward else torch.no_grad():
                        bench.measure(rows, **options)
                    bench.free()


@dataclasses.dataclass(frozen=True)
class Step:
    """A named step, and the types of devices that it runs on."""

    name: str
    run: Callable[[Bench], None]
    devices: tuple[str, ...] = ("cuda", "cpu")


STEPS = (
    Step("matrix", step_matrix),
    Step("bandwidth", step_bandwidth),
    Step("launch", step_launch),
    Step("cluster", step_cluster, ("cuda",)),
    Step("gemm", step_gemm),
    Step("sdpa", step_sdpa),
)
