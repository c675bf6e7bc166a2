"""A run's log as a picture: losses, accuracies and the learning rate over steps.

`python -m fastbert.training.curves RUN` draws `RUN/curves.png`, also during the run.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fastbert.checkpoint.files import CheckpointError, parse_json, replace
from fastbert.checkpoint.files import read as read_plain
from fastbert.training.logs import LOG

PICTURE = "curves.png"


def read(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's log; the run may be writing the last line.

    Raises:
        CheckpointError: there is no log, or a line is no JSON object of numbers; the message names it.
    """
    lines = read_plain(run / LOG).split(b"\n")[:-1]
    found = [parse_json(line, f"{run / LOG}: line {number}") for number, line in enumerate(lines, 1)]
    for number, line in enumerate(found, 1):
        if "step" not in line or not all(v is None or isinstance(v, (int, float)) for v in line.values()):
            raise CheckpointError(f"{run / LOG}: line {number}: expected numbers, with a step")
    return found


def draw(run: str | Path) -> Path | None:
    """Draw the curves of a run.

    Returns:
        The picture; None if matplotlib is not installed or the log is empty.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    run = Path(run)
    lines = read(run)
    if not lines:
        return None
    steps = [line["step"] for line in lines]
    parts = [name for name in lines[-1] if name.endswith("_loss")]
    panels = {
        "loss (nats)": parts if len(parts) == 1 else ["loss", *parts],
        "accuracy": [name for name in lines[-1] if name.endswith(("_accuracy", "_share"))],
        "learning rate": ["lr"],
    }
    panels = {title: names for title, names in panels.items() if names}
    colors: dict[str, str] = {}  # a loss and its accuracy share a color
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    for axes, (title, names) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in names:
            values = [line.get(name) for line in lines]
            label = "total" if name == "loss" else name.rpartition("_")[0]
            color = colors.setdefault(label, f"C{len(colors)}")
            noisy = len(steps) > 40 and name != "lr"
            (drawn,) = axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35 if noisy else 1.0)
            if noisy:
                axes.plot(steps, _smooth(values), color=color, linewidth=1.8, label=label)
            else:
                drawn.set_label(label)
        if title == "accuracy":
            axes.set_ylim(0, 1)
        if len(names) > 1:
            axes.legend(frameon=False)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    path = run / PICTURE
    content = io.BytesIO()
    figure.savefig(content, dpi=150)
    replace(path, content.getvalue())
    return path


def _smooth(values: list[float | None]) -> np.ndarray:
    """At each value, the mean of it and the values before, a twentieth of all; NaN if all are missing."""
    width = max(len(values) // 20, 2)
    found = np.array(values, float)
    known = np.isfinite(found)
    total, count = _last(np.where(known, found, 0.0), width), _last(known, width)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _last(values: np.ndarray, width: int) -> np.ndarray:
    """At each value, the sum of the last `width` values."""
    sums = np.cumsum(np.append(np.zeros(width), values))
    return sums[width:] - sums[:-width]


def main(arguments: list[str]) -> int:
    """Draw the curves of one run; returns the exit status."""
    if len(arguments) != 1:
        print("expected one argument, a run's directory", file=sys.stderr)
        return 2
    try:
        picture = draw(arguments[0])
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2
    print(picture or "nothing drawn: matplotlib is not installed, or the log is empty")
    return 0 if picture else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
