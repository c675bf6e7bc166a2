"""Calls of the CUDA kernels, drawn at random for the PTX emulator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch

from fastbert.ops.activation import GATES, activate_ref
from fastbert.ops.linear import LinearInputs, LinearNeeds, LinearSaved
from fastbert.testing.op_cases.attention import AttentionCase
from tests.support.cpu_truth import HALF, assert_same_values

# --- attention ----------------------------------------------------------------------------------------------


def drawn_case(rng: random.Random) -> AttentionCase:
    lengths = tuple(
        rng.choice((0, 1, rng.randint(2, 20), rng.randint(30, 34), rng.randint(60, 68)))
        for _ in range(rng.randint(1, 3))
    )
    lengths = lengths if sum(lengths) else (*lengths, 3)
    padded = rng.random() < 0.2
    lengths = (max(1, lengths[0]),) * len(lengths) if padded else lengths
    bias = rng.choice(("", "", "shared", "sequence", "keys"))
    return AttentionCase(
        lengths,
        nheads=rng.choice((1, 1, 2)),
        headdim=rng.choice((32, 32, 64, 64, 128)),
        padded=padded,
        capacity=0 if padded else rng.choice((0, 0, 1, 70)),
        slack=0 if padded else rng.choice((0, 0, 1, 40)),
        causal=rng.random() < 0.4,
        bias=bias,
        masked=bool(bias) and rng.random() < 0.4,
        gate=rng.random() < 0.4,
        dropout_p=rng.choice((0.0, 0.0, 0.3)),
        packed_qkv=rng.random() < 0.5,
        sharpness=rng.choice((1.0, 1.0, 8.0)),
    )


def lucky_yardstick(row, case: AttentionCase, dtype: torch.dtype) -> bool:
    """With few elements eager's error may be small by luck: then allow twice that."""
    elements = case.nheads if row.quantity == "dgate" else sum(case.lengths) * case.nheads * case.headdim
    if elements >= 4000 or not math.isfinite(row.max_error):
        return False
    step = torch.finfo(dtype).eps
    return row.max_error <= 2 * row.eager_max_error + 4 * step * max(1, case.headdim / 16) and (
        row.mean_error <= row.eager_mean_error * (1 + 8 / elements**0.5) + step / 2
    )


# --- linear -------------------------------------------------------------------------------------------------


def whole_numbers(*shape: int, dtype: torch.dtype, most: int = 2, seed: int = 0) -> torch.Tensor:
    """Small integers: products of them are exact in any order."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=g).to(dtype)


def steps(depth: int, tile: int) -> int:
    """Steps of the depth, of which a part has at least one."""
    return -(-depth // (32 if tile == 128 else 64))


def check_drawn_products(rng: random.Random, forward: Callable, backward: Callable) -> None:
    """A product and its backward of integers: any tile, part, tail and epilogue must be exact.

    forward, backward: `linear_fwd_with` and `linear_bwd_with` of fastbert/backends/cuda/linear.py.
    """
    dtype = rng.choice(HALF)
    rows, depth, out = rng.randint(1, 140), 8 * rng.randint(1, 20), rng.randint(1, 140)
    tile = rng.choice((16, 32, 64, 128))
    plan = tile, rng.randint(1, min(4, steps(depth, tile)))
    x = whole_numbers(rows, depth + 8, dtype=dtype, most=1, seed=1)[:, :depth]
    activation, gated = rng.choice(((None, None), ("relu", None), ("relu", rng.choice(GATES))))
    b_columns = out if gated is None else 2 * out
    weight = whole_numbers(b_columns, depth, dtype=dtype, most=1, seed=2)
    bias = whole_numbers(b_columns, dtype=dtype, seed=3) if rng.random() < 0.5 else None
    residual = whole_numbers(rows, out, dtype=dtype, seed=4) if rng.random() < 0.5 else None
    y, pre = forward(plan, LinearInputs(x, weight, bias, activation, residual, gated), True)
    z = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    truth = activate_ref(z, activation, gated) + (0 if residual is None else residual.float())
    name = f"{rows} {depth} {out} {plan} {activation} {gated}"
    assert_same_values(y, truth.to(dtype), name)
    if activation:
        assert_same_values(pre, z.to(dtype), name)
    out = 8 * -(-out // 8)
    tile = rng.choice((64, 128))
    plans = (
        (tile, rng.randint(1, min(3, steps(out, tile)))),
        (128, rng.randint(1, min(3, steps(rows, 128)))),
    )
    dy, weight = (whole_numbers(n, out, dtype=dtype, most=1, seed=5) for n in (rows, depth))
    weight = weight.T.contiguous()
    dx, dweight, dbias = backward(plans, dy, LinearSaved(x, weight), LinearNeeds())
    assert_same_values(dx, (dy.float() @ weight.float()).to(dtype), f"dx {name} {plans}")
    assert_same_values(dweight, (dy.float().T @ x.float()).to(dtype), f"dweight {name} {plans}")
    assert_same_values(dbias, dy.float().sum(0).to(dtype), f"dbias {name}")
