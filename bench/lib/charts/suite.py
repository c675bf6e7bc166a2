"""Charts of runs of the suite: the peers' bars, the ops beside the roofs, and the history.

Each function returns a matplotlib Figure and writes no file. matplotlib is imported only inside them.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench.lib.results import Benchmark, Run
from bench.lib.turns import is_ours

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# in the order of the bars; any other candidate comes after them in a colour of OTHERS
COLOURS = {
    "fastbert-fp32": "#0b4f8a",
    "fastbert-bf16": "#2a86d1",
    "fastbert-int8": "#7fbdf0",
    "transformers-fp32": "#8a4b0b",
    "transformers-bf16": "#d9903d",
    "torch_compile-fp32": "#8a7a0b",
    "torch_compile-bf16": "#d9c83d",
    "onnxruntime-fp32": "#2f6b2f",
    "onnxruntime-int8": "#84c184",
    "openvino-fp32": "#5c2f7a",
    "openvino-bf16": "#a97fc6",
}
OTHERS = ("#9b2d3f", "#d9737f", "#2d7f86", "#7fc4c9", "#5f5f5f", "#a8a8a8")
DTYPES = {"fp32": "-", "bf16": "--", "int8": ":", "fp16": "-."}  # the line of each dtype's floor
TITLES = {"base": "BERT-base", "large": "BERT-large", "minilm": "MiniLM-L6", "tiny": "a tiny BERT"}
TITLES |= {"modernbert": "ModernBERT-base", "deberta-v3": "DeBERTa-v3-base", "xlnet": "XLNet-base"}
TITLES |= {"mobilebert": "MobileBERT", "longformer": "Longformer-base", "bigbird": "BigBird-base"}
# backend -> its colour in the charts of ops
BACKENDS = {"cpu": "#0b4f8a", "cuda": "#0b4f8a", "triton": "#2a86d1", "aten": "#d9903d", "torch": "#8a4b0b"}


def require_matplotlib() -> None:
    """Raise RuntimeError, with what to install, where matplotlib is missing."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"no chart: matplotlib is not installed: pip install .[bench] ({error})"
        ) from error


def colours(candidates: Iterable[str]) -> dict[str, str]:
    """Candidate -> its colour, in the order of the bars."""
    names = list(dict.fromkeys(candidates))
    rest = itertools.cycle(OTHERS)
    found = {name: COLOURS[name] for name in COLOURS if name in names}
    return found | {name: next(rest) for name in names if name not in COLOURS}


def machine(run: Run) -> str:
    """Threads and device of a run."""
    isa = (run.machine.get("cpu") or {}).get("isa")  # where it is another than serves by default
    return f"{run.machine['threads']} threads of {run.machine['device']}" + (f", {isa}" if isa else "")


def made(run: Run) -> str:
    """Commit and date of a run."""
    text = f"commit {run.commit[:9]}{' and changes' if run.changed else ''}, {run.date[:10]}"
    return text + ("; A SMOKE RUN, NO RESULT" if run.smoke else "")


def models(run: Run) -> list[str]:
    """The models whose forward was timed."""
    return list(dict.fromkeys(each.params["model"] for each in run.of("encoder")))


def figure_of(width: float, height: float, layout: str = "constrained") -> matplotlib.figure.Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def thousands(value: float, _: object = None) -> str:
    """An axis' number: 20,000, 300, 0.5."""
    return f"{value:,.0f}" if value >= 1 else f"{value:.4f}".rstrip("0").rstrip(".")


def batch(benchmarks: Iterable[Benchmark]) -> str:
    low = min((each.rounds for each in benchmarks), default=0)
    return f"one run, interleaved, medians of at least {low}"


# ---- the peers' bars ----


def bars(run: Run, model: str) -> matplotlib.figure.Figure:
    """Real tokens per second of a model's forward: a group per workload, a bar per candidate, the floors.

    A floor is the rate at which the matrix products of the real tokens alone would keep the processor at its
    measured peak for that dtype.
    """
    rows = [each for each in run.of("encoder") if each.params["model"] == model]
    names = list(dict.fromkeys(each.params["workload"] for each in rows))
    found = {(each.params["workload"], each.candidate): each for each in rows}
    palette = colours(each.candidate for each in rows)
    width = 0.86 / len(palette)
    figure = figure_of(3.4 + 2.6 * max(len(names), 2), 6.2)
    axes = figure.subplots()
    for i, (engine, colour) in enumerate(palette.items()):
        places = [x - 0.43 + (i + 0.5) * width for x in range(len(names))]
        timed = [found.get((name, engine)) for name in names]
        heights = [0.0 if each is None else each.extra["tokens_per_s"] for each in timed]
        axes.bar(places, heights, width * 0.94, label=engine.replace("-", " "), color=colour)
        for place, height, each in zip(places, heights, timed, strict=True):
            if each is None:
                continue
            axes.text(
                place,
                height,
                f" {'~' if each.extra.get('noisy') else ''}{height:,.0f}",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=7.5,
                bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.5, "edgecolor": "none"},
                zorder=3,
            )
    floors = {each.params["workload"]: each.extra["floor_tokens_per_s"] for each in rows}
    # a floor far above the bars would make them too short to read: an arrow names it instead
    fastest = max(each.extra["tokens_per_s"] for each in rows)
    near = [floor[tag] for floor in floors.values() for tag in ("fp32", "bf16") if tag in floor]
    top = 1.22 * max([fastest, *(value for value in near if value < 4 * fastest)])
    tags = [tag for tag in DTYPES if any(name.endswith(tag) for name in palette)]
    for x, name in enumerate(names):
        beyond = []
        for tag in (tag for tag in tags if tag in floors[name]):
            peak = f": {run.roofs.gflops[tag]:,.0f} GFLOP/s" if run.roofs else ""
            height = floors[name][tag]
            label = f"floor {tag}{peak}" if x == 0 else None
            axes.hlines(height, x - 0.46, x + 0.46, "black", DTYPES[tag], lw=1.3, label=label)
            if height > top:
                beyond.append(f"floor {tag} {height:,.0f} ↑")
        axes.text(x, 0.985 * top, "\n".join(beyond), ha="center", va="top", fontsize=8.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("real tokens per second (padding does not count)")
    axes.yaxis.set_major_formatter(thousands)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_ylim(0, top)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.suptitle(
        f"{TITLES.get(model, model)} forward on {machine(run)}\n{made(run)}; {batch(rows)}", fontsize=11
    )
    axes.set_xlabel(_notes(run, model, rows), fontsize=8, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    return figure


def _notes(run: Run, model: str, rows: Sequence[Benchmark]) -> str:
    """What the bars cannot show: noise, and who has no bar."""
    groups = {each.group: each.params["workload"] for each in rows}
    absent: dict[str, list[str]] = {}
    for each in run.without_a_time:
        if each["group"] in groups:
            absent.setdefault(each["candidate"].replace("-", " "), []).append(groups[each["group"]])
    notes = ["~: too noisy for a claim."] if any(each.extra.get("noisy") for each in rows) else []
    if absent:
        parts = (f"{name} ({', '.join(where)})" for name, where in absent.items())
        notes.append(f"Without a time: {'; '.join(parts)}.")
    return "\n".join(textwrap.wrap(" ".join(notes), 40 + 40 * max(len(groups), 2)))


# ---- time over length ----


def of_one_text(run: Run, model: str) -> dict[int, list[Benchmark]]:
    """Tokens -> the rows of a model's forward on one text of that many tokens."""
    found: dict[int, list[Benchmark]] = {}
    for each in run.of("encoder"):
        size, _, tokens = each.params["workload"].partition("x")
        if each.params["model"] == model and size == "1" and tokens.isdigit():
            found.setdefault(int(tokens), []).append(each)
    return dict(sorted(found.items()))


def lengths(run: Run, model: str) -> matplotlib.figure.Figure:
    """Milliseconds of a model's forward over the length of one text, and the slopes of n and n²."""
    rows = of_one_text(run, model)
    palette = colours(each.candidate for some in rows.values() for each in some)
    figure = figure_of(8.0, 5.2)
    axes = figure.subplots()
    for name, colour in palette.items():
        points = [(n, 1e3 * r.seconds) for n, some in rows.items() for r in some if r.candidate == name]
        wide = 2.0 if is_ours(name) else 1.2
        axes.plot(*zip(*points, strict=True), "o-", color=colour, lw=wide, label=name.replace("-", " "))
    first, low = min(rows), min(1e3 * each.seconds for each in rows[min(rows)])
    for power, style in ((1, ":"), (2, "-.")):
        times = [low * (n / first) ** power for n in rows]
        axes.plot(list(rows), times, style, color="0.5", lw=1, label=f"the slope of n{'²' * (power > 1)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(rows), [f"{n:,}" for n in rows])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(thousands)
    axes.set_xlabel("tokens of one text")
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    timed = [each for some in rows.values() for each in some]
    figure.suptitle(
        f"{TITLES.get(model, model)} forward on {machine(run)}\n{made(run)}; {batch(timed)}", fontsize=11
    )
    axes.legend(loc="upper left", fontsize=9, frameon=False)
    return figure


# ---- the ops beside the roofs ----


def op_workloads(run: Run) -> list[str]:
    """The workloads whose ops were timed and have roofs."""
    return list(dict.fromkeys(each.extra["workload"] for each in run.of("ops") if each.share is not None))


def shares(run: Run, workload: str) -> matplotlib.figure.Figure:
    """The part of its roof that each op of one workload reaches: a panel per pass and dtype, a line per case.

    The roof is the time that the op's arithmetic takes at the machine's peak, or its bytes at the machine's
    bandwidth, whichever is longer. Who does less than that arithmetic is at 100%.
    """
    rows = [r for r in run.of("ops") if r.extra["workload"] == workload and r.share is not None]
    lines = {(r.extra["op"], r.extra["case"]): None for r in rows}
    places = {key: -at for at, key in enumerate(lines)}
    panels = list(dict.fromkeys((r.extra["pass"], r.extra["dtype"]) for r in rows))
    backends = sorted({r.candidate.split("-")[0] for r in rows}, key=list(BACKENDS).index)
    figure = figure_of(4.5 + 2.6 * len(panels), 1.8 + 0.21 * len(lines))
    for axes, panel in zip(
        figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels, strict=True
    ):
        some = [r for r in rows if (r.extra["pass"], r.extra["dtype"]) == panel]
        for name in backends:
            dots = [r for r in some if r.candidate.split("-")[0] == name]
            ours = is_ours(dots[0].candidate) if dots else False
            axes.plot(
                [100 * min(r.share, 1.0) for r in dots],
                [places[r.extra["op"], r.extra["case"]] for r in dots],
                ls="none",
                marker="o" if ours else "D",
                ms=6 if ours else 4,
                color=BACKENDS[name],
                zorder=3 + ours,
                clip_on=False,
                label={"aten": "fastbert by ATen", "torch": "plain PyTorch"}.get(name, f"fastbert, {name}"),
            )
        axes.set_title(", ".join(panel), fontsize=10)
        axes.set_xlim(0, 100)
        axes.set_xlabel("% of the roof", fontsize=9)
        axes.grid(alpha=0.3)
        axes.set_yticks(list(places.values()), [f"{op} {case}" for op, case in lines], fontsize=7.5)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(backends), frameon=False, fontsize=9)
    peaks = ", ".join(f"{tag} {peak:,.0f}" for tag, peak in run.roofs.gflops.items()) if run.roofs else ""
    bandwidth = f" GFLOP/s, memory {run.roofs.gbytes:,.0f} GB/s" if run.roofs else ""
    figure.suptitle(
        f"Every op of {workload} beside the roofs of {machine(run)}: {peaks}{bandwidth}\n"
        f"{made(run)}; {batch(rows)}",
        fontsize=10.5,
    )
    return figure


# ---- the history ----


def kinds(runs: Iterable[Run]) -> list[str]:
    """The kinds of groups that any of the runs timed."""
    return list(dict.fromkeys(each.kind for run in runs for each in run.benchmarks))


def _panel(each: Benchmark) -> str:
    """The panel of the history that shows a benchmark: of ops one per op and pass, else one per group."""
    if each.kind == "ops":
        return f"{each.extra['op']} {each.extra['pass']}"
    return each.group.removeprefix(f"{each.kind}-")


def series(runs: Sequence[Run], kind: str) -> dict[str, dict[tuple[str, str], list[tuple[int, float, bool]]]]:
    """Panel -> (group, candidate) -> (number of the run, speed over that in the first, noisy)."""
    first: dict[tuple[str, str], float] = {}
    found: dict[str, dict[tuple[str, str], list[tuple[int, float, bool]]]] = {}
    for i, run in enumerate(runs):
        for each in run.of(kind):
            key = each.group, each.candidate
            ratio = first.setdefault(key, each.seconds) / each.seconds
            lines = found.setdefault(_panel(each), {})
            lines.setdefault(key, []).append((i, ratio, bool(each.extra.get("noisy"))))
    return found


def is_repeated(runs: Sequence[Run], kind: str) -> bool:
    """Whether a benchmark of this kind is in two runs at least: else there is no history to see."""
    return any(len(points) > 1 for found in series(runs, kind).values() for points in found.values())


def history(runs: Sequence[Run], kind: str) -> matplotlib.figure.Figure:
    """Speed of every benchmark of a kind over the runs of one machine, as a multiple of its first.

    Args:
        runs: runs of one machine, the earliest first.
        kind: "encoder", "ops", ….
    """
    panels = series(runs, kind)
    columns = min(len(panels), 4)
    lines = math.ceil(len(panels) / columns)
    figure = figure_of(max(1.6 + 3.4 * columns, 8.5), 1.9 + 2.3 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).ravel()
    candidates = [name for found in panels.values() for _, name in found]
    if kind == "ops":
        names = {name: BACKENDS.get(name.split("-")[0], "#5f5f5f") for name in candidates}
    else:
        names = colours(candidates)
    handles: dict[str, Any] = {}
    for axes, (panel, found) in zip(grid, panels.items(), strict=False):
        axes.axhline(1, color="0.4", lw=0.8)
        for (group, name), points in found.items():
            ours = is_ours(name)
            tag = name.partition("-")[2]
            style = DTYPES.get(tag, "-") if kind == "ops" else "-"
            xs, ys = [point[0] for point in points], [point[1] for point in points]
            options = {"color": names[name], "ls": style, "lw": 1.7 if ours else 0.9}
            (drawn,) = axes.plot(xs, ys, alpha=1.0 if ours else 0.75, zorder=3 + ours, gid=group, **options)
            handles.setdefault(name, drawn)
            for x, y, noisy in points:
                face = "white" if noisy else names[name]
                dot = {"color": names[name], "markerfacecolor": face, "ms": 3.5 if ours else 2.5}
                axes.plot(x, y, ls="none", marker="o", zorder=4 + ours, **dot)
        axes.set_title(panel, fontsize=9)
        axes.grid(alpha=0.25)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _commits(grid, len(panels), columns, runs)
    for axes in grid[::columns]:
        axes.set_ylabel("speed, × the first", fontsize=9)
    ordered = {name: handles[name] for name in sorted(names, key=lambda name: not is_ours(name))}
    figure.legend(
        ordered.values(),
        [name.replace("-", " ") for name in ordered],
        loc="outside lower center",
        ncols=min(len(ordered), 6 if columns > 2 else 4),
        frameon=False,
        fontsize=8.5,
    )
    last = runs[-1]
    figure.suptitle(
        f"{kind}: {len(runs)} runs on {machine(last)}, {runs[0].date[:10]} to {last.date[:10]}\n"
        "speed over that in the first run with it; hollow: too noisy for a claim",
        fontsize=10.5,
    )
    return figure


def _commits(grid: Sequence[matplotlib.axes.Axes], used: int, columns: int, runs: Sequence[Run]) -> None:
    """Commits below the lowest panel of each column; of many runs only some are named."""
    step = math.ceil(len(runs) / 12)
    shown = sorted({*range(0, len(runs), step), len(runs) - 1} - {*range(len(runs) - step, len(runs) - 1)})
    texts = [f"{runs[i].commit[:7]}{'*' if runs[i].changed else ''}" for i in shown]
    for axes in grid[:used]:
        axes.set_xlim(-0.3, len(runs) - 0.7)
        axes.set_xticks(shown, texts, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    for i, axes in enumerate(grid[:used]):
        axes.tick_params(labelbottom=i + columns >= used)
