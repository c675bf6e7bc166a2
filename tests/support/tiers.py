"""Which tests `make test` runs, which `make sweep` adds, and which only `make exhaustive` runs.

`make test` runs a few of each parametrised test's parameter sets. One rule chooses them here, so that no test
needs a list of its own. The chosen sets cover

- each combination of backend, instruction set, op, pass, dtype and family that the test's parameters have,
- each value of every other parameter (each case, each bad input, each option),
- and of a long list of numbers, such as all lengths from 1 to 130, its ends and two numbers between.

All others get the marker `sweep`. Tests that are exhaustive or costly as a whole carry that marker in their
file; `slow` marks what takes hours. A parameter set that is named by its full id runs without `-m`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

# Parameters of which `make test` needs every combination.
COMBINED = frozenset({"backend", "dtype", "every_isa", "family", "isa", "op", "task", "which"})
# A parameter with more numbers than this is a sweep: only some of its numbers must be covered.
MANY, SOME = 6, 4

Need = tuple[Hashable, ...]


def identity(value: object) -> Hashable:
    """What tells two values of a parameter apart; values may be unhashable."""
    return type(value).__name__, value if isinstance(value, (str, int, float)) else repr(value)


def is_numeric(value: object) -> bool:
    """Whether a value is a number or a collection of numbers."""
    if isinstance(value, (tuple, list, range)):
        return all(map(is_numeric, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def left_out(sets: Sequence[dict[str, object]]) -> dict[str, set[Hashable]]:
    """By parameter: the numbers of a sweep that need no covering."""
    values: dict[str, dict[Hashable, object]] = defaultdict(dict)
    for parameters in sets:
        for name, value in parameters.items():
            values[name].setdefault(identity(value), value)
    found = {}
    for name, named in values.items():
        if len(named) > MANY and name not in COMBINED and all(map(is_numeric, named.values())):
            kept = {round(i * (len(named) - 1) / (SOME - 1)) for i in range(SOME)}
            found[name] = {key for i, key in enumerate(named) if i not in kept}
    return found


def cover(ids: Sequence[str], sets: Sequence[dict[str, object]]) -> set[str]:
    """The ids of the parameter sets that `make test` runs; at least one.

    Args:
        ids: one id per parameter set.
        sets: name -> value of the parameters.

    Greedy: the set that covers the most comes first. A checksum of the id decides between equals, so that the
    cases spread over backends and dtypes, in the same way on every machine.
    """
    skipped = left_out(sets)
    needs: dict[str, set[Need]] = {}
    for name, parameters in zip(ids, sets, strict=True):
        keys = {key: identity(value) for key, value in parameters.items()}
        found: set[Need] = {(k, v) for k, v in keys.items() if v not in skipped.get(k, ())}
        found.add(tuple((k, keys[k]) for k in sorted(COMBINED & keys.keys())))
        needs[name] = found
    missing, kept = set().union(*needs.values()), set()
    left = sorted(ids, key=lambda name: zlib.crc32(name.encode()))
    while missing:
        best = max(left, key=lambda name: len(needs[name] & missing))
        kept.add(best)
        left.remove(best)
        missing -= needs[best]
    return kept


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker `sweep` to the parameter sets that `make test` leaves out."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            groups[item.nodeid.partition("[")[0]].append(item)
    for group in groups.values():
        kept = cover([item.nodeid for item in group], [item.callspec.params for item in group])
        for item in group:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.sweep)
