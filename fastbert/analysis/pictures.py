"""Figures of results, by matplotlib, which is imported with the first figure.

Axes number layers and heads from 1, as the papers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# one colour per pattern, distinct without telling red from green
COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#bbbbbb")
# for more classes; the first colour is for unchanged heads
MORE_COLORS = (
    *("#bbbbbb", "#332288", "#4477aa", "#66ccee", "#228833", "#44aa99"),
    *("#ccbb44", "#999933", "#ee6677", "#aa3377"),
)
# the colour of text on each of `COLORS`
_ON_COLORS = ("#fefefe", "#111111", "#fefefe", "#111111", "#111111")
# most tokens of an example whose names fit beside its map
NAMED_TOKENS = 40
# most letters of a text that fit beside a bar, or above a figure
NAMED_LETTERS = 60


def check() -> type[Figure]:
    """matplotlib's class of figures.

    Raises:
        ImportError: matplotlib is not installed; the message has the command that installs it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'fastbert-kernels[analysis]'") from error
    return Figure


def _figure(width: float, height: float) -> Figure:
    return check()(figsize=(width, height), layout="constrained")


def _plain(figure: Figure) -> Figure:
    """The figure; its texts are no longer parsed as mathematics or TeX, and are fit for XML."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_usetex(False)
        text.set_text(_printable(text.get_text(), NAMED_LETTERS))
    return figure


def _names(axes: Any, names: Iterable[str], **options: Any) -> None:
    """A row per name, from the top."""
    shown = [_printable(name, NAMED_LETTERS) for name in names]
    axes.set_yticks(range(len(shown)), shown, **options)
    axes.invert_yaxis()


def _grid(axes: Any, shape: tuple[int, int], title: str) -> None:
    """Ticks and names of a picture with a row per layer and a column per head."""
    layers, heads = shape
    step = max(1, -(-max(layers, heads) // 16))
    axes.set_xticks(range(0, heads, step), [str(i + 1) for i in range(0, heads, step)], fontsize=7)
    axes.set_yticks(range(0, layers, step), [str(i + 1) for i in range(0, layers, step)], fontsize=7)
    axes.set_xlabel("head", fontsize=8)
    axes.set_ylabel("layer", fontsize=8)
    axes.set_title(title, fontsize=9)


def heat_maps(
    maps: Mapping[str, np.ndarray],
    *,
    diverging: bool = False,
    worse: str = "low",
    low: float | None = None,
    high: float | None = None,
    columns: int = 4,
) -> Figure:
    """A heat map per name, (layers, nheads) each, with its scale beside it.

    Args:
        maps: title -> values; NaN for a head without a value.
        diverging: whether colours diverge from 0; red is worse.
        worse: which numbers are worse, "low" or "high".
        low, high: ends of the scale; default: the ends of the values.
        columns: most maps side by side.
    """
    count = len(maps)
    columns = min(columns, count)
    rows = -(-count // columns)
    shape = next(iter(maps.values())).shape
    size = 1.6 + 0.14 * max(shape[1], 8), 1.2 + 0.14 * max(shape[0], 8)
    figure = _figure(size[0] * columns, size[1] * rows)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (title, values) in zip(panels, maps.items(), strict=False):
        # a head without a value has no colour
        known = values[np.isfinite(values)] if np.isfinite(values).any() else np.zeros(1)
        if diverging:
            most = float(np.abs(known).max()) or 1.0
            ends, colours = (-most, most), "RdBu" if worse == "low" else "RdBu_r"
        else:
            ends = (known.min() if low is None else low, known.max() if high is None else high)
            colours = "viridis"
        image = axes.imshow(
            values, cmap=colours, vmin=ends[0], vmax=ends[1], aspect="auto", interpolation="none"
        )
        _grid(axes, values.shape, title)
        figure.colorbar(image, ax=axes, shrink=0.9).ax.tick_params(labelsize=7)
    for axes in panels[count:]:
        axes.set_visible(False)
    return _plain(figure)


def classes(found: np.ndarray, names: Sequence[str], title: str, colors: Sequence[str] = COLORS) -> Figure:
    """A square per head in the colour of its class: (layers, nheads) of indices into `names`."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    figure = _figure(max(3.4, 0.9 + 0.22 * found.shape[1]), 1.3 + 0.22 * found.shape[0])
    axes = figure.subplots()
    colours = ListedColormap(colors[: len(names)])
    axes.imshow(found, cmap=colours, vmin=-0.5, vmax=len(names) - 0.5, aspect="equal", interpolation="none")
    axes.set_xticks(np.arange(-0.5, found.shape[1]), minor=True)
    axes.set_yticks(np.arange(-0.5, found.shape[0]), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)
    _grid(axes, found.shape, title)
    patches = [Patch(color=colors[i], label=name) for i, name in enumerate(names)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return _plain(figure)


def token_map(probabilities: np.ndarray, tokens: Sequence[str]) -> Figure:
    """The attention of one head on one example: a row per token that looks, a column per token looked at.

    Args:
        probabilities: (length, length).
        tokens: names of the tokens, shown for up to `NAMED_TOKENS` tokens.
    """
    length = len(tokens)
    figure = _figure(3.6, 3.1)
    axes = figure.subplots()
    image = axes.imshow(probabilities, cmap="viridis", vmin=0.0, interpolation="none")
    places = range(length) if length <= NAMED_TOKENS else ()
    names = [_printable(token) for token in tokens] if length <= NAMED_TOKENS else ()
    size = min(7.5, 150 / length)
    axes.set_xticks(places, names, rotation=90, fontsize=size)
    axes.set_yticks(places, names, fontsize=size)
    axes.set_xlabel("looked at", fontsize=8)
    axes.set_ylabel("looking", fontsize=8)
    figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)
    return _plain(figure)


def _printable(token: str, most: int = 14) -> str:
    """A token as a label: short, and with characters alone that XML may have."""
    token = "".join(c if c.isprintable() else "�" for c in token)
    return token if len(token) <= most else token[: most - 1] + "…"


def stacked_bars(shares: Mapping[str, Mapping[str, float]], title: str, *, width: float = 6.5) -> Figure:
    """A bar per name, of shares that add up to 1, each with its percentage; `width` in inches.

    A name may be "".
    """
    narrow = width < 5
    figure = _figure(width, 1.3 + 0.4 * len(shares))
    axes = figure.subplots()
    parts = list(next(iter(shares.values())))
    left = np.zeros(len(shares))
    for i, part in enumerate(parts):
        values = np.array([each[part] for each in shares.values()])
        bars = axes.barh(range(len(shares)), values, left=left, color=COLORS[i], label=part)
        texts = [f"{value:.0%}" if value >= 0.05 else "" for value in values]
        axes.bar_label(bars, texts, label_type="center", fontsize=7, color=_ON_COLORS[i])
        left += values
    axes.set_xlim(0, 1)
    _names(axes, shares)
    if not any(shares):
        axes.set_yticks([])
    axes.set_xlabel("share of examples, layers and heads", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title(title, fontsize=9)
    columns = 3 if narrow else len(parts)
    figure.legend(loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    return _plain(figure)


def intervals(
    values: Mapping[str, Sequence[float]], xlabel: str, title: str, *, width: float = 5.2
) -> Figure:
    """A bar per name with its interval: (value, low, high); `width` in inches."""
    figure = _figure(width, 1.1 + 0.4 * len(values))
    axes = figure.subplots()
    found = np.array(list(values.values()))
    ends = np.abs(found[:, 1:] - found[:, :1]).T
    axes.barh(range(len(values)), found[:, 0], xerr=ends, color=COLORS[0], ecolor="#333333", capsize=3)
    _names(axes, values)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title(title, fontsize=9)
    return _plain(figure)


def curves(
    lines: Mapping[str, tuple[np.ndarray, ...]], xlabel: str, ylabel: str, title: str, *, width: float = 5.2
) -> Figure:
    """Lines over one axis; lines named "random…" are thin and grey.

    Args:
        lines: name -> (x, y), or (x, y, low, high) with an interval, which is shaded.
        xlabel, ylabel, title: texts.
        width: in inches.
    """
    figure = _figure(width, 0.55 * width + 0.6 + 0.08 * len(lines))
    axes = figure.subplots()
    for name, (x, y, *ends) in lines.items():
        if name.startswith("random"):
            label = "random orders" if name == "random 1" else None
            axes.plot(x, y, color="#999999", linewidth=0.9, label=label)
        else:
            (line,) = axes.plot(x, y, linewidth=1.8, marker="o", markersize=3, label=name)
            if ends:
                axes.fill_between(x, ends[0], ends[1], color=line.get_color(), alpha=0.25, linewidth=0)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    if len(lines) > 1:
        figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    axes.set_title(title, fontsize=9)
    return _plain(figure)


def bars(
    groups: Mapping[str, Mapping[str, float]],
    intervals: Mapping[str, tuple[float, float]],
    xlabel: str,
    title: str,
    *,
    width: float = 6.5,
) -> Figure:
    """Bars side by side: a group per name, with a bar per part that the name has.

    Args:
        groups: name -> part -> value. The legend has the parts of all names, in order of appearance.
        intervals: name -> (low, high) of the name's first part; names may be missing.
        xlabel, title: what is drawn.
        width: in inches.
    """
    parts = list(dict.fromkeys(part for each in groups.values() for part in each))
    figure = _figure(width, 1.5 + (0.1 + 0.16 * len(parts)) * len(groups))
    axes = figure.subplots()
    height = 0.8 / len(parts)
    for i, part in enumerate(parts):
        places = [(y, each[part]) for y, each in enumerate(groups.values()) if part in each]
        y = [place + (i - (len(parts) - 1) / 2) * height for place, _ in places]
        axes.barh(y, [value for _, value in places], height, color=COLORS[i], label=part)
    for y, (name, each) in enumerate(groups.items()):
        if name in intervals:
            value, (low, high) = next(iter(each.values())), intervals[name]
            place = y - (len(parts) - 1) / 2 * height
            ends = [[max(value - low, 0)], [max(high - value, 0)]]
            axes.errorbar([value], [place], xerr=ends, color="black", linewidth=0.8, capsize=2)
    _names(axes, groups, fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_title(title, fontsize=9)
    columns = 2 if width < 5 else len(parts)
    figure.legend(loc="outside lower center", ncols=columns, fontsize=7, frameon=False)
    return _plain(figure)
