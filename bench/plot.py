"""One bar chart per model from a file of bench_cpu.py: `python bench/plot.py FILE.json`.

One group of bars per workload, one bar per engine: real tokens per second. A line across each group shows the
floor of each dtype: the tokens per second at which the matrix products of the real tokens alone
would keep the processor at its measured peak. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure

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
FLOORS = {"fp32": "-", "bf16": "--", "int8": ":"}  # the line of each dtype's floor
TITLES = {"base": "BERT-base", "large": "BERT-large", "minilm": "MiniLM-L6", "tiny": "a tiny BERT"}


def charts(data: dict, folder: Path, stem: str = "bench_cpu") -> list[Path]:
    """Draw a PNG for each model that has rows; returns the files.

    Args:
        data: what bench_cpu.py wrote.
        folder: where the files go, as `<stem>-<model>.png`.
        stem: the files' first part.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"no chart: matplotlib is not installed: pip install .[bench] ({error})"
        ) from error
    rows = [row for row in data["rows"] if row["step"] == "encoder" and row["status"] == "ok"]
    written = []
    for model in dict.fromkeys(row["model"] for row in rows):
        path = folder / f"{stem}-{model}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        chart(data, model, [row for row in rows if row["model"] == model]).savefig(path, dpi=130)
        written.append(path)
    return written


def chart(data: dict, model: str, rows: list[dict]) -> matplotlib.figure.Figure:
    """The figure of one model's rows."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["workload"] for row in rows))
    engines = [name for name in COLOURS if any(row["candidate"] == name for row in rows)]
    speed = {(row["workload"], row["candidate"]): row["tokens_per_s"] for row in rows}
    width = 0.86 / len(engines)
    figure = Figure(figsize=(3.4 + 2.6 * len(names), 6.2), layout="constrained")
    axes = figure.subplots()
    for i, engine in enumerate(engines):
        places = [x - 0.43 + (i + 0.5) * width for x in range(len(names))]
        heights = [speed.get((name, engine), 0.0) for name in names]
        axes.bar(places, heights, width * 0.94, label=engine.replace("-", " "), color=COLOURS[engine])
        for place, height in zip(places, heights, strict=True):
            if height:
                axes.text(
                    place,
                    height,
                    f" {height:,.0f}",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=7.5,
                    bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.5, "edgecolor": "none"},
                    zorder=3,
                )
    floors = {row["workload"]: row["floor_tokens_per_s"] for row in rows}
    # a floor far above the bars would make them too short to read: an arrow names it instead
    top = 1.22 * max(*speed.values(), *(floor[tag] for floor in floors.values() for tag in ("fp32", "bf16")))
    for x, name in enumerate(names):
        beyond = []
        for tag, style in FLOORS.items():
            label = f"floor {tag}: {data['roofs']['gflops'][tag]:,.0f} GFLOP/s" if x == 0 else None
            height = floors[name][tag]
            axes.hlines(height, x - 0.46, x + 0.46, "black", style, lw=1.3, label=label)
            if height > top:
                beyond.append(f"floor {tag} {height:,.0f} ↑")
        axes.text(x, 0.985 * top, "\n".join(beyond), ha="center", va="top", fontsize=8.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("real tokens per second (padding does not count)")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.margins(x=0.01)
    axes.set_ylim(0, top)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    environment = data["environment"]
    samples = min(row["n"] for row in rows)
    axes.set_title(
        f"{TITLES.get(model, model)} forward on {environment['threads']} threads of {environment['device']}\n"
        f"one run, interleaved, medians of at least {samples}; {data['date'][:10]}",
        fontsize=11,
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)
    return figure


def main() -> int:
    """Draw the charts of a file beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what bench_cpu.py wrote")
    args = parser.parse_args()
    try:
        for path in charts(json.loads(args.file.read_text()), args.file.parent, args.file.stem):
            print(path)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"plot: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
