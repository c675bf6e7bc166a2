"""The mathematics of Triton's tutorials, ten lines a kernel, in the PTX emulator: one JSON object per line.

The compiler that makes these is not ours, nor is the mathematics: where they come out wrong, the emulator is.
"""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl

from tests.ptx.emulated_launches import Emulation, only_ptx

CPU = torch.device("cpu")


@triton.jit
def softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * columns + at, values / tl.sum(values, axis=0), mask=at < columns)


@triton.jit
def layer_norm_kernel(x, weight, bias, y, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / columns
    centred = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w, b = tl.load(weight + at, mask=inside), tl.load(bias + at, mask=inside)
    tl.store(y + row * columns + at, centred * scale * w + b, mask=inside)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        inside = k + depth < K
        at = (rows[:, None] < M) & inside[None, :]
        left = tl.load(a + rows[:, None] * K + (k + depth)[None, :], mask=at, other=0.0)
        bt = inside[:, None] & (columns[None, :] < N)
        right = tl.load(b + (k + depth)[:, None] * N + columns[None, :], mask=bt, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    ct = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], acc.to(c.dtype.element_ty), mask=ct)


def close(actual: torch.Tensor, truth: torch.Tensor, steps: float) -> bool:
    """Within `steps` rounding steps of the dtype at the largest value."""
    bound = steps * torch.finfo(actual.dtype).eps * truth.abs().max()
    return bool(((actual.double() - truth).abs() <= bound).all())


def softmax(run: Emulation) -> bool:
    x = torch.randn(9, 781)
    y = torch.empty_like(x)
    run.launch(softmax_kernel, (9,), CPU, x, y, 781, BLOCK=1024, num_warps=4)
    return close(y, x.double().softmax(-1), 8)


def layer_norm(run: Emulation) -> bool:
    x, w, b = torch.randn(7, 1000).half(), torch.randn(1000).half(), torch.randn(1000).half()
    y = torch.empty_like(x)
    run.launch(layer_norm_kernel, (7,), CPU, x, w, b, y, 1000, 1e-5, BLOCK=1024, num_warps=8)
    return close(y, torch.nn.functional.layer_norm(x.double(), (1000,), w.double(), b.double(), 1e-5), 1)


def matmul(run: Emulation) -> bool:
    good = True
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for (m, n, k), warps, stages in (((100, 72, 96), 4, 3), ((64, 64, 33), 8, 2), ((40, 130, 200), 2, 4)):
            a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            c = torch.empty(m, n, dtype=dtype)
            tiles = (triton.cdiv(m, 64), triton.cdiv(n, 32))
            config = {"BM": 64, "BN": 32, "BK": 32, "num_warps": warps, "num_stages": stages}
            run.launch(matmul_kernel, tiles, CPU, a, b, c, m, n, k, **config)
            good &= close(c, a.double() @ b.double(), 1 if dtype != torch.float32 else 8)
    return good


def main() -> None:
    """Every tutorial by both schedules and two orders of warps."""
    only_ptx()
    arch = int(sys.argv[1]) if len(sys.argv) > 1 else 80
    run = Emulation(arch=arch)
    for tutorial in (softmax, layer_norm, matmul):
        for run.schedule, run.seed in (("late", 0), ("early", 1)):
            torch.manual_seed(0)
            row = {"tutorial": tutorial.__name__, "schedule": run.schedule, "right": tutorial(run)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
