"""Activations of float32 tiles, for the epilogue of a product.

Math       gelu       z Φ(z) = max(z, 0) - u Q(u), with u = |z| and Q(u) = 0.5 erfc(u / √2) the normal tail
           gelu_tanh  0.5 z (1 + tanh(v)) = z / (1 + exp(-2v)), v = √(2/π) (z + 0.044715 z³)
           relu       max(z, 0)
           silu       z / (1 + exp(-z))
Precision  Q(u) = t P(t) exp(-u²/2) with t = 1 / (1 + p u). P and p minimise the largest relative error over
           [0, 14]: degree 8 is off by 3e-8, less than float32's own rounding. Degree 5 is off by 8e-6, a
           four-hundredth of bfloat16's step: enough to round 99.9% of the results correctly in bfloat16.
           Nothing is subtracted from 1, so that the negative tail keeps its digits, which forms with a tanh
           or with 1 + erf lose. NaN stays NaN. gelu at -∞ is 0, its limit.
"""

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def gelu(z, FEW_DIGITS: tl.constexpr):
    """z Φ(z); `FEW_DIGITS` where the result will be rounded to bfloat16."""
    u = tl.minimum(tl.abs(z), 20.0, propagate_nan=tl.PropagateNan.ALL)  # Q(20) is 0 in float32
    if FEW_DIGITS:
        t = 1.0 / (1.0 + 0.3 * u)
        p = -0.07710549 * t + 0.21606454
        p = p * t - 0.01698279
        p = p * t + 0.14421667
        p = p * t + 0.11373647
        p = p * t + 0.12007477
    else:
        t = 1.0 / (1.0 + 0.35 * u)
        p = -0.02914839 * t + 0.14398279
        p = p * t - 0.25573518
        p = p * t + 0.15919558
        p = p * t - 0.02312274
        p = p * t + 0.10551264
        p = p * t + 0.11983191
        p = p * t + 0.13986197
        p = p * t + 0.1396214
    return tl.maximum(z, 0.0) - u * t * p * tl.exp2(u * u * -0.7213475204444817)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, FEW_DIGITS: tl.constexpr):
    """The activation of `z` in float32; `ACTIVATION` is a name of fastbert.ops.linear or None."""
    if ACTIVATION == "gelu":
        z = gelu(z, FEW_DIGITS)
    elif ACTIVATION == "gelu_tanh":
        z = z / (1.0 + _exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    elif ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION is not None:
        tl.static_assert(ACTIVATION == "silu")
        z = z / (1.0 + _exp(-z))
    return z
