"""Fixed attention patterns as maps, written cell by cell: the oracle of the patterns without maps."""

from __future__ import annotations

import numpy as np

from fastbert.layers import patterns

ALL = [i for i, name in enumerate(patterns.NAMES) if name != "learned"]


def dense(pattern, n, separators):
    """The map of a pattern for one sequence, (n, n) in float64, cell by cell."""
    weights = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            weights[i, j] = {
                patterns.CURRENT: j == i,
                patterns.PREVIOUS: j == i - 1,
                patterns.NEXT: j == i + 1,
                patterns.LEFT_CONTEXT: (j + 1) ** 3 * (j <= i - 2),
                patterns.RIGHT_CONTEXT: (n - j) ** 3 * (j >= i + 2),
                patterns.END: (j + 1) ** 3,
                patterns.START: (n - j) ** 3,
                patterns.FIRST_TOKEN: j == 0,
                patterns.SEPARATORS: separators[j],
            }[pattern]
        if not weights[i].any():
            weights[i, i] = 1
    return weights / weights.sum(1, keepdims=True)
