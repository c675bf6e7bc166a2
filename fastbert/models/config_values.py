"""Checks of single config keys, which all raise one form of message: what was expected, and what came."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from fastbert.ops.activation import SPELLINGS

# Most of any one size: the product of two sizes and an element's bytes fits 64 bits
MAX_SIZE = 2**24


def brief(value: object) -> str:
    """A value from a file as messages show it."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def refused(config: Any, key: str, expected: str, kind: type[Exception] = ValueError) -> Exception:
    """The error of a key's value. The message has the key as the family's files spell it."""
    value = getattr(config, key, None)
    return kind(f"config {config.family.spelt(key)}: expected {expected}, got {brief(value)}")


def integers(config: Any, least: dict[str, int], optional: Collection[str] = ()) -> None:
    """Check integers.

    Args:
        least: key -> the smallest valid value.
        optional: the keys that may be None or absent.
    """
    for key, low in least.items():
        value = config.__dict__.get(key)
        if value is None and key in optional:
            continue
        if type(value) is not int:
            raise refused(config, key, "an integer", TypeError)
        if value < low:
            raise refused(config, key, f"an integer >= {low}")
        if value > MAX_SIZE:
            raise refused(config, key, f"an integer <= {MAX_SIZE}")


def numbers(config: Any, *keys: str, positive: bool = False) -> None:
    """Check finite numbers, which are >= 0, or > 0 if `positive`."""
    for key in keys:
        value = config.__dict__[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value <= sys.float_info.max or (positive and value == 0):
            raise refused(config, key, f"a finite number {'> 0' if positive else '>= 0'}")


def booleans(config: Any, *keys: str) -> None:
    """Check keys that are True or False."""
    for key in keys:
        if type(getattr(config, key)) is not bool:
            raise refused(config, key, "a boolean", TypeError)


def one_of(config: Any, key: str, choices: Sequence[str]) -> None:
    """Check a key that is one of several names."""
    if config.__dict__.get(key) not in choices:
        raise refused(config, key, f"one of {', '.join(choices)}")


def activations(config: Any, *keys: str) -> None:
    """Check names of activations."""
    for key in keys:
        act = config.__dict__[key]
        if not isinstance(act, str) or act not in SPELLINGS:
            raise ValueError(
                f"config {config.family.spelt(key)}: unknown activation {brief(act)}; expected one of "
                f"{', '.join(SPELLINGS)}"
            )
