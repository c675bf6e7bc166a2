"""The generated tables of bench/results/README.md: the newest runs of each device."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.lib import results
from bench.lib.results import Benchmark, Run
from bench.lib.turns import RATES, is_ours

PAGE = results.RESULTS / "README.md"
COMMAND = "python bench/plot.py tables"
SECTION = "suite results"


# ---- Markdown ----


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    text = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return [text[0], "|" + "---|" * len(head), *text[1:]]


def filled(text: str, made: Mapping[str, list[str]], by: str) -> str:
    """`text` with each generated section between its two markers replaced.

    Args:
        text: text of a page.
        made: name of a section -> its lines.
        by: the command that the marker names.

    Raises:
        ValueError: naming the section whose markers are not there once each, in order.
    """
    for name, section in made.items():
        begin, end = f"<!-- {name}: made by `{by}` -->\n", f"<!-- end of {name} -->\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"expected {begin.strip()} and {end.strip()}, once each, in this order")
        pattern = re.escape(begin) + r".*?" + re.escape(end)
        body = begin + "\n" + "\n".join(section).strip() + "\n\n" + end
        text = re.sub(pattern, lambda _, body=body: body, text, flags=re.DOTALL)
    return text


# ---- a run of the suite ----


def where(run: Run) -> str:
    """Device, threads, versions, file, commit, date and roofs of a run."""
    machine = run.machine
    commit = run.commit[:9] + (" and changes" if run.changed else "")
    parts = [
        f"**{machine['device']}**, {machine['threads']} threads, torch {machine['torch']}",
        f"`bench/results/{run.path.parent.name}/{run.path.name}`",
        f"commit {commit}",
        run.date[:10],
    ]
    if run.roofs:
        peaks = ", ".join(f"{tag} {peak:,.0f}" for tag, peak in run.roofs.gflops.items())
        parts.append(f"roofs: {peaks} GFLOP/s, memory {run.roofs.gbytes:,.0f} GB/s")
    if run.note:
        parts.append(f"note: {run.note}")
    return "; ".join(parts) + "."


def time_of(each: Benchmark) -> str:
    """A median: "812 µs", "1,234 µs" or "45.6 ms"; "~" before what is too noisy for a claim."""
    before = "~" if each.extra["noisy"] else ""
    if each.seconds < 1e-2:
        return f"{before}{each.seconds * 1e6:,.0f} µs"
    return f"{before}{each.seconds * 1e3:,.1f} ms"


def rate_of(each: Benchmark) -> str:
    """What was done per second: tokens, sentences, arithmetic, bytes; of a latency the 90th percentile."""
    if "p90_ms" in each.extra:
        return f"p90 {each.extra['p90_ms']:,.2f} ms"
    for key, (decimals, unit) in RATES.items():
        if each.extra.get(key):
            return f"{each.extra[key]:,.{decimals}f} {unit}"
    return "–"


def ratio_cell(value: float | str | None) -> str:
    """Times a peer's speed, or in a word why it is not said."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return {"too noisy": "noisy"}.get(value.split(":")[0], value.split(":")[0])
    return f"{value:.2f}"


def kind_table(rows: Iterable[Benchmark]) -> list[str]:
    """A row per group and candidate of ours, of one kind; of ops only the backend that serves by default."""
    ours = [each for each in rows if each.ours and each.extra.get("serves", True)]
    # peers are of the same precision as the row
    peers = list(dict.fromkeys(name.partition("-")[0] for each in ours for name in each.extra["over"]))
    body = []
    for each in ours:
        over = {name.partition("-")[0]: ratio for name, ratio in each.extra["over"].items()}
        share = "–" if each.share is None else f"{each.share:.0%}"
        body.append(
            [
                each.group.removeprefix(f"{each.kind}-"),
                each.candidate + ("" if each.extra["correct"] else " (incorrect)"),
                time_of(each),
                rate_of(each),
                share,
                *(ratio_cell(over.get(name)) for name in peers),
            ]
        )
    return table(["group", "ours", "time", "rate", "of roof", *(f"× {name}" for name in peers)], body)


def memory_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A row per process of ours: the peak of its memory, and that over each peer's."""
    ours = [each for each in rows if is_ours(each["candidate"])]
    peers = list(dict.fromkeys(name.partition("-")[0] for each in ours for name in each["over"]))
    body = []
    for each in ours:
        over = {name.partition("-")[0]: ratio for name, ratio in each["over"].items()}
        sizes = [f"{each[key]:,.0f} MiB" for key in ("peak_mib", "above_mib")]
        group = each["group"].removeprefix("memory-")
        body.append([group, each["candidate"], *sizes, *(ratio_cell(over.get(name)) for name in peers)])
    head = ["group", "ours", "peak", "above the loaded model", *(f"of that of {name}" for name in peers)]
    return table(head, body)


def absent(run: Run) -> list[str]:
    """Who has no time and why, those of one reason together."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in run.without_a_time:
        why = each["why"].splitlines()[0].replace("|", "/").replace("`", "'")
        why = why if len(why) <= 120 else f"{why[:117]}..."
        found.setdefault((each["candidate"], why), []).append(each["group"])
    lines = []
    for (candidate, why), groups in found.items():
        those = ", ".join(groups) if len(groups) <= 3 else f"{len(groups)} groups"
        lines.append(f"- no time of `{candidate}` in {those}: {why}")
    return lines


def of_run(run: Run) -> list[str]:
    text = [where(run), ""]
    for kind in dict.fromkeys(each.kind for each in run.benchmarks):
        rows = kind_table(run.of(kind))
        if len(rows) > 32:
            summary = f"<details><summary>{kind}: {len(rows) - 2} rows</summary>"
            text += [summary, "", *rows, "", "</details>", ""]
        else:
            text += [f"{kind}:", "", *rows, ""]
    if run.memory:
        text += [
            "memory: the peak of the process, and that over the peer's:",
            "",
            *memory_table(run.memory),
            "",
        ]
    without = absent(run)
    return [*text, *without, ""] if without else text


def sections(folder: Path = results.RESULTS) -> dict[str, list[str]]:
    """Name of the generated section -> its lines. Raises ValueError naming a file that its schema refuses."""
    runs = list(results.newest(folder))
    if not runs:
        return {SECTION: ["`bench/results/` holds no run of the suite yet."]}
    text = [
        "Each device has its newest run of the whole suite, and the newest run of each kind that it lacks. "
        "`×` is the speed-up over the peer, in the same precision and run. "
        "`~` and `noisy` mark quartiles that are too far apart for a claim. "
        "Rows of ops have the backend that serves by default.",
        "",
    ]
    for run in runs:
        text += of_run(run)
    return {SECTION: text}


def main(argv: list[str]) -> int:
    """Write the page's section; with --check, only print whether it would change."""
    parser = argparse.ArgumentParser(prog="plot tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if it would change"
    )
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="instead of bench/results")
    parser.add_argument("--page", type=Path, default=PAGE, help="instead of bench/results/README.md")
    args = parser.parse_args(argv)
    try:
        before = args.page.read_text(encoding="utf-8")
        after = filled(before, sections(args.results), COMMAND)
    except (OSError, ValueError) as error:
        print(f"plot tables: {error}", file=sys.stderr)
        return 2
    if before == after:
        return 0
    if args.check:
        print(f"{args.page}: out of date")
        return 1
    args.page.write_text(after, encoding="utf-8")
    print(args.page)
    return 0
