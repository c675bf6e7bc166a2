"""PTX instructions in NumPy, transcribed from the text and the tables of the PTX ISA.

Everything here is bit patterns of 32 lanes or more: arrays of uint64, zero above a type's width. Integers are
computed as Python's (exact, then cut to the type), floats as NumPy's (IEEE, rounded to nearest even).

`FORMS` has a row for each scalar form: operand types, result types, function and allowed error. The functions
at the end are those that lanes do together: shfl, redux, ldmatrix, stmatrix, mma and wgmma.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

Bits = np.ndarray

WARP = 32


def width(kind: str) -> int:
    """Bits of a type such as `s32`, `bf16`, `b16x2` or `pred`."""
    if kind == "pred":
        return 1
    if kind.endswith("x2"):
        return 2 * width(kind[:-2])
    return int(re.search(r"\d+$", kind)[0])


def to_integers(bits: Bits, kind: str) -> np.ndarray:
    """Python's integers, with the sign of `s` types."""
    size = width(kind)
    values = [int(b) & ((1 << size) - 1) for b in bits]
    if kind[0] == "s":
        values = [v - (1 << size) if v >> (size - 1) else v for v in values]
    return np.array(values, dtype=object)


def from_integers(values: Sequence[int], kind: str) -> Bits:
    """Cut to the type."""
    mask = (1 << width(kind)) - 1
    return np.array([int(v) & mask for v in values], dtype=np.uint64)


def to_floats(bits: Bits, kind: str) -> np.ndarray:
    """float16, float32 or float64; bf16 as float32, of which it is the upper half."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    plain = {"f16": (np.uint16, np.float16), "f32": (np.uint32, np.float32), "f64": (np.uint64, np.float64)}
    return bits.astype(plain[kind][0]).view(plain[kind][1])


def from_floats(values: np.ndarray, kind: str) -> Bits:
    """The pattern of values that have the type; bf16's must be float32 without lower bits."""
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint64)
    unsigned = {"f16": np.uint16, "f32": np.uint32, "f64": np.uint64}[kind]
    return values.view(unsigned).astype(np.uint64)


def is_nan(bits: Bits, kind: str) -> np.ndarray:
    """Of each pattern, whether it is a NaN."""
    return np.isnan(to_floats(bits, kind))


def flushed(x: np.ndarray) -> np.ndarray:
    """.ftz: subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def round_to_odd(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """float64 `high + low` cut with a sticky last bit, so that a later rounding to a short type is exact."""
    even = (high.view(np.uint64) & np.uint64(1)) == 0
    toward = np.where(low > 0, np.inf, -np.inf)
    return np.where((low != 0) & even & np.isfinite(high), np.nextafter(high, toward), high)


def fused_to_odd(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c by `round_to_odd`: a product of two floats is exact in float64."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    part = total - product
    rest = (product - (total - part)) + (c - part)
    return round_to_odd(total, np.where(np.isfinite(rest), rest, 0.0))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once."""
    return fused_to_odd(a, b, c).astype(np.float32)


def nearest_bf16(x: np.ndarray) -> np.ndarray:
    """float32 -> float32 that is a bf16: to nearest even; every NaN becomes 0x7FFF."""
    pattern = x.view(np.uint32).astype(np.uint64)
    upper, lower = pattern >> np.uint64(16), pattern & np.uint64(0xFFFF)
    up = (lower > 0x8000) | ((lower == 0x8000) & ((upper & np.uint64(1)) == 1))
    return to_floats(np.where(np.isnan(x), np.uint64(0x7FFF), upper + up), "bf16")


def fused_halves(a: np.ndarray, b: np.ndarray, c: np.ndarray, kind: str) -> np.ndarray:
    """a * b + c of f16 or bf16, rounded once; every NaN becomes 0x7FFF."""
    found = fused_to_odd(a, b, c)
    if kind == "f16":
        return np.where(np.isnan(found), np.uint16(0x7FFF).view(np.float16), found.astype(np.float16))
    near = found.astype(np.float32)
    tie = ((near.view(np.uint32) & np.uint32(0xFFFF)) == 0x8000) & (near != found) & np.isfinite(near)
    toward = np.where(found > near, np.float32(np.inf), np.float32(-np.inf))
    return nearest_bf16(np.where(tie, np.nextafter(near, toward), near))


def product_of_halves(a: np.ndarray, b: np.ndarray, kind: str) -> np.ndarray:
    """a * b of f16 or bf16, rounded once: with a zero of its sign added."""
    return fused_halves(a, b, np.copysign(np.zeros_like(a), a * b), kind)


# error of .approx forms: (relative, absolute), from the ISA's tables; None is exact
Error = tuple[float, float] | None


@dataclass(frozen=True)
class Form:
    """A scalar instruction.

    Attributes:
        name: opcode with modifiers, as written.
        results: type of each result. Vectors are several.
        operands: type of each operand.
        call: operands as `to_integers` or `to_floats` gives them (b, u, s: integers) -> results likewise.
        error: relative and absolute, of the float results.
        defined: of the operands: where the ISA says what comes out.
        shape: text of the operand list, with {d0} and {a0} for registers.
    """

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    call: Callable[..., object]
    error: Error = None
    defined: Callable[..., np.ndarray] | None = None
    shape: str = ""

    def text(self) -> str:
        """The instruction with {d0}, {a0} … for registers."""
        if self.shape:
            return f"{self.name} {self.shape};"
        names = [f"{{d{i}}}" for i in range(len(self.results))]
        names += [f"{{a{i}}}" for i in range(len(self.operands))]
        return f"{self.name} {', '.join(names)};"

    def values(self, operands: Sequence[Bits]) -> list[np.ndarray]:
        """Operands as `call` takes them."""
        return [
            to_floats(b, k) if is_float(k) else to_integers(b, k)
            for b, k in zip(operands, self.operands, strict=True)
        ]

    def __call__(self, operands: Sequence[Bits]) -> list[Bits]:
        """The results' patterns."""
        with np.errstate(all="ignore"):
            found = self.call(*self.values(operands))
        found = found if isinstance(found, tuple) else (found,)
        return [
            from_floats(v, k) if is_float(k) else from_integers(v, k)
            for v, k in zip(found, self.results, strict=True)
        ]


def is_float(kind: str) -> bool:
    """f16, bf16, f32 or f64."""
    return kind in ("f16", "bf16", "f32", "f64")


FORMS: dict[str, Form] = {}


def _form(name: str, results: str, operands: str, call: Callable[..., object], **more: object) -> None:
    if name in FORMS:
        raise ValueError(name)
    FORMS[name] = Form(name, tuple(results.split()), tuple(operands.split()), call, **more)


def _each(function: Callable[..., int]) -> Callable[..., np.ndarray]:
    """An integer function of one lane, for all lanes."""
    return lambda *lanes: np.array([function(*map(int, at)) for at in zip(*lanes, strict=True)], dtype=object)


# ---- 9.7.1 integer arithmetic

for _t in ("s16", "u16", "s32", "u32", "s64", "u64"):
    _n = width(_t)
    _wide = f"{_t[0]}{2 * _n}"
    _form(f"add.{_t}", _t, f"{_t} {_t}", lambda a, b: a + b)
    _form(f"sub.{_t}", _t, f"{_t} {_t}", lambda a, b: a - b)
    _form(f"mul.lo.{_t}", _t, f"{_t} {_t}", lambda a, b: a * b)
    _form(f"mul.hi.{_t}", _t, f"{_t} {_t}", lambda a, b, n=_n: (a * b) >> n)
    _form(f"mad.lo.{_t}", _t, f"{_t} {_t} {_t}", lambda a, b, c: a * b + c)
    if _n <= 32:
        _form(f"mul.wide.{_t}", _wide, f"{_t} {_t}", lambda a, b: a * b)
        _form(f"mad.wide.{_t}", _wide, f"{_t} {_t} {_wide}", lambda a, b, c: a * b + c)
    _form(f"min.{_t}", _t, f"{_t} {_t}", _each(min))
    _form(f"max.{_t}", _t, f"{_t} {_t}", _each(max))

    def _divisible(a, b, t=_t):
        lowest = -(1 << (width(t) - 1))
        overflows = (a == lowest) & (b == -1) if t[0] == "s" else np.zeros(len(a), dtype=bool)
        return (b != 0) & ~overflows.astype(bool)

    def _quotient(a, b):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0

    _form(f"div.{_t}", _t, f"{_t} {_t}", _each(_quotient), defined=_divisible)
    _form(f"rem.{_t}", _t, f"{_t} {_t}", _each(lambda a, b: a - _quotient(a, b) * b), defined=_divisible)
    if _t[0] == "s":
        _form(f"abs.{_t}", _t, _t, _each(abs))
        _form(f"neg.{_t}", _t, _t, lambda a: -a)


def _field(a: int, start: int, length: int, bits: int, signed: bool) -> int:
    """bfe: bit i is a's bit start + i, or the sign bit beyond the field and beyond the top."""
    start, length, top = start & 255, length & 255, bits - 1
    sign = a >> min(start + length - 1, top) & 1 if signed and length else 0
    found = 0
    for i in range(bits):
        inside = i < length and start + i <= top
        found |= (a >> (start + i) & 1 if inside else sign) << i
    return found


def _inserted(a: int, b: int, start: int, length: int, bits: int) -> int:
    """bfi: a's low bits over b's from `start` on."""
    start, length = start & 255, length & 255
    for i in range(length):
        if start + i < bits:
            b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
    return b


for _s in "us":
    _form(f"bfe.{_s}32", "b32", "b32 b32 b32", _each(lambda a, b, c, s=_s: _field(a, b, c, 32, s == "s")))
_form("bfi.b32", "b32", "b32 b32 b32 b32", _each(lambda a, b, c, d: _inserted(a, b, c, d, 32)))
_form("popc.b32", "u32", "b32", _each(lambda a: a.bit_count()))

# ---- 9.7.8 logic and shifts

for _t in ("pred", "b16", "b32", "b64"):
    _form(f"and.{_t}", _t, f"{_t} {_t}", lambda a, b: a & b)
    _form(f"or.{_t}", _t, f"{_t} {_t}", lambda a, b: a | b)
    _form(f"xor.{_t}", _t, f"{_t} {_t}", lambda a, b: a ^ b)
    _form(f"not.{_t}", _t, _t, lambda a: ~a)
for _n in (16, 32, 64):
    # amounts are 32 bits unsigned, and all beyond the register's width count as the width
    _form(f"shl.b{_n}", f"b{_n}", f"b{_n} u32", _each(lambda a, b, n=_n: a << min(b, n)))
    for _s in "sub":
        _form(f"shr.{_s}{_n}", f"{_s}{_n}", f"{_s}{_n} u32", _each(lambda a, b, n=_n: a >> min(b, n)))


# ---- 9.7.3 floating point


def _float_min(a: np.ndarray, b: np.ndarray, lowest: bool, nan: bool, canonical: float) -> np.ndarray:
    """-0 < +0; without .NaN a NaN counts as missing."""
    before = (a < b) | ((a == b) & np.signbit(a) & ~np.signbit(b))
    found = np.where(before == lowest, a, b)
    found = np.where(np.isnan(a), b, np.where(np.isnan(b), a, found))
    either = np.isnan(a) | np.isnan(b)
    both = np.isnan(a) & np.isnan(b)
    return np.where(either if nan else both, canonical, found).astype(a.dtype)


_NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)

for _r, _f in (("", ""), (".rn", ""), (".ftz", "ftz"), (".rn.ftz", "ftz")):
    _in = flushed if _f else (lambda x: x)
    _form(f"add{_r}.f32", "f32", "f32 f32", lambda a, b, f=_in: f(f(a) + f(b)))
    _form(f"sub{_r}.f32", "f32", "f32 f32", lambda a, b, f=_in: f(f(a) - f(b)))
    _form(f"mul{_r}.f32", "f32", "f32 f32", lambda a, b, f=_in: f(f(a) * f(b)))
    if ".rn" in _r:
        _form(f"fma{_r}.f32", "f32", "f32 f32 f32", lambda a, b, c, f=_in: f(fused(f(a), f(b), f(c))))
        _form(f"div{_r}.f32", "f32", "f32 f32", lambda a, b, f=_in: f(f(a) / f(b)))
        _form(f"sqrt{_r}.f32", "f32", "f32", lambda a, f=_in: f(np.sqrt(f(a))))
        _form(f"rcp{_r}.f32", "f32", "f32", lambda a, f=_in: f(np.float32(1) / f(a)))
    else:
        _form(f"abs{_r}.f32", "f32", "f32", lambda a, f=_in: f(np.abs(a)))
        _form(f"neg{_r}.f32", "f32", "f32", lambda a, f=_in: f(-a))
    for _nan in ("", ".NaN") if ".rn" not in _r else ():
        for _op in ("min", "max"):
            _form(
                f"{_op}{_r}{_nan}.f32",
                "f32",
                "f32 f32",
                lambda a, b, f=_in, low=_op == "min", nan=bool(_nan): _float_min(
                    f(a), f(b), low, nan, _NAN32
                ),
            )
_form("copysign.f32", "f32", "f32 f32", lambda a, b: np.copysign(b, a))


def _double(call: Callable[..., np.ndarray], ftz: bool = True) -> Callable[..., np.ndarray]:
    """Computed in float64 and rounded once; with .ftz subnormal operands and results are zeros."""

    def found(*args: np.ndarray) -> np.ndarray:
        args = [flushed(a) if ftz else a for a in args]
        result = call(*(a.astype(np.float64) for a in args)).astype(np.float32)
        return flushed(result) if ftz else result

    return found


# the errors of 9.7.3.x's tables: ex2 2 units in the last place, rsqrt 2^-22.9, lg2 absolute 2^-22 near 1,
# tanh 2^-11, rcp 1 unit, sin and cos not here
_ULP = 2.0**-23
for _f in ("", ".ftz"):
    _form(f"ex2.approx{_f}.f32", "f32", "f32", _double(np.exp2, bool(_f)), error=(2 * _ULP, 2.0**-149))
    rsqrt = _double(lambda a: 1 / np.sqrt(a), bool(_f))
    _form(f"rsqrt.approx{_f}.f32", "f32", "f32", rsqrt, error=(2 * _ULP, 0))
    _form(f"rcp.approx{_f}.f32", "f32", "f32", _double(lambda a: 1 / a, bool(_f)), error=(_ULP, 2.0**-149))
    _form(f"sqrt.approx{_f}.f32", "f32", "f32", _double(np.sqrt, bool(_f)), error=(2 * _ULP, 2.0**-149))
    _form(f"lg2.approx{_f}.f32", "f32", "f32", _double(np.log2, bool(_f)), error=(2 * _ULP, 2.0**-22))
_form("tanh.approx.f32", "f32", "f32", _double(np.tanh, False), error=(2.0**-10.987, 2.0**-149))


def _usual_divisor(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx and div.full: 2 units in the last place where the divisor and the quotient are usual."""
    b, quotient = np.abs(b.astype(np.float64)), np.abs(a.astype(np.float64) / b.astype(np.float64))
    return (
        ((b >= 2.0**-126) & (b <= 2.0**126) & ((quotient >= 2.0**-126) | (a == 0)))
        | np.isnan(a)
        | np.isnan(b)
    )


for _f, _m in itertools.product(("", ".ftz"), ("approx", "full")):
    _quotients = {"call": _double(np.divide, bool(_f)), "error": (2 * _ULP, 0), "defined": _usual_divisor}
    _form(f"div.{_m}{_f}.f32", "f32", "f32 f32", **_quotients)

# ---- 9.7.4 half precision; a NaN result is 0x7FFF

_NAN16, _NANB16 = np.uint16(0x7FFF).view(np.float16), to_floats(np.array([0x7FFF], np.uint64), "bf16")[0]


# Arithmetic is of f32: what kernels do to halves themselves are signs and extremes. But where a product of
# halves is rounded to their type, compilers multiply halves.
for _k, _canonical in (("f16", _NAN16), ("bf16", _NANB16)):
    _pairs = [("abs", 1, np.abs), ("neg", 1, np.negative)]
    for _op, _nan in itertools.product(("min", "max"), ("", ".NaN")):
        _call = partial(_float_min, lowest=_op == "min", nan=bool(_nan), canonical=_canonical)
        _pairs.append((f"{_op}{_nan}", 2, _call))
    _form(f"mul.{_k}", _k, f"{_k} {_k}", partial(product_of_halves, kind=_k))
    _form(f"fma.rn.{_k}", _k, f"{_k} {_k} {_k}", partial(fused_halves, kind=_k))
    for _op, _count, _call in _pairs:
        _form(f"{_op}.{_k}", _k, " ".join([_k] * _count), _call)

        def _both(*words: np.ndarray, call=_call, k=_k) -> np.ndarray:
            words = [np.array([int(w) for w in word], np.uint64) for word in words]
            low = from_floats(call(*(to_floats(w & np.uint64(0xFFFF), k) for w in words)), k)
            high = from_floats(call(*(to_floats(w >> np.uint64(16), k) for w in words)), k)
            return low | high << np.uint64(16)

        _form(f"{_op}.{_k}x2", f"{_k}x2", " ".join([f"{_k}x2"] * _count), _both)

# ---- 9.7.5 and 9.7.6 comparison and selection

_ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
for _t in ("b16", "b32", "b64", "u16", "s16", "u32", "s32", "u64", "s64"):
    for _c, _call in _ORDERED.items():
        if _t[0] != "b" or _c in ("eq", "ne"):
            _form(f"setp.{_c}.{_t}", "pred", f"{_t} {_t}", lambda a, b, c=_call: c(a, b).astype(bool))


def _compared(a, b, call, unordered):
    nan = np.isnan(a) | np.isnan(b)
    return np.where(nan, unordered, call(a, b))


for _t in ("f16", "bf16", "f32"):
    for _c, _call in _ORDERED.items():
        _form(f"setp.{_c}.{_t}", "pred", f"{_t} {_t}", lambda a, b, c=_call: _compared(a, b, c, False))
        _form(f"setp.{_c}u.{_t}", "pred", f"{_t} {_t}", lambda a, b, c=_call: _compared(a, b, c, True))
    _form(f"setp.nan.{_t}", "pred", f"{_t} {_t}", lambda a, b: np.isnan(a) | np.isnan(b))
    _form(f"setp.num.{_t}", "pred", f"{_t} {_t}", lambda a, b: ~(np.isnan(a) | np.isnan(b)))


def _compared_halves(a, b, call, kind):
    """setp of pairs: the first predicate is that of the lower halves."""
    words = [np.array([int(w) for w in word], np.uint64) for word in (a, b)]
    found = []
    for shift in (0, 16):
        low, high = (to_floats(w >> np.uint64(shift) & np.uint64(0xFFFF), kind) for w in words)
        found.append(_compared(low, high, call, False))
    return tuple(found)


for _t in ("f16", "bf16"):
    for _c, _call in _ORDERED.items():
        _form(
            f"setp.{_c}.{_t}x2",
            "pred pred",
            f"{_t}x2 {_t}x2",
            lambda a, b, c=_call, k=_t: _compared_halves(a, b, c, k),
            shape="{d0}|{d1}, {a0}, {a1}",
        )
for _t in ("b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
    _k = f"b{width(_t)}"
    _form(f"selp.{_t}", _k, f"{_k} {_k} pred", lambda a, b, p: np.where(p.astype(bool), a, b))

# ---- 9.7.9 moves and conversions

for _t in ("pred", "b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"):
    _k = _t if _t == "pred" else f"b{width(_t)}"
    _form(f"mov.{_t}", _k, _k, lambda a: a)


def pieces(total: int, part: int) -> list[Form]:
    """mov.b<total> between a register and a vector of registers; the first has the lowest bits."""
    count = total // part
    names = [f"{{a{i}}}" for i in range(count)]
    outs = [f"{{d{i}}}" for i in range(count)]

    def packed(*parts: np.ndarray) -> np.ndarray:
        return sum(p << (i * part) for i, p in enumerate(parts))

    def unpacked(whole: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple((whole >> (i * part)) & ((1 << part) - 1) for i in range(count))

    name, one, many = f"mov.b{total}", (f"b{total}",), (f"b{part}",) * count
    return [
        Form(name, one, many, packed, shape="{d0}, {{" + ", ".join(names) + "}}"),
        Form(name, many, one, unpacked, shape="{{" + ", ".join(outs) + "}}, {a0}"),
    ]


_INTEGERS = [f"{s}{n}" for n in (8, 16, 32, 64) for s in "us"]
for _from, _to in itertools.permutations(_INTEGERS, 2):
    _form(f"cvt.{_to}.{_from}", _to, _from, lambda a: a)


def _nearest_float(a: np.ndarray) -> np.ndarray:
    """Integers to f32, to nearest even: by their top 53 bits and a sticky one."""
    found = []
    for value in a:
        size = abs(value)
        shift = max(size.bit_length() - 53, 0)
        # 53 bits and a sticky last bit: float64 has them, and float32 rounds them once
        kept = size >> shift | int(bool(size & ((1 << shift) - 1)))
        found.append(np.copysign(np.float64(kept) * 2.0**shift, -1.0 if value < 0 else 1.0))
    return np.array(found, np.float64).astype(np.float32)


for _i in _INTEGERS:
    _form(f"cvt.rn.f32.{_i}", "f32", _i, _nearest_float)
_form("cvt.f32.bf16", "f32", "bf16", lambda a: a)
_form("cvt.f32.f16", "f32", "f16", lambda a: a.astype(np.float32))
_form("cvt.rn.f32.f64", "f32", "f64", lambda a: a.astype(np.float32))
_form("cvt.rn.bf16.f32", "bf16", "f32", nearest_bf16)
_form("cvt.rn.f16.f32", "f16", "f32", lambda a: np.where(np.isnan(a), _NAN16, a.astype(np.float16)))


def _two(kind: str) -> Callable[..., np.ndarray]:
    """cvt to a pair: the first operand is the upper half."""
    one = FORMS[f"cvt.rn.{kind}.f32"].call
    return lambda a, b: from_floats(one(b), kind) | from_floats(one(a), kind) << np.uint64(16)


for _k in ("f16", "bf16"):
    _form(f"cvt.rn.{_k}x2.f32", f"{_k}x2", "f32 f32", _two(_k))


def _cut(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """cvt.rzi: toward zero, to the limits of a signed type; NaN is 0."""
    most = 2 ** (width(kind) - 1)
    return lambda a: np.array(
        [0 if np.isnan(v) else int(np.clip(np.trunc(np.float64(v)), -most, most - 1)) for v in a], object
    )


for _i in ("s32", "s16"):
    _form(f"cvt.rzi.{_i}.f32", _i, "f32", _cut(_i))


def _e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest of the 127 numbers, on a tie the one whose pattern is even; 448 beyond; 0x7F for NaN."""
    pattern = np.arange(127)
    exponent, mantissa = pattern // 8, pattern % 8
    numbers = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size = np.minimum(np.abs(values.astype(np.float64)), 448)[:, None]
    distance = np.where(np.isnan(size), 0, np.abs(size - numbers))
    nearest = distance == distance.min(1, keepdims=True)
    odd_last = np.where(nearest, pattern % 2, 2)
    found = odd_last.argmin(1).astype(np.uint64) | np.signbit(values).astype(np.uint64) << np.uint64(7)
    return np.where(np.isnan(values), np.uint64(0x7F), found)


_form("cvt.rn.satfinite.e4m3x2.f32", "b16", "f32 f32", lambda a, b: _e4m3(b) | _e4m3(a) << np.uint64(8))


def _permuted(a: int, b: int, selector: int) -> int:
    """prmt: four of the eight bytes b:a, or their signs."""
    found = 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
        found |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * i
    return found


_form("prmt.b32", "b32", "b32 b32 b32", _each(_permuted))

# ---- 9.7.9 and 9.7.13 what a warp's lanes do together


def shfl(mode: str, values: Bits, by: Bits, c: Bits) -> tuple[Bits, np.ndarray]:
    """shfl.sync of all 32 lanes: the lanes' results, and whether each one's source was in range."""
    found, valid = [], []
    for lane in range(WARP):
        offset, clamp, mask = int(by[lane]) & 31, int(c[lane]) & 31, int(c[lane]) >> 8 & 31
        highest = lane & mask | clamp & ~mask & 31
        source = lane ^ offset if mode == "bfly" else lane & mask | offset & ~mask & 31
        inside = source <= highest
        found.append(values[source if inside else lane])
        valid.append(inside)
    return np.array(found, np.uint64), np.array(valid)


def redux(op: str, values: Bits, members: int, kind: str) -> int:
    """redux.sync.<op>.<kind> over the lanes of a mask."""
    chosen = [v for lane, v in enumerate(to_integers(values, kind)) if members >> lane & 1]
    return int(from_integers([{"add": sum, "min": min, "max": max}[op](chosen)], kind)[0])


# ---- 9.7.14 matrices. A lane of a warp is group * 4 + member; the tables give row and column of element i


def group_member(lane: int) -> tuple[int, int]:
    """groupID and threadID_in_group of the ISA's tables."""
    return lane >> 2, lane % 4


def place_a(lane: int, i: int) -> tuple[int, int]:
    """m16n8k16, 16-bit A: a0 … a7, two per register."""
    group, member = group_member(lane)
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, member * 2 + (i & 1) if i < 4 else member * 2 + (i & 1) + 8


def place_b(lane: int, i: int) -> tuple[int, int]:
    """m16n8k16, 16-bit B: b0 … b3, two per register. (row, column) of the k x n matrix."""
    group, member = group_member(lane)
    return (member * 2 + (i & 1) if i < 2 else member * 2 + (i & 1) + 8), group


def place_c(lane: int, i: int) -> tuple[int, int]:
    """m16n8: c0 … c3, float32."""
    group, member = group_member(lane)
    return (group if i < 2 else group + 8), member * 2 + (i & 1)


def place_d_wgmma(thread: int, i: int) -> tuple[int, int]:
    """m64nN: d0 … of the thread in its warp group; A of a register operand has the same with 16 columns."""
    group, member = group_member(thread % 32)
    row = thread // 32 * 16 + group + 8 * (i // 2 % 2)
    return row, i // 4 * 8 + member * 2 + (i & 1)


Place = Callable[[int, int], tuple[int, int]]


def gathered(registers: Sequence[Bits], shape: tuple[int, int], place: Place, per: int) -> np.ndarray:
    """The matrix of patterns that lanes hold, `per` elements in each register, the first in the low bits."""
    matrix = np.full(shape, np.iinfo(np.uint64).max, np.uint64)
    bits = 32 // per
    for i in range(len(registers) * per):
        for lane in range(len(registers[0])):
            word = int(registers[i // per][lane])
            matrix[place(lane, i)] = word >> bits * (i % per) & ((1 << bits) - 1)
    return matrix


def scattered(matrix: np.ndarray, count: int, place: Place, per: int, lanes: int = WARP) -> list[Bits]:
    """The registers that lanes hold of a matrix of patterns."""
    bits = 32 // per
    registers = [np.zeros(lanes, np.uint64) for _ in range(count)]
    for i in range(count * per):
        for lane in range(lanes):
            registers[i // per][lane] |= np.uint64(int(matrix[place(lane, i)]) << bits * (i % per))
    return registers


def row_of(shared: bytes, address: int) -> list[int]:
    """Eight 16-bit elements."""
    return [int.from_bytes(shared[address + 2 * i : address + 2 * i + 2], "little") for i in range(8)]


def ldmatrix(shared: bytes, addresses: Sequence[int], count: int, trans: bool) -> list[Bits]:
    """ldmatrix.m8n8.x<count>(.trans).b16: lanes 8 m … 8 m + 7 give the rows of matrix m."""
    found = []
    for m in range(count):
        rows = [row_of(shared, int(addresses[8 * m + i])) for i in range(8)]
        register = []
        for lane in range(WARP):
            group, member = group_member(lane)
            pair = [rows[2 * member + e][group] if trans else rows[group][2 * member + e] for e in (0, 1)]
            register.append(pair[0] | pair[1] << 16)
        found.append(np.array(register, np.uint64))
    return found


def stmatrix(shared: bytes, addresses: Sequence[int], registers: Sequence[Bits], trans: bool) -> bytes:
    """stmatrix.m8n8.x<count>(.trans).b16: what shared memory has afterwards."""
    memory = bytearray(shared)
    for m, register in enumerate(registers):
        for lane in range(WARP):
            group, member = group_member(lane)
            for e in (0, 1):
                row, column = (2 * member + e, group) if trans else (group, 2 * member + e)
                at = int(addresses[8 * m + row]) + 2 * column
                memory[at : at + 2] = (int(register[lane]) >> 16 * e & 0xFFFF).to_bytes(2, "little")
    return bytes(memory)


# ---- 9.7.15 wgmma: operands in shared memory. Layouts are in units of 16 bytes, eight 16-bit elements: for
# each of (M or N, K) the sizes of its two modes and their steps, where a step may be the descriptor's leading
# or stride offset. The elements of a unit run along the major axis.

SWIZZLES = {0: 0, 32: 3, 64: 2, 128: 1}  # bytes -> the descriptor's bits 62 and 63
CANONICAL = {
    # K-major: (8, n) rows, 2 units of k
    ("k", 0): (((8, 1), ("stride",)), ((1, 0), ("leading",))),
    ("k", 32): (((8, 2), ("stride",)), ((2, 1), (0,))),
    ("k", 64): (((8, 4), ("stride",)), ((4, 1), (0,))),
    ("k", 128): (((8, 8), ("stride",)), ((8, 1), (0,))),
    # MN-major: units of m or n, (8, k) columns
    ("mn", 0): (((1, 0), ("stride",)), ((8, 1), ("leading",))),
    ("mn", 32): (((2, 1), ("leading",)), ((8, 2), ("stride",))),
    ("mn", 64): (((4, 1), ("leading",)), ((8, 4), ("stride",))),
    ("mn", 128): (((8, 1), ("leading",)), ((8, 8), ("stride",))),
}


def swizzle(address: int, width: int) -> int:
    """Bits 4 to 6 of an address, as many as the width has, change with bits 7 to 9."""
    bits = {0: 0, 32: 1, 64: 2, 128: 3}[width]
    row = address >> 7 & ((1 << bits) - 1)
    return address ^ row << 4


def shared_place(mn: int, k: int, start: int, leading: int, stride: int, width: int, major: str) -> int:
    """The byte at which element (mn, k) of a wgmma operand lies."""
    unit = (mn, k // 8) if major == "k" else (mn // 8, k)
    inside = k % 8 if major == "k" else mn % 8
    steps = {"leading": leading, "stride": stride, 0: 0}
    at = start
    for index, ((size, step), (outer,)) in zip(unit, CANONICAL[major, width], strict=True):
        at += index % size * step * 16 + index // size * steps[outer]
    return swizzle(at, width) + 2 * inside


def descriptor(start: int, leading: int, stride: int, width: int) -> int:
    """The 64 bits of a matrix descriptor."""
    fields = [(value & 0x3FFFF) >> 4 for value in (start, leading, stride)]
    return fields[0] | fields[1] << 16 | fields[2] << 32 | SWIZZLES[width] << 62
