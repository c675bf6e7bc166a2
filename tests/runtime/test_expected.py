"""The checks of arguments by value."""

from __future__ import annotations

import math
import re

import pytest

from fastbert.runtime import expected


@pytest.mark.parametrize("wrong", [0, 1.0, True, "1", None])
def test_an_integer_is_no_bool_and_not_below_the_least(wrong: object) -> None:
    expected.integers(1, first=1, second=2)
    with pytest.raises(ValueError, match=re.escape(f"second: expected an integer >= 1, got {wrong!r}")):
        expected.integers(1, first=1, second=wrong)


@pytest.mark.parametrize(
    ("within", "right", "wrong"),
    [
        (">= 0", [0, 2.5], [-1e-9, math.inf]),
        ("> 0", [1e-9, 2], [0, math.inf]),
        ("in [0, 1]", [0, 1], [-1e-9, 1.1]),
        ("in [0, 1)", [0, 0.9], [-1e-9, 1]),
        ("in (0, 1]", [0.1, 1], [0, 1.1]),
        ("in (0, 1)", [0.1, 0.9], [0, 1]),
    ],
)
def test_a_number_is_within_its_range(within: str, right: list[float], wrong: list[object]) -> None:
    for value in right:
        expected.numbers(within, x=value)
    for value in (*wrong, math.nan, True, "0.5", None):
        with pytest.raises(ValueError, match=rf"^x: expected a (finite )?number {re.escape(within)}, got "):
            expected.numbers(within, x=value)


def test_a_name_is_a_known_one() -> None:
    expected.one_of({"mean": 0, "max": 1}, pooling="max")
    for wrong in ("m", None, []):
        with pytest.raises(ValueError, match=r"^pooling: expected one of mean, max, got "):
            expected.one_of({"mean": 0, "max": 1}, pooling=wrong)
