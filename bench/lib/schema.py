"""The schema of the files in bench/results, as data, and what holds a file's content to it.

`check` is for the suite's files: pytest-benchmark's JSON, with what bench/suite/conftest.py adds.
`check_rows` is for the older ones with `rows`. An error begins with the key of what is wrong.
"""

from __future__ import annotations

import datetime
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _is(what: str, test: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """A leaf of the schema: None for a value that passes, what was expected for any other."""
    return lambda value: None if test(value) else what


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_date(value: object) -> bool:
    try:
        return datetime.datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


TEXT = _is("text", lambda value: isinstance(value, str) and value != "")
FLAG = _is("true or false", lambda value: isinstance(value, bool))
NUMBER = _is("a number", _is_number)
AMOUNT = _is("a number of at least 0", lambda value: _is_number(value) and value >= 0)
ABOVE = _is("a number above 0", lambda value: _is_number(value) and value > 0)
WHOLE = _is(
    "a whole number above 0", lambda value: isinstance(value, int) and _is_number(value) and value > 0
)
DATE = _is("a date and time with its zone", _is_date)
COMMIT = _is(
    "a commit, 40 digits", lambda value: isinstance(value, str) and re.fullmatch(r"[0-9a-f]{40}", value)
)
RATIO = _is(
    "a ratio above 0, or the reason why there is none",
    lambda value: (_is_number(value) and value > 0) or (isinstance(value, str) and value != ""),
)
ANY = _is("anything", lambda _: True)


@dataclass(frozen=True)
class Or:
    """Null, or as the inner schema says."""

    inner: Any


@dataclass(frozen=True)
class Each:
    """An object with any keys, whose values are all as the inner schema says."""

    inner: Any


ROOFS = {"gflops": Each(ABOVE), "gbytes": ABOVE}
MACHINE = {
    "device_type": TEXT,
    "device": TEXT,
    "slug": TEXT,
    "threads": WHOLE,
    "torch": TEXT,
    "cpu": {"name": TEXT, "cores": WHOLE},
}
# a key with "?" may be missing; further keys are allowed
SUITE = {
    "machine_info": MACHINE,
    "commit_info": {"id": COMMIT},
    "datetime": DATE,
    "version": TEXT,
    "fastbert": {
        "schema": _is("1", lambda value: value == 1 and not isinstance(value, bool)),
        "commit": COMMIT,
        "changed": Or(FLAG),
        "note": Or(TEXT),
        "settings": {"smoke": FLAG, "samples": WHOLE},
        "roofs": Or(ROOFS),
        "seconds": AMOUNT,
        "without_a_time": [{"group": TEXT, "name": TEXT, "candidate": TEXT, "why": TEXT}],
        "memory?": [
            {"group": TEXT, "candidate": TEXT, "peak_mib": ABOVE, "above_mib": NUMBER, "over": Each(RATIO)}
        ],
    },
    "benchmarks": [
        {
            "group": TEXT,
            "name": TEXT,
            "params": {"candidate": TEXT},
            "stats": {
                **dict.fromkeys(("min", "q1", "median", "q3", "max"), AMOUNT),
                "rounds": WHOLE,
                "data?": [AMOUNT],
            },
            "extra_info": {
                "candidate": TEXT,
                "correct": FLAG,
                "noisy": FLAG,
                "spread": AMOUNT,
                "over": Each(RATIO),
                **dict.fromkeys(("model?", "workload?"), TEXT),
                **dict.fromkeys(("tokens?", "padded_tokens?"), WHOLE),
                **dict.fromkeys(("tokens_per_s?", "samples_per_s?", "floor_ms?"), ABOVE),
                **dict.fromkeys(("gflops?", "gbs?", "of_roof?", "of_floor?"), AMOUNT),
            },
        }
    ],
}
# what the extra_info of these kinds has besides
EXTRA = {
    "encoder": {
        "model": TEXT,
        "workload": TEXT,
        "tokens": WHOLE,
        "padded_tokens": WHOLE,
        "tokens_per_s": ABOVE,
        "gflops": ABOVE,
        "floor_ms": ABOVE,
        "of_floor": ABOVE,
        "floor_tokens_per_s": Each(ABOVE),
        "cosine": NUMBER,
        "cosine_to": TEXT,
    },
    "ops": {
        "op": TEXT,
        "case": TEXT,
        "workload": TEXT,
        "pass": _is("forward or backward", lambda value: value in ("forward", "backward")),
        "dtype": TEXT,
        "backend": TEXT,
        "flops": AMOUNT,
        "moved_bytes": ABOVE,
        "gflops": AMOUNT,
        "gbs": AMOUNT,
        "of_roof?": AMOUNT,
        "serves?": FLAG,
    },
}
ROWS = {
    "schema": SUITE["fastbert"]["schema"],
    "date": DATE,
    "finished": FLAG,
    "note": Or(TEXT),
    "commit": COMMIT,
    "changed": Or(FLAG),
    "settings": Each(ANY),
    "environment": MACHINE,
    "steps": [{"step": TEXT, "status": TEXT, "seconds": AMOUNT, "reason": Or(TEXT)}],
    "rows": [
        {
            "step": TEXT,
            "name": TEXT,
            "status": TEXT,
            "error?": TEXT,
            "median_ms?": AMOUNT,
            "min_ms?": AMOUNT,
            "spread?": ANY,
            "n?": WHOLE,
            "inner?": WHOLE,
            "clock?": TEXT,
            "gflops?": AMOUNT,
            "gbs?": AMOUNT,
            "tokens?": WHOLE,
            "tokens_per_s?": ABOVE,
        }
    ],
    "roofs?": ROOFS,
}
# what a timed row of the older files has all of, or none of
TIMED = ("median_ms", "min_ms", "spread", "n", "inner", "clock")


def _held(value: Any, schema: Any, at: str) -> None:
    """Nothing if `value` is as the schema says. Raises ValueError, beginning with the key where it is not."""
    if isinstance(schema, Or):
        if value is not None:
            _held(value, schema.inner, at)
    elif isinstance(schema, Each):
        if not isinstance(value, dict):
            raise ValueError(f"{at}: got {_short(value)}, expected an object")
        for key, item in value.items():
            _held(item, schema.inner, f"{at}.{key}")
    elif isinstance(schema, dict):
        if not isinstance(value, dict):
            raise ValueError(f"{at or 'the file'}: got {_short(value)}, expected an object")
        for key, inner in schema.items():
            name = key.removesuffix("?")
            place = f"{at}.{name}" if at else name
            if name in value:
                _held(value[name], inner, place)
            elif not key.endswith("?"):
                raise ValueError(f"{place}: missing")
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{at}: got {_short(value)}, expected a list")
        for i, item in enumerate(value):
            _held(item, schema[0], f"{at}[{i}]")
    elif expected := schema(value):
        raise ValueError(f"{at}: got {_short(value)}, expected {expected}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _near(at: str, value: float, expected: float, of: str) -> None:
    """Raises ValueError where a figure is not what follows from others of the file."""
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-12):
        raise ValueError(f"{at}: got {value:.6g}, expected {expected:.6g} from {of}")


def check(data: Any) -> None:
    """Hold the content of a suite's file to the schema, and its figures to each other.

    Raises:
        ValueError: beginning with the key, such as "benchmarks[3].extra_info.tokens: missing".
    """
    _held(data, SUITE, "")
    if data["fastbert"]["commit"] != data["commit_info"]["id"]:
        raise ValueError(
            f"fastbert.commit: got {data['fastbert']['commit']}, expected that of commit_info.id"
        )
    medians: dict[tuple[str, str], float] = {}
    for i, each in enumerate(data["benchmarks"]):
        at, stats, extra = f"benchmarks[{i}]", each["stats"], each["extra_info"]
        _held(extra, EXTRA.get(each["group"].split("-")[0], {}), f"{at}.extra_info")
        key = each["group"], extra["candidate"]
        if key in medians:
            raise ValueError(f"{at}.extra_info.candidate: {key[1]} is in {key[0]} twice")
        if extra["candidate"] != each["params"]["candidate"]:
            raise ValueError(f"{at}.extra_info.candidate: got {key[1]}, expected params.candidate")
        medians[key] = stats["median"]
        if "data" in stats:
            if len(stats["data"]) != stats["rounds"]:
                raise ValueError(f"{at}.stats.data: {len(stats['data'])} samples, expected stats.rounds")
            _near(f"{at}.stats.median", stats["median"], statistics.median(stats["data"]), "stats.data")
        for rate, amount, unit in (("tokens_per_s", "tokens", 1.0), ("gflops", "flops", 1e9)):
            if rate in extra and amount in extra:
                of = f"{amount} and stats.median"
                _near(f"{at}.extra_info.{rate}", extra[rate], extra[amount] / stats["median"] / unit, of)
    for i, each in enumerate(data["benchmarks"]):
        rate = 1 / each["stats"]["median"] if each["stats"]["median"] else math.inf
        rates = {key: 1 / median for key, median in medians.items() if median}
        _check_ratios(f"benchmarks[{i}].extra_info.over", each["group"], each["extra_info"], rate, rates)
    memory = data["fastbert"].get("memory", [])
    peaks = {(each["group"], each["candidate"]): each["peak_mib"] for each in memory}
    for i, each in enumerate(memory):
        _check_ratios(f"fastbert.memory[{i}].over", each["group"], each, each["peak_mib"], peaks)


def _check_ratios(
    at: str, group: str, row: dict, figure: float, figures: dict[tuple[str, str], float]
) -> None:
    """Hold the ratios of one row to the figures of which they are: speeds, or peaks of memory."""
    for peer, ratio in row["over"].items():
        if isinstance(ratio, str):
            continue
        if (group, peer) not in figures:
            raise ValueError(f"{at}.{peer}: a ratio, and {group} has no figure of {peer}")
        of = f"the figures of {row['candidate']} and {peer}"
        _near(f"{at}.{peer}", ratio, figure / figures[group, peer], of)


def check_rows(data: Any) -> None:
    """Hold the content of a file with `rows` to the schema. Raises ValueError, beginning with the key."""
    _held(data, ROWS, "")
    for i, row in enumerate(data["rows"]):
        if row["status"] == "error" and "error" not in row:
            raise ValueError(f"rows[{i}].error: missing")
        if "median_ms" in row and (missing := [key for key in TIMED if key not in row]):
            raise ValueError(f"rows[{i}].{missing[0]}: missing")
