"""Activations of float32 tiles, for the epilogue of a product; and their derivatives.

Math       gelu       z Φ(z) = max(z, 0) - u Q(u), with u = |z| and Q(u) = 0.5 erfc(u / √2) the normal tail
           gelu_tanh  0.5 z (1 + tanh(v)) = z / (1 + exp(-2v)), v = √(2/π) (z + 0.044715 z³)
           relu       max(z, 0)
           silu       z / (1 + exp(-z))
           tanh       z + z³ P(z²) where |z| < 0.625, to 5e-9 of its value; else ±(1 - 2 e / (1 + e))
           Derivatives as in fastbert/ops/activation.py. The logistic function s and s (1 - s) are made from
           e = exp(-2|v|) (silu: exp(-|z|), tanh: exp(-2|z|)): s = 1 / (1 + e) or e / (1 + e), and
           s (1 - s) = e / (1 + e)².
           The slope of gelu is 1 + d where z > 0, else -d, with d = u φ(u) - Q(u). It is 0.5 + z V(z²) where
           |z| < 1 and it is not rounded to bfloat16.
           Cheap gelu: Q(u) = exp2(R(u)), R of degree 4, one for bfloat16 and one for float16.
           Its slope: d = exp(-u²/2) W(u), W of degree 5 for bfloat16, 6 for float16, W(0) = -1/2.
Precision  Q(u) = t P(t) exp(-u²/2) with t = (1 + a u + b u²)^(-1/2). a, b and P minimise the largest relative
           error over [0, 14]. Degree 7 is off by 6e-9, less than float32's own rounding. Degree 4 is off by
           2e-6, a two-thousandth of bfloat16's step: enough to round 99.9% of the results correctly in
           bfloat16. Nothing is subtracted from 1, so the negative tail keeps its digits, which forms with a
           tanh or with 1 + erf lose. NaN stays NaN. gelu at -∞ is 0, its limit; derivatives at ±∞ are their
           limits.
           R for bfloat16 minimises the largest relative error of Q over [0, 4] (5e-4, a quarter of a step).
           R for float16 is a least-squares fit over [0, 5], relative to the error of PyTorch's two ops at u,
           and weighted by the 0.4th power of the normal density: common values come out best (Q to 4e-4 at
           u < 2, to 2.7e-3 at u < 4). Up to 4.5 no stretch half a unit wide has an error above PyTorch's.
           Beyond 4, where gelu is less than 2e-4, relative errors grow; gelu is then off by less than 1e-6,
           and by 3e-35 at -∞ in bfloat16.
           V minimises the largest error, 6e-11. Near 0 d is -1/2, of which the special functions of a GPU
           are off by 4e-7; farther out by less than 1.4e-7.
           W minimises the largest error of d: 7.1e-5 or 1.8e-5. That is for a slope that multiplies a product
           and is rounded once with it: where PyTorch has rounded the product first, its error is larger.
Speed      The root is one instruction, a division seven. Between two tiles of a product each one counts.
           Cheap gelu is 8 instructions, one of them special (exp2); the other one 15, two special. The
           slope's are 12 (13 in float16) and 17.
"""

import os

import triton
import triton.language as tl


def _wants_exact_gelu() -> bool:
    wanted = os.environ.get("FASTBERT_EXACT_GELU", "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"FASTBERT_EXACT_GELU: expected 0, 1 or nothing, got {wanted!r}")
    return wanted == "1"


# Whether gelu in half precision is the correctly rounded one. By default it obeys the error rule: with the
# product before it, its error is no larger than that of PyTorch's two ops.
EXACT_GELU = _wants_exact_gelu()


@triton.jit
def _exp(x):
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _divided(x, by, FEW_DIGITS: tl.constexpr):
    """x / by for by >= 1, infinity included."""
    if FEW_DIGITS:
        root = tl.rsqrt(by)
        x = x * root * root
    else:
        x = x / by
    return x


@triton.jit
def _gelu_tail(u, FEW_DIGITS: tl.constexpr):
    """(t, P(t)); their product is Q(u) / exp(-u²/2)."""
    square = u * u
    if FEW_DIGITS:
        t = tl.rsqrt(0.09301 * square + (0.5698 * u + 1.0))
        p = 0.10227121 * t + 0.051208741
        p = p * t + 0.11274342
        p = p * t + 0.11200237
        p = p * t + 0.12177353
    else:
        t = tl.rsqrt(0.11038 * square + (0.6004 * u + 1.0))
        p = 0.019163624 * t - 0.052328645
        p = p * t + 0.061336159
        p = p * t + 0.02858794
        p = p * t + 0.086181955
        p = p * t + 0.10464792
        p = p * t + 0.11987325
        p = p * t + 0.13253779
    return t, p


@triton.jit
def _magnitude(z, MOST: tl.constexpr):
    """|z|, at most MOST. Beyond 20 exp(-u²/2) and its multiples are 0 in float32."""
    return tl.minimum(tl.abs(z), MOST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(z, FEW_DIGITS: tl.constexpr):
    """z Φ(z); `FEW_DIGITS` where the result will be rounded to bfloat16."""
    u = _magnitude(z, 20.0)
    t, p = _gelu_tail(u, FEW_DIGITS)
    return tl.maximum(z, 0.0) - u * t * p * tl.exp2(u * u * -0.7213475204444817)


@triton.jit
def cheap_gelu(z, FEW_DIGITS: tl.constexpr):
    """z Φ(z) where the result will be rounded to float16, or with `FEW_DIGITS` to bfloat16."""
    u = _magnitude(z, 16.0 if FEW_DIGITS else 15.0)  # where R is least
    if FEW_DIGITS:
        r = 0.00263501 * u - 0.03713265
        r = r * u - 0.47983377
        r = r * u - 1.14143745
        r = r * u - 1.00072505
    else:
        r = 0.00318999 * u - 0.040898229
        r = r * u - 0.472460395
        r = r * u - 1.14547481
        r = r * u - 1.0005708
    return tl.maximum(z, 0.0) - u * tl.exp2(r)


@triton.jit
def tanh(z, FEW_DIGITS: tl.constexpr):
    """tanh(z); `FEW_DIGITS` as for `gelu`."""
    square = z * z
    p = 0.0206390861 - 0.00570498686 * square
    p = p * square - 0.0537397154
    p = p * square + 0.133314416
    p = p * square - 0.333332807
    u = tl.abs(z)
    e = _exp(-2.0 * u)
    far = 1.0 - 2.0 * _divided(e, 1.0 + e, FEW_DIGITS)
    return tl.where(u < 0.625, z + z * square * p, tl.where(z < 0, -far, far))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, FEW_DIGITS: tl.constexpr, CHEAP: tl.constexpr):
    """The activation of `z` in float32; `ACTIVATION` is a name of fastbert.ops.activation, or None.

    `FEW_DIGITS` as for `gelu`; `CHEAP`: by `cheap_gelu`.
    """
    if ACTIVATION == "gelu":
        if CHEAP:
            z = cheap_gelu(z, FEW_DIGITS)
        else:
            z = gelu(z, FEW_DIGITS)
    elif ACTIVATION == "gelu_tanh":
        z = _divided(z, 1.0 + _exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)), FEW_DIGITS)
    elif ACTIVATION == "relu":
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        z = _divided(z, 1.0 + _exp(-z), FEW_DIGITS)
    elif ACTIVATION is not None:
        tl.static_assert(ACTIVATION == "tanh")
        z = tanh(z, FEW_DIGITS)
    return z


@triton.jit
def _logistic(z, e, FEW_DIGITS: tl.constexpr):
    """(s, s (1 - s)) of the logistic function s at a number x with the sign of z and e = exp(-|x|)."""
    part = _divided(tl.where(z > 0, 1.0, e), 1.0 + e, FEW_DIGITS)
    return part, _divided(_divided(e, 1.0 + e, FEW_DIGITS), 1.0 + e, FEW_DIGITS)


@triton.jit
def _slope_polynomial(u, FEW_DIGITS: tl.constexpr):
    """W(u)."""
    if FEW_DIGITS:
        w = 0.0028755003 * u - 0.026164941
    else:
        w = 0.0082998143 - 0.00073464591 * u
        w = w * u - 0.040482324
    w = w * u + (0.10166006 if FEW_DIGITS else 0.11811384)
    w = w * u - (0.23730794 if FEW_DIGITS else 0.24521304)
    w = w * u + (0.79618587 if FEW_DIGITS else 0.79736814)
    return w * u - 0.5


@triton.jit
def _near_slope(square):
    """V(z²)."""
    v = 7.29499e-06 * square - 0.00011066908
    v = v * square + 0.0011525692
    v = v * square - 0.009498012
    v = v * square + 0.05984124
    v = v * square - 0.26596153
    return v * square + 0.7978846


@triton.jit
def slope(z, ACTIVATION: tl.constexpr, FEW_DIGITS: tl.constexpr, CHEAP: tl.constexpr = False):
    """The derivative of the activation at `z` in float32; `FEW_DIGITS` as for `gelu`.

    `CHEAP`: gelu's by `_slope_polynomial`, for a product that is rounded to half precision afterwards.
    """
    if ACTIVATION == "gelu":
        u = _magnitude(z, 20.0)
        if CHEAP:
            w = _slope_polynomial(u, FEW_DIGITS)
        else:
            t, p = _gelu_tail(u, FEW_DIGITS)
            w = u * 0.3989422804014327 - t * p
        d = w * tl.exp2(u * u * -0.7213475204444817)
        far = tl.where(z > 0, 1.0 + d, -d)
        if CHEAP or FEW_DIGITS:
            z = far
        else:
            z = tl.where(u < 1.0, 0.5 + z * _near_slope(u * u), far)
    elif ACTIVATION == "gelu_tanh":
        u = _magnitude(z, 20.0)
        e = _exp(-1.5957691216057308 * (u + 0.044715 * u * u * u))
        s, product = _logistic(z, e, FEW_DIGITS)
        # 2 u v' s (1 - s)
        rise = 1.5957691216057308 * (u + 0.134145 * u * u * u) * product
        z = s + tl.where(z > 0, rise, -rise)
    elif ACTIVATION == "relu":
        # 1 for NaN, as in PyTorch.
        z = tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "silu":
        u = tl.minimum(tl.abs(z), 120.0, propagate_nan=tl.PropagateNan.ALL)
        s, product = _logistic(z, _exp(-u), FEW_DIGITS)
        z = s + tl.where(z > 0, u, -u) * product
    else:
        tl.static_assert(ACTIVATION == "tanh")
        s, product = _logistic(z, _exp(-2.0 * tl.abs(z)), FEW_DIGITS)
        z = 4.0 * product
    return z
