"""Compares runs of the suite: `python bench/compare.py BEFORE.json AFTER.json`.

Each side is one file or several runs of the same code, separated by commas: `a1.json,a2.json,a3.json`. A
benchmark is slower if each of these ratios, after over before, is above its threshold:

- the ratio of medians, and of least times, with the best run of each side: 15%, or `--threshold`;
- the same ratio relative to the median of the group's peers in the same run, with the middle run per side,
  and with the best: half of that, because a slower machine slows the peers too. A group without peers has no
  such ratio.

The exit status is 1 if a benchmark of ours is slower or gone; peers are printed and never fail.

One run per side is enough for work of many milliseconds on a quiet machine. Small ops need more. On a
virtual machine with two cores, of 60 comparisons of runs of one commit (48 benchmarks of 0.1 to 20 ms) 36 had
a flag with one run per side, 12 with two, 4 with three and 1 with five. A spin of 20% around one kernel was
flagged in 28, 30, 30 and 30 of 30; a C++ kernel that visits every row 1.2 times (13 to 23% slower, by shape)
in 22, 20, 29 and 30 of 30. With the whole threshold beside the peers too, the kernel was flagged in 15
of 30 with three runs per side and in none with five, because peers of 0.1 ms drift by 5%.

Ten whole runs of one commit (287 benchmarks, 90 of them ours; two of them two hours earlier), every
second one on one side, raise no flag in either direction. Of all 252 ways to take five of them 13 have one
flag each, of five ops and latencies under 12 ms, most of them the gradient of an embedding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run as a script: bench/ must not be on the path, its files could shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.lib.turns import is_ours, precision

THRESHOLD = 15.0  # percent
BESIDE = ("beside its peers", "at best beside them")


@dataclass(frozen=True)
class Change:
    """A benchmark in two runs; times in seconds.

    Attributes:
        name: the benchmark's.
        group: the benchmarks that it is compared with.
        candidate: the engine that computes.
        before, after: the medians of the best runs; None where a side does not have it.
        ratios: after over before, per kind: "median", "least", "beside its peers", "at best beside them".
    """

    name: str
    group: str
    candidate: str
    before: float | None
    after: float | None
    ratios: dict[str, float]

    @property
    def is_ours(self) -> bool:
        """Whether it is of this project; a benchmark without candidates is."""
        return not self.candidate or is_ours(self.candidate)

    def is_slower(self, threshold: float) -> bool:
        """Whether every ratio is above its threshold; `threshold` is in percent."""
        return bool(self.ratios) and all(
            ratio > 1 + allowed(kind, threshold) / 100 for kind, ratio in self.ratios.items()
        )

    def is_faster(self, threshold: float) -> bool:
        """Whether every ratio is below 1 over its threshold."""
        return bool(self.ratios) and all(
            ratio < 1 / (1 + allowed(kind, threshold) / 100) for kind, ratio in self.ratios.items()
        )


def allowed(kind: str, threshold: float) -> float:
    """Percent that a ratio of this kind may be off: beside the peers half of the threshold."""
    return threshold / 2 if kind in BESIDE else threshold


def read(path: Path) -> dict[str, dict]:
    """Name -> benchmark of a file of the suite. Raises ValueError where it is none."""
    try:
        data = json.loads(path.read_text())
        return {each["fullname"]: each for each in data["benchmarks"] if each["stats"]["median"] > 0}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a JSON file of the benchmark suite ({error!r})") from error


def candidate_of(benchmark: dict) -> str:
    """The engine that computes; "" for a benchmark of one candidate."""
    return benchmark["extra_info"].get("candidate") or (benchmark["params"] or {}).get("candidate", "")


def beside_peers(benchmark: dict, run: Iterable[dict]) -> float | None:
    """The median over that of the peers of the same group and precision; None without peers.

    A peer is compared with the other peers.
    """
    mine = candidate_of(benchmark)
    peers = [
        other["stats"]["median"]
        for other in run
        if other["group"] == benchmark["group"]
        and other["fullname"] != benchmark["fullname"]
        and precision(candidate_of(other)) == precision(mine)
        and not is_ours(candidate_of(other))
    ]
    return benchmark["stats"]["median"] / statistics.median(peers) if peers else None


def runs_of(text: str) -> list[dict[str, dict]]:
    """The runs of one side: files separated by commas. Raises ValueError as `read`."""
    return [read(Path(name)) for name in text.split(",")]


def least(runs: list[dict], name: str, key: str) -> float:
    """The least of a benchmark's statistic over the runs that have it."""
    return min(run[name]["stats"][key] for run in runs if name in run)


def changes(before: list[dict[str, dict]], after: list[dict[str, dict]]) -> list[Change]:
    """Every benchmark of either side's runs, in the order of the later ones."""
    names = dict.fromkeys(name for runs in (after, before) for run in runs for name in run)
    found = []
    for name in names:
        sides = [[run for run in runs if name in run] for runs in (before, after)]
        one = (sides[1] or sides[0])[0][name]
        ratios = {}
        if all(sides):
            for kind, key in (("median", "median"), ("least", "min")):
                old, new = (least(runs, name, key) for runs in sides)
                ratios[kind] = new / old
            beside = [[beside_peers(run[name], run.values()) for run in runs] for runs in sides]
            if None not in itertools.chain(*beside):
                ratios["beside its peers"] = statistics.median(beside[1]) / statistics.median(beside[0])
                ratios["at best beside them"] = min(beside[1]) / min(beside[0])
        medians = [least(runs, name, "median") if runs else None for runs in sides]
        found.append(Change(one["name"], one["group"], candidate_of(one), *medians, ratios))
    return found


def line(change: Change, threshold: float) -> str:
    times = ["-" if s is None else f"{s * 1e3:,.3f} ms" for s in (change.before, change.after)]
    ratios = "  ".join(f"{kind} {ratio:.2f}" for kind, ratio in change.ratios.items())
    verdict = ""
    if change.after is None:
        verdict = "GONE"
    elif change.is_slower(threshold):
        verdict = "SLOWER" if change.is_ours else "slower"
    elif change.is_faster(threshold):
        verdict = "faster"
    return f"{verdict:7} {change.name:<70} {times[0]:>14} {times[1]:>14}  {ratios}".rstrip()


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 if a benchmark of ours is slower or gone."""
    parser = argparse.ArgumentParser(
        prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a file of the suite, or several separated by commas")
    parser.add_argument("after", help="files of the later code")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="percent (default: %(default)g)")
    parser.add_argument("--only-changes", action="store_true", help="print what is slower, faster or gone")
    args = parser.parse_args(argv)
    if not args.threshold > 0:
        parser.error(f"--threshold: got {args.threshold:g}, expected more than 0 percent")
    try:
        found = changes(runs_of(args.before), runs_of(args.after))
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    if not any(change.ratios for change in found):
        print(f"compare: {args.before} and {args.after} have no benchmark in common", file=sys.stderr)
        return 2
    for change in found:
        text = line(change, args.threshold)
        if not args.only_changes or not text.startswith(" "):
            print(text)
    ours = [change for change in found if change.is_ours]
    bad = [change for change in ours if change.after is None or change.is_slower(args.threshold)]
    print(
        f"{len(found)} benchmarks, {len(ours)} of them ours; at {args.threshold:g}% "
        f"{sum(change.is_slower(args.threshold) for change in ours)} of ours are slower, "
        f"{sum(change.is_faster(args.threshold) for change in ours)} faster, "
        f"{sum(change.after is None for change in ours)} gone"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
