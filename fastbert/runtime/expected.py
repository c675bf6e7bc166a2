"""Checks of arguments by value: a ValueError names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

_RANGES: dict[str, Callable[[float], bool]] = {
    ">= 0": lambda x: 0 <= x < math.inf,
    "> 0": lambda x: 0 < x < math.inf,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
}


def integers(least: int, /, **given: Any) -> None:
    """Each must be an integer >= `least`; a bool is none."""
    for name, value in given.items():
        if type(value) is not int or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def numbers(within: str, /, **given: Any) -> None:
    """Each must be a finite number in one of `_RANGES`; a bool is none."""
    for name, value in given.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and _RANGES[within](value)):
            kind = "a number" if within.startswith("in") else "a finite number"
            raise ValueError(f"{name}: expected {kind} {within}, got {value!r}")


def one_of(known: Iterable[str], /, **given: Any) -> None:
    """Each must be one of the known names."""
    for name, value in given.items():
        if value not in [*known]:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
