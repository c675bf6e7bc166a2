"""The roofline of a run's ops: operations per byte against the rate achieved, beside the machine's roofs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench.lib.charts import labels
from bench.lib.charts import suite as charts
from bench.lib.results import Benchmark, Run

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

PASSES = ("forward", "backward")


def workloads(run: Run) -> list[str]:
    """The workloads whose ops were timed."""
    return list(dict.fromkeys(each.extra["workload"] for each in run.of("ops")))


def short_names(benchmarks: Iterable[Benchmark]) -> dict[tuple[str, str], str]:
    """(op, case) -> a name that is as short as the op's other cases allow."""
    cases: dict[str, dict[str, None]] = {}
    for each in benchmarks:
        cases.setdefault(each.extra["op"], {})[each.extra["case"]] = None
    found = {}
    for op, names in cases.items():
        parts = [re.split(r"(?<=[-x])", f"{case}-") for case in names]  # "8x", "128-", …
        same = 0 if len(names) > 1 else len(parts[0])
        while len({tuple(some[: same + 1]) for some in parts}) == 1 and same < min(map(len, parts)):
            same += 1
        for case, some in zip(names, parts, strict=True):
            rest = "".join(some[same:]).rstrip("-")
            found[op, case] = f"{op} {rest}".strip().replace("_", " ")
    return found


def roofline(run: Run, workload: str) -> matplotlib.figure.Figure:
    """Arithmetic intensity against the rate achieved, of every op of one workload.

    A panel per pass and dtype. A thin line joins those that did the same work; the key below says what its
    number means. The last column has the ops that do no arithmetic, by bytes per second.

    Raises:
        ValueError: the run has no roofs.
    """
    if run.roofs is None:
        raise ValueError(f"{run.path}: no roofs, expected the machine's for the roofline")
    rows = [each for each in run.of("ops") if each.extra["workload"] == workload]
    counted = [each for each in rows if each.extra["flops"] and each.extra["moved_bytes"]]
    movers = [each for each in rows if not each.extra["flops"] and each.extra["moved_bytes"]]
    passes = [name for name in PASSES if any(each.extra["pass"] == name for each in rows)]
    dtypes = list(dict.fromkeys(each.extra["dtype"] for each in counted))
    widths = [1.0] * len(dtypes) + [0.45] * bool(movers)
    figure = charts.figure_of(1.5 + 6.0 * sum(widths), 1.2 + 4.9 * len(passes))
    grid = figure.subplots(len(passes), len(widths), squeeze=False, width_ratios=widths)
    names = short_names(rows)
    numbers = {key: i for i, key in enumerate(_cases(counted), 1)}
    places = [each.extra["flops"] / each.extra["moved_bytes"] for each in counted]
    places += [run.roofs.gflops[tag] / run.roofs.gbytes for tag in dtypes if tag in run.roofs.gflops]
    rates = [each.extra["gflops"] for each in counted]
    panels = []
    for line, which in zip(grid, passes, strict=True):
        for axes, tag in zip(line, dtypes, strict=False):
            some = [each for each in counted if (each.extra["pass"], each.extra["dtype"]) == (which, tag)]
            axes.set_title(f"{which}, {tag}", fontsize=10)
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlim(min(places) / 2, max(places) * 3)
            axes.set_ylim(min(rates) / 2.5, max([*rates, *run.roofs.gflops.values()]) * 1.8)
            axes.xaxis.set_major_formatter(charts.thousands)
            axes.yaxis.set_major_formatter(charts.thousands)
            axes.grid(alpha=0.25)
            roofs = _roof_lines(axes, run, tag, some)
            panels.append((axes, _points(axes, some, numbers), roofs))
            axes.set_xlabel("operations per byte moved", fontsize=9)
        if dtypes:
            line[0].set_ylabel("GFLOP/s", fontsize=9)
        if movers:
            _moved(line[-1], [each for each in movers if each.extra["pass"] == which], run, names, which)
    present = {each.extra["backend"] for each in rows}
    known = [name for name in charts.BACKENDS if name in present]
    handles = [_marker(name) for name in (*known, *sorted(present - {*known}))]
    options = {"frameon": False, "fontsize": 9, "handletextpad": 0.5}
    grid[0, 0].legend(handles=handles, loc="lower right", **options)
    meanings = [_number(number, names[key]) for key, number in numbers.items()]
    figure.legend(handles=meanings, loc="outside lower center", ncols=max(1, len(dtypes) * 2 + 1), **options)
    figure.suptitle(
        f"Every op of {workload} beside the roofs of {charts.machine(run)}\n"
        f"{charts.made(run)}; {charts.batch(rows)}",
        fontsize=11,
    )
    figure.canvas.draw()  # the labels need the final layout
    figure.set_layout_engine("none")
    for axes, points, roofs in panels:
        marks = [point for point in points if point[2]]
        labels.place(axes, marks, [point[:2] for point in points], roofs, list(axes.texts))
    return figure


def _marker(backend: str, **options: object) -> Any:
    from matplotlib.lines import Line2D

    colour, marker, filled, label = charts.BACKENDS.get(backend, ("#5f5f5f", "v", True, backend))
    face = colour if filled else "white"
    return Line2D(
        [], [], ls="none", marker=marker, color=colour, markerfacecolor=face, label=label, **options
    )


def _number(number: int, name: str) -> Any:
    """A line of the key: what a number in the panels means."""
    from matplotlib.lines import Line2D

    size = 3.5 + 3 * len(str(number))
    return Line2D(
        [], [], ls="none", marker=f"${number}$", color="black", markersize=size, mew=0.3, label=name
    )


def _roof_lines(
    axes: matplotlib.axes.Axes, run: Run, tag: str, rows: Sequence[Benchmark]
) -> list[list[tuple[float, float]]]:
    """Draw the memory's slope and the peak of each dtype that the rows compute in; returns the polylines."""
    low, high = axes.get_xlim()
    tags = dict.fromkeys([tag, *(["int8"] if any("int8" in each.extra["op"] for each in rows) else [])])
    drawn = []
    for name in (name for name in tags if name in run.roofs.gflops):
        peak = run.roofs.gflops[name]
        ridge = min(max(peak / run.roofs.gbytes, low), high)
        corners = [(low, run.roofs.gbytes * low), (ridge, min(peak, run.roofs.gbytes * ridge)), (high, peak)]
        axes.plot(
            *zip(*corners, strict=True), color="black", lw=1.1, ls=charts.DTYPES.get(name, "-"), zorder=1
        )
        axes.annotate(
            f"{name}: {peak:,.0f} GFLOP/s",
            corners[1],
            (-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )
        drawn.append(corners)
    start = max(low * 1.15, axes.get_ylim()[0] * 1.3 / run.roofs.gbytes)
    axes.annotate(
        f"memory: {run.roofs.gbytes:,.0f} GB/s",
        (start, run.roofs.gbytes * start),
        (0, 4),
        textcoords="offset points",
        fontsize=8,
        rotation=45,
        rotation_mode="anchor",
        transform_rotates_text=True,
    )
    return drawn


def _cases(rows: Iterable[Benchmark]) -> dict[tuple[str, str], list[Benchmark]]:
    """(op, case) -> its rows."""
    found: dict[tuple[str, str], list[Benchmark]] = {}
    for each in rows:
        found.setdefault((each.extra["op"], each.extra["case"]), []).append(each)
    return found


def _point(axes: matplotlib.axes.Axes, x: float, y: float, each: Benchmark) -> None:
    style = _marker(each.extra["backend"])
    face = {"color": style.get_color(), "markerfacecolor": style.get_markerfacecolor()}
    axes.plot(x, y, ls="none", marker=style.get_marker(), markersize=5, zorder=3 + each.ours, **face)


def _points(
    axes: matplotlib.axes.Axes, rows: Sequence[Benchmark], numbers: dict[tuple[str, str], int]
) -> list[labels.Label]:
    """Draw the points; returns their labels, the number at the fastest of each op and case only."""
    found = []
    for key, same in _cases(rows).items():
        x = same[0].extra["flops"] / same[0].extra["moved_bytes"]
        heights = [each.extra["gflops"] for each in same]
        axes.plot([x, x], [min(heights), max(heights)], color="0.6", lw=0.8, zorder=2)
        for each, y in zip(same, heights, strict=True):
            _point(axes, x, y, each)
            found.append((x, y, str(numbers[key]) if y == max(heights) else "", "black"))
    return found


def _moved(
    axes: matplotlib.axes.Axes,
    rows: Sequence[Benchmark],
    run: Run,
    names: dict[tuple[str, str], str],
    which: str,
) -> None:
    """The ops without arithmetic: GB/s beside the memory's."""
    if not rows:
        axes.set_axis_off()
        return
    keys = list(dict.fromkeys((each.extra["op"], each.extra["case"], each.extra["dtype"]) for each in rows))
    for each in rows:
        _point(
            axes,
            each.extra["gbs"],
            keys.index((each.extra["op"], each.extra["case"], each.extra["dtype"])),
            each,
        )
    axes.axvline(run.roofs.gbytes, color="black", lw=1.1)
    axes.set_yticks(range(len(keys)), [f"{names[key[:2]]}\n{key[2]}" for key in keys], fontsize=8)
    axes.set_ylim(len(keys) - 0.5, -0.5)
    widest = max([run.roofs.gbytes, *(each.extra["gbs"] for each in rows)])
    axes.set_xlim(-0.03 * widest, 1.15 * widest)
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(f"{which}, no arithmetic", fontsize=10)
    axes.set_xlabel(f"GB/s (memory: {run.roofs.gbytes:,.0f})", fontsize=9)
