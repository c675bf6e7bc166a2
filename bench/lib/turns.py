"""Candidates timed interleaved, and passed to pytest-benchmark one test at a time.

pytest-benchmark times one function per test. Here a test is one candidate of a group, ours or a peer's, and
the candidates of a group do the same work on the same inputs. The first test of a group measures all
candidates by `bench.lib.timing.interleave`. Each test of the group then passes its own samples to the
`benchmark` fixture, through a clock that returns the measured times. So storage, comparison, groups and
histograms are pytest-benchmark's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# A row whose quartiles are further apart than this share of its median is no base for a ratio.
NOISY = 0.15
# The least mean cosine of an encoder's vectors, or of a gradient, to fp32's that counts as right.
LEAST_COSINE = {"fp32": 0.9999, "bf16": 0.995, "int8": 0.97}
OURS = ("fastbert", "fastbert_graphs", "accelerated", "cpu", "triton", "cuda")

# key of a row -> (decimals, unit): the rate that its line shows, the first that it has
RATES = {
    "samples_per_s": (2, "samples/s"),
    "packs_per_s": (3, "packs/s"),
    "sentences_per_s": (0, "sentences/s"),
    "tokens_per_s": (0, "tokens/s"),
    "us_per_layer": (2, "µs per layer"),
    "gflops": (1, "GFLOP/s"),
    "gbs": (1, "GB/s"),
}

# key of a row of memory -> what it is
MEMORY = {"above_mib": "above the loaded model", "saved_mib": "saved for backward"}

Rows = Callable[[tuple[str, ...]], Iterable[dict]]


class ReplayClock:
    """A clock for pytest-benchmark that returns durations measured before: two readings per duration.

    Args:
        seconds: the durations, in the order in which they were measured.
    """

    def __init__(self, seconds: Sequence[float]):
        self._readings = itertools.chain.from_iterable((0.0, each) for each in seconds)

    def __call__(self) -> float:
        """The next reading in seconds. Raises RuntimeError when all durations have been read."""
        for reading in self._readings:
            return reading
        raise RuntimeError("every measured duration has been read")


@dataclass
class Group:
    """What is compared with each other.

    Attributes:
        name: of the group in the results, such as "encoder-base-8x128".
        candidates: names in the order of collection.
        rows: candidate -> its row, once measured.
        error: why the measurement ended early; the rows before it are kept.
        measured: whether it has been tried.
    """

    name: str
    candidates: list[str] = field(default_factory=list)
    rows: dict[str, dict] = field(default_factory=dict)
    error: Exception | None = None
    measured: bool = False

    def measure(self, rows: Rows) -> None:
        """Measure all candidates, once. What is raised is kept, for every candidate without a row."""
        if self.measured:
            return
        self.measured = True
        try:
            for row in rows(tuple(self.candidates)):
                self.rows[row["candidate"]] = row
        except Exception as error:
            self.error = error
        for row in self.rows.values():
            row["over"] = ratios(row, self.rows)


def is_ours(candidate: str) -> bool:
    """Whether a candidate is of this project."""
    return candidate.split("-")[0] in OURS


def precision(candidate: str) -> str:
    """The precision in a candidate's name; "" without one."""
    return candidate.partition("-")[2]


def is_timed(row: Mapping) -> bool:
    """Whether a row has times. A row of memory has `peak_mib` instead."""
    return "samples_ms" in row


def is_noisy(row: Mapping) -> bool:
    """Whether a row's samples are too far apart for a claim; a peak of memory is one number."""
    return row.get("spread", 0.0) > NOISY


def ratios(row: dict, rows: Mapping[str, dict]) -> dict[str, float | str]:
    """Peer -> the speed-up of one of our candidates over it, or the reason why there is none.

    Peers are other candidates of the group in the same precision. A peer's own row has no ratios. For memory
    the ratio is our peak over the peer's.
    """
    found: dict[str, float | str] = {}
    if row["status"] != "ok" or not is_ours(row["candidate"]):
        return found
    for name, other in rows.items():
        if name == row["candidate"] or is_ours(name) or precision(name) != precision(row["candidate"]):
            continue
        if other["status"] != "ok":
            found[name] = other["status"]
        elif wrong(other) or wrong(row):
            found[name] = "incorrect"
        elif noisy := [r["candidate"] for r in (row, other) if is_noisy(r)]:
            found[name] = f"too noisy: {', '.join(noisy)}"
        elif not is_timed(row):
            found[name] = row["peak_mib"] / other["peak_mib"]
        else:
            found[name] = other["median_ms"] / row["median_ms"]
    return found


def wrong(row: Mapping) -> str | None:
    """Why a row's result is wrong, or None: by the error rule if it was applied, by the cosine otherwise."""
    if row.get("incorrect"):
        return row["incorrect"]
    least = LEAST_COSINE.get(precision(row["candidate"]))
    for key in ("cosine", "grad_cosine"):
        value = row.get(key)
        if value is not None and least is not None and not value >= least:  # a NaN is wrong
            return f"{key} {value:.5f}, at least {least} expected"
    return None


def facts(row: Mapping) -> dict:
    """What a row adds to pytest-benchmark's statistics."""
    left_out = ("samples_ms", "status", "median_ms", "min_ms", "n", "clock", "name")
    return {key: value for key, value in row.items() if key not in left_out} | {
        "correct": wrong(row) is None,
        "noisy": is_noisy(row),
    }


def told(row: Mapping) -> Iterator[str]:
    """The parts of a row's line after its name: time, rate, share of the roof, ratios."""
    of = "" if is_timed(row) else "the memory of "
    over = row.get("over", {}).items()
    over = [f"{v:.2f} x {of}{k}" if isinstance(v, float) else f"{k}: {v}" for k, v in over]
    if not is_timed(row):
        parts = [f"{row[key]:,.0f} MiB {words}" for key, words in MEMORY.items() if key in row]
        yield ", ".join([f"{row['peak_mib']:>11,.0f} MiB at most", *parts])
        yield ", ".join(over)
        return
    ms = row["median_ms"]
    yield f"{ms * 1e3:>11,.1f} us" if ms < 1 else f"{ms:>11,.2f} ms"
    key = next((key for key in RATES if row.get(key)), None)
    yield "" if key is None else f"{row[key]:>9,.{RATES[key][0]}f} {RATES[key][1]}"
    share = row.get("of_roof", row.get("of_floor"))
    yield "" if share is None else f"{share:>5.0%} of roof"
    yield f"±{row['spread']:.0%}"
    for key in ("cosine", "grad_cosine"):
        if row.get(key) is not None:
            yield f"{key} {row[key]:.5f}"
    if "times_torch" in row and "over" not in row:
        yield f"{row['times_torch']:.2f} x torch"
    if "loss" in row:  # under load (bench/lib/load.py)
        yield f"loss {row['loss']:.2f}" + (f" ({row['promise']})" if "promise" in row else "")
    yield ", ".join(over)
