"""A picture of the cost model: predicted against measured times, with the band that rows are held to."""

from __future__ import annotations

from pathlib import Path

from bench.lib.costs.committed import WITHIN, Compared

# the colour of each step of `Compared` that is drawn
COLOURS = {
    "forward": "#0b4f8a",
    "training": "#b5402a",
    "op, product": "#9fc5e8",
    "op, attention": "#b6d7a8",
    "op, rows": "#cccccc",
}


def picture(rows: list[Compared], path: Path) -> None:
    """Draw predicted against measured times, with the band of 25%.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"no picture: matplotlib is not installed: pip install .[bench] ({error})"
        ) from error
    figure = Figure(figsize=(7.6, 7.2), layout="constrained")
    axes = figure.subplots()
    times = [row for row in rows if row.unit == "ms"]
    ends = [f(f(r.measured, r.predicted) for r in times) * scale for f, scale in ((min, 0.7), (max, 1.5))]
    axes.fill_between(
        ends,
        [x * (1 - WITHIN) for x in ends],
        [x * (1 + WITHIN) for x in ends],
        color="#eeeeee",
        label=f"within {WITHIN:.0%}",
    )
    axes.plot(ends, ends, color="black", lw=0.8)
    # the held rows last, so that they lie above the ops
    for step in reversed(COLOURS):
        for fitted, marker in ((True, "+"), (False, "o")):
            chosen = [row for row in times if row.step == step and row.fitted == fitted]
            if chosen:
                label = f"{step}{', fitted' if fitted else ''} ({len(chosen)})"
                x, y = [row.measured for row in chosen], [row.predicted for row in chosen]
                edge = {} if fitted else {"edgecolors": "white", "linewidths": 0.4}
                axes.scatter(x, y, 26, COLOURS[step], marker=marker, label=label, zorder=3, **edge)
    for row in times:
        if row.held and abs(row.error) > WITHIN:
            axes.annotate(
                row.name.removeprefix("encoder-"),
                (row.measured, row.predicted),
                (8, -10),
                textcoords="offset points",
                fontsize=8,
            )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="predicted, ms")
    axes.set_aspect("equal")
    axes.set_title("The cost model beside the committed CPU rows", fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    band = labels.index(f"within {WITHIN:.0%}")
    order = [band, *(i for i in reversed(range(len(labels))) if i != band)]
    legend = [handles[i] for i in order], [labels[i] for i in order]
    axes.legend(*legend, loc="upper left", fontsize=8.5, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
