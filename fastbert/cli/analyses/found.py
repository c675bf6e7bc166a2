"""The result of an analysis, and names of its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastbert.analysis.intervals import Interval
from fastbert.tasks.examples import KINDS

# (numbers for the JSON file, "summary" among them; arrays; figures)
Found = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]
# names of the arrays of attention to each kind of token
TO = tuple("to_" + kind.removeprefix("the ").replace(" ", "_") for kind in KINDS)


def as_numbers(intervals: Mapping[str, Interval]) -> dict[str, dict[Any, Any]]:
    """Intervals for a JSON file; None for a mean that is not known."""
    found = {name: interval._asdict() for name, interval in intervals.items()}
    return {name: each | {"mean": known(each["mean"])} for name, each in found.items()}


def known(value: float) -> float | None:
    """A number for a JSON file; None for NaN."""
    return None if math.isnan(value) else float(value)
