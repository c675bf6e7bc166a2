"""The command line of a script that trains a small model per seed, and draws what it has measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lib import machine
from bench.lib.report import Report

Row = dict[str, Any]


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """The options of a script: of how many seeds, and where its rows and its picture go.

    Args:
        name: the script's, in bench/.
        text: its docstring, whose first line is printed.
    """
    parser = argparse.ArgumentParser(prog=f"bench/{name}.py", description=(text or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE")
    return parser


def measure(
    args: argparse.Namespace,
    rows_of: Callable[[int], Iterable[Row]],
    line: Callable[[Row], str],
    draw: Callable[[list[Row], Path], None],
    **settings: Any,
) -> int:
    """Print and write the rows of each seed, then draw them; returns the exit status.

    Args:
        args: of `parser_of`.
        rows_of: seed -> its rows.
        line: a row as it is printed.
        draw: draws all rows into a file.
        settings: what the rows depend on besides.
    """
    report = Report(args.json, {"seeds": args.seeds, **settings}, None, line)
    report.data["environment"] = machine.describe(torch.device("cpu"))
    for seed in range(args.seeds):
        for row in rows_of(seed):
            report.row(row)
    report.end()
    if args.figure is not None:
        draw(report.data["rows"], args.figure)
    return 0


def axes(width: float, height: float, count: int = 1) -> tuple[Any, list[Any]]:
    """(figure, its axes side by side); `width` and `height` in inches."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    options = {"sharey": True, "squeeze": False, "layout": "constrained"}
    figure, found = pyplot.subplots(1, count, figsize=(width, height), **options)
    for axis in found[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, [*found[0]]


def band(axis: Any, x: Sequence[float], shares: Sequence[Sequence[float]], color: str, label: str) -> None:
    """Draw the median of seeds and their range, in percent."""
    each = 100 * np.array(shares)
    axis.plot(x, np.median(each, 0), color=color, label=label, marker="o", markersize=3)
    axis.fill_between(x, each.min(0), each.max(0), color=color, alpha=0.15, linewidth=0)
