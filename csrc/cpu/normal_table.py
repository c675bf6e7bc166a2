"""Makes normal_table.h, the table by which GELU looks up the normal distribution.

    python csrc/cpu/normal_table.py > csrc/cpu/normal_table.h

tests/cpu/test_normal_table.py checks that the committed file is this output. Needs mpmath, which comes with
PyTorch (by sympy), and NumPy.

Φ(-x) for 0 <= x < 6 is cut into INTERVALS of the same length. In each interval it is the polynomial

    kTail[0] + t (kTail[1] + t (… + t kTail[DEGREE])),  t = x - kPoint

kPoint is the first float, from 1/64 of an interval below the middle on, at which Φ(-x) is a float to within
EXACT of its rounding unit. The unit is 2^-24 where Φ(-x) > 1/4, so that 1 - Φ(-x) is a float there too. The
other coefficients minimise the sum of the squared relative errors at NODES Chebyshev points of the interval.
"""

from __future__ import annotations

import mpmath
import numpy as np

INTERVALS = 32
END = 6
DEGREE = 6
NODES = 64
EXACT = 2e-3
PER_LINE = 6
HEADER = """\
// Made by normal_table.py, which has the details. Φ(-x), the normal distribution's tail, for 0 <= x < 6: in
// the i-th of 32 intervals of the same length
//
//     kTail[0][i] + t (kTail[1][i] + t (… + t kTail[6][i])),  t = x - kPoint[i]
//
// kPoint is a float near the interval's middle at which Φ(-x) is almost exactly a float itself, and a
// multiple of 2^-24 where it is above 1/4, so that 1 - Φ is one too. The other coefficients are least squares
// of the relative error at Chebyshev's points. Largest relative error: 5e-8; below x = 2.5: 1e-8.
#pragma once

// clang-format off
namespace fastbert {
"""
FOOTER = """\
}  // namespace fastbert
// clang-format on
"""


def tail(x: mpmath.mpf | np.float32) -> mpmath.mpf:
    """Φ(-x)."""
    return mpmath.erfc(mpmath.mpf(float(x)) / mpmath.sqrt(2)) / 2


def nearly_a_float(value: mpmath.mpf) -> bool:
    """Whether `value` is a float, or above 1/4 a multiple of 2^-24, to within EXACT of that unit."""
    unit = mpmath.mpf(2) ** -24 if value > 0.25 else mpmath.mpf(float(np.spacing(np.float32(float(value)))))
    units = value / unit
    return abs(mpmath.nint(units) - units) < EXACT


def point(interval: int) -> np.float32:
    """kPoint of an interval."""
    length = END / INTERVALS
    x = np.float32((interval + 0.5) * length - length / 64)
    while not nearly_a_float(tail(x)):
        x = np.nextafter(x, np.float32(END))
    return x


def coefficients(interval: int, at: np.float32) -> list[np.float32]:
    """kTail of an interval whose kPoint is `at`: the constant first."""
    half = mpmath.mpf(END) / INTERVALS / 2
    middle = (2 * interval + 1) * half
    constant = np.float32(float(tail(at)))
    products, right = mpmath.zeros(DEGREE, DEGREE), mpmath.zeros(DEGREE, 1)
    for node in range(NODES):
        x = middle + half * mpmath.cos(mpmath.pi * (2 * node + 1) / (2 * NODES))
        value = mpmath.erfc(x / mpmath.sqrt(2)) / 2
        t = x - mpmath.mpf(float(at))
        # Each power of t over the value, in units of half the interval.
        row = [t * (t / half) ** power / value for power in range(DEGREE)]
        rest = (value - mpmath.mpf(float(constant))) / value
        for i in range(DEGREE):
            right[i] += row[i] * rest
            for j in range(DEGREE):
                products[i, j] += row[i] * row[j]
    found = mpmath.lu_solve(products, right)
    return [constant, *(np.float32(float(found[i] / half**i)) for i in range(DEGREE))]


def lines(values: list[np.float32], indent: str) -> str:
    """The numbers as C++ floats, PER_LINE in a line."""
    texts = [f"{value:.9g}f" for value in values]
    rows = [texts[i : i + PER_LINE] for i in range(0, len(texts), PER_LINE)]
    return ",\n".join(indent + ", ".join(row) for row in rows)


def table() -> str:
    """The text of normal_table.h."""
    with mpmath.workdps(40):
        points = [point(i) for i in range(INTERVALS)]
        columns = [coefficients(i, at) for i, at in enumerate(points)]
    rows = [list(row) for row in zip(*columns, strict=True)]
    point_lines = lines(points, " " * 4)
    tail_lines = ",\n".join("    {\n" + lines(row, " " * 8) + "}" for row in rows)
    array = "alignas(64) static constexpr float"
    return (
        f"{HEADER}\n{array} kPoint[{INTERVALS}] = {{\n{point_lines}}};\n"
        f"\n{array} kTail[{DEGREE + 1}][{INTERVALS}] = {{\n{tail_lines}}};\n\n{FOOTER}"
    )


if __name__ == "__main__":
    print(table(), end="")
