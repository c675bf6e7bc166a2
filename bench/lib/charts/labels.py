"""Labels of points that cover neither each other, nor a point, nor a line."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.text

Box = tuple[float, float, float, float]  # left, bottom, right, top in pixels
Label = tuple[float, float, str, str]  # x, y in data coordinates, text, colour
DIRECTIONS = 16
FAR = (
    0.02  # the price of one typographic point further away; covering as much as the label's own area costs 1
)
RINGS = (5, 10, 16, 24, 34, 46, 60, 76, 94, 114, 136)  # points between a label and what it names


def overlap(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def place(
    axes: matplotlib.axes.Axes,
    labels: Sequence[Label],
    points: Iterable[tuple[float, float]],
    lines: Iterable[Sequence[tuple[float, float]]] = (),
    texts: Iterable[matplotlib.text.Text] = (),
    size: float = 7.5,
    reach: float = 3.5,
) -> list[matplotlib.text.Annotation]:
    """Write each label near its point, with a thin line to it where it is not next to it.

    The figure's layout and the axes' limits must be final: places are found in pixels.

    Args:
        axes: where.
        labels: at most one per point.
        points: what no label may cover, in data coordinates.
        lines: polylines that no label should cover, in data coordinates.
        texts: what is written there already.
        size: of the letters, in typographic points.
        reach: half the width of a point's marker, in typographic points.
    """
    from matplotlib.text import Text

    figure = axes.figure
    renderer, dot = figure.canvas.get_renderer(), figure.dpi / 72
    to_pixels = axes.transData.transform
    frame = axes.get_window_extent(renderer)
    inside = (frame.x0, frame.y0, frame.x1, frame.y1)
    taken: list[tuple[Box, float]] = []
    for text in texts:
        box = text.get_window_extent(renderer)
        taken.append(((box.x0, box.y0, box.x1, box.y1), 5.0))
    half = reach * dot
    for x, y in to_pixels(list(points)):
        taken.append(((x - half, y - half, x + half, y + half), 5.0))
    for line in lines:
        corners = to_pixels(list(line))
        for (x0, y0), (x1, y1) in itertools.pairwise(corners):
            steps = max(1, int(math.hypot(x1 - x0, y1 - y0) / (4 * dot)))
            for i in range(steps + 1):
                x, y = x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
                taken.append(((x - dot, y - dot, x + dot, y + dot), 1.0))
    written = []
    for x, y, text, colour in sorted(labels):
        note = axes.annotate(
            text,
            (x, y),
            (0, 0),
            textcoords="offset points",
            color=colour,
            fontsize=size,
            ha="left",
            va="bottom",
            zorder=5,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.45", "shrinkA": 0.5, "shrinkB": reach},
        )
        around = Text.get_window_extent(note, renderer)  # without the line to the point
        width, height = around.width + 3 * dot, around.height + dot
        at = to_pixels((x, y))

        best: tuple[float, Box] | None = None
        for ring in RINGS:
            for i in range(DIRECTIONS):
                angle = 2 * math.pi * i / DIRECTIONS
                # the box lies beside the point, on the ring
                x = at[0] + math.cos(angle) * ((reach - 3 + ring) * dot + width / 2)
                y = at[1] + math.sin(angle) * ((reach - 3 + ring) * dot + height / 2)
                box = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                outside = width * height - overlap(box, inside)
                covered = 10 * outside + sum(weight * overlap(box, other) for other, weight in taken)
                price = covered / (width * height) + FAR * ring
                if best is None or price < best[0]:
                    best = price, box
        _, box = best
        taken.append((box, 5.0))
        note.set_position(((box[0] - at[0]) / dot + 1.5, (box[1] - at[1]) / dot + 0.5))
        near = half + 3.5 * dot
        if box[0] - near < at[0] < box[2] + near and box[1] - near < at[1] < box[3] + near:
            note.arrow_patch.set_visible(False)
        written.append(note)
    return written
