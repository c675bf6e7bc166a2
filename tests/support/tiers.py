"""Which tests `make test` runs, which `make sweep` adds, and which only `make exhaustive` runs.

`make test` runs a few of each parametrised test's parameter sets. One rule chooses them here, so that no test
needs a list of its own. The chosen sets cover

- each combination of backend, instruction set, op, pass, dtype and family that the test's parameters have,
- each value of every other parameter (each case, each bad input, each option),
- of a long list of numbers, such as all lengths from 1 to 130, its ends and two numbers between,
- of all families of models, four; each test has its own four.

All others get the marker `sweep`. Two markers beside a test say more: `sweep` leaves all its parameter sets
to `make sweep`, because they are exhaustive or take seconds; `sweep_of("triton")` those whose id begins so.
`slow` marks what takes hours. A parameter set that is named by its full id runs without `-m`.

`--part 2/4` runs the tests of a quarter of the files: a file's tests share what they build. CI runs the
quarter that the commit's hash chooses.
"""

from __future__ import annotations

import heapq
import pathlib
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import pytest

# Parameters of which `make test` needs every combination.
COMBINED = frozenset({"backend", "dtype", "every_isa", "family", "isa", "op", "task", "which"})
# A parameter with more numbers than this is a sweep: only some of its numbers must be covered.
MANY, SOME = 6, 4

# folder of tests/ -> parameters of which a few values are enough in `make test`
SAMPLED = {"triton": frozenset({"case"})}

# fixtures that compile, run a whole benchmark or train in two processes: their tests are left to `make sweep`
BUILDS = {*("dry", "emulated", "emulated_launches", "smoke", "two_processes", "whole")}

# folders whose tests need a build of a minute: what `make test` would run of them gets the marker `built`,
# and is left to `make sweep` too
BUILT_FOLDERS = frozenset({"ptx"})
USUAL = "not slow and not sweep"  # the markers of `make test`, as in pyproject.toml

SALT = ""  # of the parts

Need = tuple[Hashable, ...]


def is_whole(item: pytest.Item) -> bool:
    """Whether `make sweep` alone runs the test, by the markers beside it or by a fixture that it uses."""
    if item.get_closest_marker("sweep") is not None or BUILDS & set(getattr(item, "fixturenames", ())):
        return True
    marker = item.get_closest_marker("sweep_of")
    return marker is not None and item.nodeid.partition("[")[2].startswith(marker.args)


def part(text: str) -> tuple[int, int]:
    """(2, 4) of "2/4".

    Raises:
        ValueError: the text does not say which part of how many.
    """
    which, _, count = text.partition("/")
    if not (which.isdigit() and count.isdigit() and 1 <= int(which) <= int(count)):
        raise ValueError(f"--part: got {text!r}, expected a number of how many, such as 2/4")
    return int(which), int(count)


def part_of(path: str, count: int) -> int:
    """Which of `count` parts the tests of a file belong to, from 1."""
    return zlib.crc32(f"{SALT}{path}".encode()) % count + 1


def identity(value: object) -> Hashable:
    """What tells two values of a parameter apart; values may be unhashable."""
    return type(value).__name__, value if isinstance(value, (str, int, float)) else repr(value)


def is_numeric(value: object) -> bool:
    """Whether a value is a number or a collection of numbers."""
    if isinstance(value, (tuple, list, range)):
        return all(map(is_numeric, value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def left_out(
    sets: Sequence[dict[str, object]], sampled: frozenset[str] = frozenset(), turn: int = 0
) -> dict[str, set[Hashable]]:
    """By parameter: the values that need no covering, of a long list of numbers, families or `sampled` ones.

    `turn` decides which families are covered.
    """
    from fastbert.models.families import FAMILIES  # imports torch, which a run's controller does without

    values: dict[str, dict[Hashable, object]] = defaultdict(dict)
    for parameters in sets:
        for name, value in parameters.items():
            values[name].setdefault(identity(value), value)
    found = {}
    for name, named in values.items():
        families = all(str(value).startswith((*FAMILIES,)) for value in named.values())
        few = name not in COMBINED and (name in sampled or all(map(is_numeric, named.values())))
        if len(named) > MANY and (families or few):
            kept = {round(i * (len(named) - 1) / (SOME - 1)) for i in range(SOME)}
            kept = {(i + turn) % len(named) for i in kept} if families else kept
            found[name] = {key for i, key in enumerate(named) if i not in kept}
    return found


def cover(
    ids: Sequence[str], sets: Sequence[dict[str, object]], sampled: frozenset[str] = frozenset()
) -> set[str]:
    """The ids of the parameter sets that `make test` runs; at least one.

    Args:
        ids: one id per parameter set.
        sets: name -> value of the parameters.
        sampled: parameters of which a few values are enough.

    Greedy: the set that covers the most comes first. A checksum of the id decides between equals, so that the
    cases spread over backends and dtypes, in the same way on every machine.
    """
    skipped = left_out(sets, sampled, zlib.crc32(ids[0].partition("[")[0].encode()))
    needs: dict[str, set[Need]] = {}
    for name, parameters in zip(ids, sets, strict=True):
        keys = {key: identity(value) for key, value in parameters.items()}
        found: set[Need] = {(k, v) for k, v in keys.items() if v not in skipped.get(k, ())}
        combined = sorted(COMBINED & keys.keys())
        if not any(keys[k] in skipped.get(k, ()) for k in combined):
            found.add(tuple((k, keys[k]) for k in combined))
        needs[name] = found
    missing, kept = set().union(*needs.values()), set()
    order = sorted(ids, key=lambda name: zlib.crc32(name.encode()))
    left = [(-len(needs[name]), at, name) for at, name in enumerate(order)]
    heapq.heapify(left)
    while missing:
        _, at, name = heapq.heappop(left)
        now = -len(needs[name] & missing), at, name
        if left and now > left[0]:  # what it covers has shrunk
            heapq.heappush(left, now)
            continue
        kept.add(name)
        missing -= needs[name]
    return kept


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the marker `sweep` to what `make test` leaves out."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_whole(item):
            item.add_marker(pytest.mark.sweep)
        elif hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            groups[item.nodeid.partition("[")[0]].append(item)
    for path, group in groups.items():
        sampled = SAMPLED.get(pathlib.PurePath(path.partition("::")[0]).parent.name, frozenset())
        kept = cover([item.nodeid for item in group], [item.callspec.params for item in group], sampled)
        for item in group:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.sweep)
    for item in items:
        folder = pathlib.PurePath(item.nodeid.partition("::")[0]).parent.name
        if folder in BUILT_FOLDERS and item.get_closest_marker("sweep") is None:
            item.add_marker(pytest.mark.built)
            item.add_marker(pytest.mark.sweep)
