"""Checks that counted draws have the expected shares; `make sweep` counts many, `make test` a few."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """A test of `size` draws, of which the sweep runs `many`."""
    return pytest.mark.parametrize("size", [few, pytest.param(many, marks=pytest.mark.sweep)])


def inside(hits: int, draws: int, p: float) -> bool:
    """Whether the exact 99.9% interval of a binomial share has `p`."""
    interval = stats.binomtest(int(hits), int(draws)).proportion_ci(0.999, "exact")
    return interval.low <= p <= interval.high


def is_uniform(counts: np.ndarray) -> bool:
    """Whether χ² finds equal chances, at 99.9%."""
    return stats.chisquare(counts).pvalue > 0.001
