"""Files that name patterns of heads, a JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def read_patterns(path: str | Path, names: Sequence[str], counts: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The patterns that a file names.

    Args:
        path: JSON lines, objects with the keys of `counts` and a "pattern".
        names: of the patterns.
        counts: key -> how many there are, such as {"layer": 12, "head": 12}. Numbers count from 0.

    Returns:
        Each key and "pattern" -> (lines,) int64; a pattern is its index into `names`.

    Raises:
        ValueError, OSError: naming the file, the line, what is there and what was expected.
    """
    path = Path(path)
    found: list[list[int]] = []
    lines: dict[tuple[int, ...], int] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                *place, pattern = _numbers(f"{path}, line {number}", line, names, counts)
                first = lines.setdefault(tuple(place), number)
                if first != number:
                    what = ", ".join(f"{key} {i}" for key, i in zip(counts, place, strict=True))
                    raise ValueError(f"{path}, line {number}: {what} again, which line {first} has")
                found.append([*place, pattern])
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from None
    if not found:
        raise ValueError(f"{path}: expected one pattern at least, found none")
    columns = np.array(found, np.int64).T
    return dict(zip((*counts, "pattern"), columns, strict=True))


def _numbers(where: str, line: str, names: Sequence[str], counts: Mapping[str, int]) -> list[int]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: no JSON ({error})") from None
    missing = next((k for k in (*counts, "pattern") if not isinstance(values, dict) or k not in values), None)
    if missing is not None:
        raise ValueError(f"{where}: expected an object with {missing!r}")
    for key, count in counts.items():
        if type(values[key]) is not int or not 0 <= values[key] < count:
            raise ValueError(
                f"{where}: {key}: expected an integer from 0 to {count - 1}, got {values[key]!r}"
            )
    if values["pattern"] not in names:
        raise ValueError(f"{where}: pattern: expected one of {', '.join(names)}, got {values['pattern']!r}")
    return [*(values[key] for key in counts), names.index(values["pattern"])]
