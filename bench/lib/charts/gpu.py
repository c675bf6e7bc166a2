"""A GPU's time: a bar per engine and batch, cut by kind of kernel, and the time that the GPU waits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bench.lib.charts.suite import figure_of

if TYPE_CHECKING:
    import matplotlib.figure

# Kind -> what the names of its kernels match; the first that fits counts.
KINDS = {
    "attention": r"attention|sdpa|fmha|flash|dq_|dkdv_kernel|dbias_kernel|dot_do_o",
    "products": r"nvjet|gemm|cutlass|splitK|linear|feed_forward|product|cublas",
    "norms and embeddings": r"layer_norm|LayerNorm|GammaBeta|embedding|table_bwd|gather",
    "activation": r"[Gg]elu|activation",
    "loss": r"cross_entropy|[Ss]oft[Mm]ax|nll|mean_loss",
    "optimizer": r"multi_tensor|[Aa]dam",
    "casts, copies, sums": r"copy|Copy|elementwise|reduce|sum|Cat|Memcpy|Memset|Fill|add|index",
}
OTHER, IDLE = "other", "the device waits"
COLOURS = {
    "products": "#4878a8",
    "attention": "#e49444",
    "norms and embeddings": "#6a9f58",
    "activation": "#a87c9f",
    "loss": "#967662",
    "optimizer": "#d1605e",
    "casts, copies, sums": "#e7ca60",
    OTHER: "#85b6b2",
    IDLE: "#dddddd",
}


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), OTHER)


def shares(row: dict) -> dict[str, float]:
    """Kind -> milliseconds of one call, of a row of bench/gpu/breakdown.py; they add up to its wall time."""
    found = dict.fromkeys(COLOURS, 0.0)
    for kernel in row["kernels"]:
        found[kind_of(kernel["kernel"])] += kernel["us"] / 1e3
    listed = sum(found.values())
    found[OTHER] += max(0.0, row["busy_ms"] - listed)  # kernels below the row's list
    found[IDLE] = max(0.0, row["wall_ms"] - row["busy_ms"])
    return found


def breakdown(data: dict) -> matplotlib.figure.Figure:
    """The bars of a file of bench/gpu/breakdown.py: forwards left, training steps right.

    Each pair of bars is one batch: ours above transformers', as shares of the longer of the two.
    """
    rows = [row for row in data["rows"] if row["status"] == "ok"]
    height = max(1, *(sum(row["pass"] == passes for row in rows) for passes in ("forward", "training")))
    figure = figure_of(15.0, 1.6 + 0.42 * height)
    panels = figure.subplots(1, 2)
    for axes, passes, title in zip(
        panels, ("forward", "training"), ("forward, bf16", "training step, bf16 autocast"), strict=True
    ):
        mine = [row for row in rows if row["pass"] == passes]
        longest: dict[tuple, float] = {}
        for row in mine:
            batch = row["model"], row["workload"]
            longest[batch] = max(longest.get(batch, 0.0), max(row["wall_ms"], row["busy_ms"]))
        for y, row in enumerate(mine):
            whole, left = longest[row["model"], row["workload"]], 0.0
            for kind, ms in shares(row).items():
                axes.barh(y, ms / whole, left=left, color=COLOURS[kind], label=kind if y == 0 else None)
                if ms / whole > 0.06:
                    axes.text(left + ms / whole / 2, y, f"{ms:.2g}", ha="center", va="center", fontsize=7.5)
                left += ms / whole
            axes.text(
                left + 0.01, y, f"{max(row['wall_ms'], row['busy_ms']):.3g} ms", va="center", fontsize=8
            )
        axes.set_yticks(
            range(len(mine)),
            [f"{r['model']} {r['workload']}, {r['candidate'].partition('-')[0]}" for r in mine],
            fontsize=8,
        )
        axes.set_xlim(0, 1.14)
        axes.set_xticks([])
        axes.set_ylim(height - 0.5, -0.5)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    panels[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5, frameon=False)
    environment = data["environment"]
    figure.suptitle(
        f"Time on an {environment['device']}: milliseconds of one call\n"
        f"commit {(data.get('commit') or 'unknown')[:9]}, {data['date'][:10]}, torch {environment['torch']}, "
        f"Triton {environment['triton']}",
        fontsize=11,
    )
    return figure
