"""The JSON schemas of the files in bench/results, and what holds a file's content to them.

`check` is for the suite's files: pytest-benchmark's JSON, with what bench/suite/conftest.py adds.
`check_rows` is for those with `rows`. An error begins with the path of what is wrong. jsonschema is imported
when a file is checked, because a GPU machine that only measures may lack it.
"""

from __future__ import annotations

import functools
import math
import statistics
from typing import Any

TEXT = {"type": "string", "minLength": 1}
FLAG = {"type": "boolean"}
NUMBER = {"type": "number"}
AMOUNT = {"type": "number", "minimum": 0}
ABOVE = {"type": "number", "exclusiveMinimum": 0}
WHOLE = {"type": "integer", "minimum": 1}
DATE = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$"}
COMMIT = {"type": "string", "pattern": "^[0-9a-f]{40}$"}
# or the reason why there is none
RATIO = {"type": ["number", "string"], "exclusiveMinimum": 0, "minLength": 1}
MAYBE_TEXT = {"type": ["string", "null"], "minLength": 1}
MAYBE_FLAG = {"type": ["boolean", "null"]}


def an_object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of an object; further keys are allowed."""
    return {"type": "object", "required": [*required], "properties": required | (optional or {})}


def each_value(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with any keys."""
    return {"type": "object", "additionalProperties": schema}


def a_list(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


def in_groups(kind: str, extra: dict[str, Any]) -> dict[str, Any]:
    """What a benchmark's `extra_info` holds besides if its group is of a kind."""
    group = {"properties": {"group": {"pattern": f"^{kind}-"}}}
    return {"if": group, "then": {"properties": {"extra_info": extra}}}


ROOFS = an_object({"gflops": each_value(ABOVE), "gbytes": ABOVE})
MACHINE = an_object(
    dict.fromkeys(("device_type", "device", "slug", "torch"), TEXT)
    | {"threads": WHOLE, "cpu": an_object({"name": TEXT, "cores": WHOLE})}
)
ENCODER = an_object(
    dict.fromkeys(("model", "workload", "cosine_to"), TEXT)
    | dict.fromkeys(("tokens", "padded_tokens"), WHOLE)
    | dict.fromkeys(("tokens_per_s", "gflops", "floor_ms", "of_floor"), ABOVE)
    | {"floor_tokens_per_s": each_value(ABOVE), "cosine": NUMBER}
)
OPS = an_object(
    dict.fromkeys(("op", "case", "workload", "dtype", "backend"), TEXT)
    | dict.fromkeys(("flops", "gflops", "gbs"), AMOUNT)
    | {"pass": {"enum": ["forward", "backward"]}, "moved_bytes": ABOVE},
    {"serves": FLAG},
)
BENCHMARK = an_object(
    {
        "group": TEXT,
        "name": TEXT,
        "params": an_object({"candidate": TEXT}),
        "stats": an_object(
            dict.fromkeys(("min", "q1", "median", "q3", "max"), AMOUNT) | {"rounds": WHOLE},
            {"data": a_list(AMOUNT)},
        ),
        "extra_info": an_object(
            {"candidate": TEXT, "correct": FLAG, "noisy": FLAG, "spread": AMOUNT, "over": each_value(RATIO)},
            dict.fromkeys(("model", "workload"), TEXT)
            | dict.fromkeys(("tokens", "padded_tokens"), WHOLE)
            | dict.fromkeys(("tokens_per_s", "samples_per_s", "floor_ms"), ABOVE)
            | dict.fromkeys(("gflops", "gbs", "of_roof", "of_floor"), AMOUNT),
        ),
    }
) | {"allOf": [in_groups("encoder", ENCODER), in_groups("ops", OPS)]}
MEMORY = an_object(
    {"group": TEXT, "candidate": TEXT, "peak_mib": ABOVE, "above_mib": NUMBER, "over": each_value(RATIO)}
)
SUITE = an_object(
    {
        "machine_info": MACHINE,
        "commit_info": an_object({"id": COMMIT}),
        "datetime": DATE,
        "version": TEXT,
        "fastbert": an_object(
            {
                "schema": {"const": 1},
                "commit": COMMIT,
                "changed": MAYBE_FLAG,
                "note": MAYBE_TEXT,
                "settings": an_object({"smoke": FLAG, "samples": WHOLE}),
                "roofs": ROOFS | {"type": ["object", "null"]},
                "seconds": AMOUNT,
                "without_a_time": a_list(
                    an_object(dict.fromkeys(("group", "name", "candidate", "why"), TEXT))
                ),
            },
            {"memory": a_list(MEMORY)},
        ),
        "benchmarks": a_list(BENCHMARK),
    }
)
ROW = an_object(
    dict.fromkeys(("step", "name", "status"), TEXT),
    dict.fromkeys(("error", "clock"), TEXT)
    | dict.fromkeys(("median_ms", "min_ms", "gflops", "gbs"), AMOUNT)
    | dict.fromkeys(("n", "inner", "tokens"), WHOLE)
    | {"tokens_per_s": ABOVE},
) | {
    "if": {"properties": {"status": {"const": "error"}}},
    "then": {"required": ["error"]},
    "dependentRequired": {"median_ms": ["min_ms", "spread", "n", "inner", "clock"]},
}
ROWS = an_object(
    {
        "schema": {"const": 1},
        "date": DATE,
        "finished": FLAG,
        "note": MAYBE_TEXT,
        "commit": COMMIT,
        "changed": MAYBE_FLAG,
        "settings": {"type": "object"},
        "environment": MACHINE,
        "steps": a_list(an_object({"step": TEXT, "status": TEXT, "seconds": AMOUNT, "reason": MAYBE_TEXT})),
        "rows": a_list(ROW),
    },
    {"roofs": ROOFS},
)


@functools.cache
def _validator(name: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator({"SUITE": SUITE, "ROWS": ROWS}[name])


def _hold(data: Any, name: str) -> None:
    """Raises ValueError, beginning with the path of what is not as the schema says."""
    for error in _validator(name).iter_errors(data):
        text = error.message
        text = text if len(text) <= 200 else f"{text[:60]} ... {text[-120:]}"
        raise ValueError(f"{error.json_path.removeprefix('$').removeprefix('.') or 'the file'}: {text}")


def _near(at: str, value: float, expected: float, of: str) -> None:
    """Raises ValueError where a figure is not what follows from others of the file."""
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-12):
        raise ValueError(f"{at}: got {value:.6g}, expected {expected:.6g} from {of}")


def check(data: Any) -> None:
    """Hold the content of a suite's file to the schema, and its figures to each other.

    Raises:
        ValueError: beginning with the path, such as "benchmarks[3].extra_info.tokens: got …".
    """
    _hold(data, "SUITE")
    if data["fastbert"]["commit"] != data["commit_info"]["id"]:
        raise ValueError(
            f"fastbert.commit: got {data['fastbert']['commit']}, expected that of commit_info.id"
        )
    medians: dict[tuple[str, str], float] = {}
    for i, each in enumerate(data["benchmarks"]):
        at, stats, extra = f"benchmarks[{i}]", each["stats"], each["extra_info"]
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
    """Hold the content of a file with `rows` to the schema. Raises ValueError, beginning with the path."""
    _hold(data, "ROWS")
