"""Reads the runs of the suite that bench/results keeps, each held to bench/lib/schema.py."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib import schema, turns
from bench.lib.roofs import Roofs

RESULTS = Path(__file__).resolve().parents[1] / "results"
SUITE_FILES = "[0-9]*_*.json"  # pytest-benchmark's storage names them NNNN_<commit>_<date>.json


@dataclass(frozen=True)
class Benchmark:
    """One candidate's line in a group.

    Attributes:
        group: all that did the same work, such as "encoder-base-8x128".
        candidate: who, and in which precision, such as "fastbert-fp32".
        params: the test's parameters.
        seconds: median of one call.
        rounds: how many samples the median is of.
        extra: what bench/results/README.md lists as `extra_info`.
    """

    group: str
    candidate: str
    params: Mapping[str, Any]
    seconds: float
    rounds: int
    extra: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The group's file in the suite: "encoder", "ops", …."""
        return self.group.split("-")[0]

    @property
    def ours(self) -> bool:
        """Whether the candidate is of this project."""
        return turns.is_ours(self.candidate)

    @property
    def share(self) -> float | None:
        """The part of the machine's roof that was reached, or None where the row has none."""
        return self.extra.get("of_roof", self.extra.get("of_floor"))


@dataclass(frozen=True)
class Run:
    """One run on one machine at one commit.

    Attributes:
        date: when the file was written, ISO 8601, UTC.
        changed: whether tracked files differed from the commit; None where git could not tell.
        machine: result of bench/lib/machine.describe.
        without_a_time: {"group", "candidate", "why"} of each that failed or was wrong.
        memory: {"group", "candidate", "peak_mib", "above_mib", "over"} of each process that was measured.
    """

    path: Path
    date: str
    commit: str
    changed: bool | None
    note: str | None
    smoke: bool
    machine: Mapping[str, Any]
    roofs: Roofs | None
    benchmarks: tuple[Benchmark, ...]
    without_a_time: tuple[Mapping[str, str], ...] = ()
    memory: tuple[Mapping[str, Any], ...] = ()

    def of(self, kind: str) -> list[Benchmark]:
        """The benchmarks of one kind."""
        return [each for each in self.benchmarks if each.kind == kind]


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def load(path: Path) -> Any:
    """The content of a JSON file. Raises ValueError naming the file, OSError where it cannot be opened."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_constant)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read(path: Path) -> Run:
    """A run of the suite.

    Raises:
        ValueError: naming the file and the key that is missing or wrong.
        OSError: the file cannot be opened.
    """
    data = load(path)
    try:
        schema.check(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    ours = data["fastbert"]
    found = ours["roofs"]
    return Run(
        path=path,
        date=data["datetime"],
        **{key: ours[key] for key in ("commit", "changed", "note")},
        smoke=ours["settings"]["smoke"],
        machine=data["machine_info"],
        roofs=None if found is None else Roofs(found["gflops"], found["gbytes"]),
        benchmarks=tuple(
            Benchmark(
                group=each["group"],
                candidate=each["params"]["candidate"],
                params=each["params"],
                seconds=each["stats"]["median"],
                rounds=each["stats"]["rounds"],
                extra=each["extra_info"],
            )
            for each in data["benchmarks"]
        ),
        without_a_time=tuple(ours["without_a_time"]),
        memory=tuple(ours.get("memory", ())),
    )


def read_all(folder: Path) -> list[Run]:
    """Every run of the suite that a folder keeps, the earliest first. Raises as `read`."""
    return in_order(read(path) for path in folder.glob(SUITE_FILES))


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Runs by their date, the earliest first."""
    return sorted(runs, key=lambda run: (datetime.datetime.fromisoformat(run.date), run.path.name))


def newest(results: Path = RESULTS) -> Iterator[Run]:
    """Of each device's folder the latest run of the suite, by the folders' names. Raises as `read`.

    A run with less than half of the benchmarks of the largest is a part of the suite, and does not count. But
    it follows where it is the latest with a kind of benchmark that no whole run has.
    """
    for folder in sorted(path for path in results.iterdir() if path.is_dir()):
        runs = read_all(folder)
        most = max((len(run.benchmarks) for run in runs), default=0)
        chosen = [run for run in runs if 2 * len(run.benchmarks) >= most][-1:]
        for run in reversed(runs):
            known = {each.kind for other in chosen for each in other.benchmarks}
            if not {each.kind for each in run.benchmarks} <= known:
                chosen.append(run)
        yield from chosen
