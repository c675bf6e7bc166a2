"""Pages: no number that the JSON file lacks, figures that leave each other alone, and texts as they are."""

from __future__ import annotations

import warnings
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from fastbert.analysis import pictures, results, sections
from fastbert.analysis.change import Change
from fastbert.analysis.report import Section, inlined, page
from tests.support.analysis import both
from tests.support.pages import Page

NUMBERS = {
    "n": 3,
    "seed": 7,
    "sections": {
        "one": {
            "share": 0.12345,
            "interval": {"mean": -0.5, "low": -1.25, "high": 0.25, "n": 3, "seed": 7},
            "alone": {"mean": 2.0, "low": None, "high": None, "n": 1, "seed": 7},
            "names": ["a <b> & {c}", "d"],
            "none": [],
            "sure": {"mean": 0.9999, "low": 0.9998, "high": 1.0, "n": 3, "seed": 7},
            "unknown": {"mean": None, "low": None, "high": None, "n": 0, "seed": 7},
            "rows": [{"value": 1234567}],
            "zero": -0.0000004,
            "key with spaces, and commas": 5,
        }
    },
}


STRANGE = ["$x^$", "$\\frac$", "_a_b", "a\\b", "a\nb", "a\x00b", "\udcff", "\U0001f600", "x" * 10_000, ""]
FIGURES = {
    "bars": lambda t: pictures.bars({t: {"a": 0.5}, f"{t} 2": {"a": 0.1}}, {t: (0.4, 0.6)}, t, t),
    "stacked_bars": lambda t: pictures.stacked_bars({t: dict(a=0.5, b=0.5), f"{t} 2": dict(a=1, b=0)}, t),
    "intervals": lambda t: pictures.intervals({t: (0.5, 0.4, 0.6), f"{t} 2": (1, 1, 1)}, t, t),
    "curves": lambda t: pictures.curves({"a": (np.arange(2), np.arange(2))}, t, t, t),
    "heat_maps": lambda t: pictures.heat_maps({t: np.eye(2), f"{t} 2": np.eye(2)}),
    "classes": lambda t: pictures.classes(np.eye(2, dtype=int), ("a", "b"), t),
    "token_map": lambda t: pictures.token_map(np.eye(2), [t, t]),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("text", "name"), [(t, n) for n in FIGURES for t in (STRANGE if n == "bars" else STRANGE[::4])], ids=ascii
)
def test_any_text_can_be_drawn(tmp_path, name, text):
    """Those of a file of the user's are no mathematics, fit on the picture, and are all there."""
    with warnings.catch_warnings(action="error"):
        results.save(tmp_path / "out", "name", {}, {}, {"drawn": FIGURES[name](text)})
    assert (tmp_path / "out" / "drawn.png").read_bytes().startswith(b"\x89PNG")
    root = ElementTree.parse(tmp_path / "out" / "drawn.svg").getroot()
    assert max(float(root.get(side).removesuffix("pt")) for side in ("width", "height")) < 1500
    drawn = Page(f"<!DOCTYPE html>\n{inlined(FIGURES[name](text), name, text)}").texts["text"]
    start = "".join(c if c.isprintable() else "�" for c in text[:10])
    assert start in "\n".join(drawn)
    assert max(map(len, drawn)) <= 61


def test_bars_have_the_ends_of_their_intervals():
    (axes,) = pictures.intervals({"a": (0.5, 0.4, 0.8), "b": (-1, -2, 0)}, "", "").axes
    ends = axes.containers[0].lines[2][0].get_segments()
    assert [segment[:, 0].tolist() for segment in ends] == [pytest.approx([0.4, 0.8]), [-2, 0]]


def test_the_attention_of_a_layer_is_drawn_at_the_layer():
    found = Change(np.ones((3, 2, 4)), np.ones((3, 3)), np.ones(2))
    (axes,) = sections.change(found, seed=0).drawings[1].figure.axes
    drawn = {line.get_label(): line.get_xdata().tolist() for line in axes.lines}
    assert drawn == {"hidden states": [0, 1, 2], "attention": [1, 2]}


@pytest.mark.parametrize("name", ["ids", "starts", "types", "labels"])
def test_the_digest_is_of_all_that_a_result_depends_on(texts, name):
    one = replace(texts, labels=np.arange(5))
    other = replace(one, **{name: getattr(one, name) + 1})
    facts = [results.facts(both("bert")[1], each) for each in (one, other, texts)]
    assert len({each["examples_sha256"] for each in facts}) == 3


def shown(template: str) -> list[tuple[str, str | None, str]]:
    made = page("title", NUMBERS, [Section("one", "One", says=(template,))])
    return Page(made).shown


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{share:.1%}", [("share", "0.12345", "12.3%")]),
        ("{rows/0/value:,}", [("rows/0/value", "1234567", "1,234,567")]),
        ("{zero:+.3f}", [("zero", "-4e-07", "0.000")]),
        ("{key with spaces, and commas}", [("key with spaces, and commas", "5", "5")]),
        ("{names}", [("names/0", None, "a <b> & {c}"), ("names/1", None, "d")]),
        ("{none}", []),
        ("{sure:.1%}", [("sure/mean", "0.9999", "100.0%")]),
        ("{unknown:.1%}", []),
        ("{alone:.1f}", [("alone/mean", "2.0", "2.0")]),
        (
            "{interval:+.2f}",
            [
                ("interval/mean", "-0.5", "−0.50"),
                ("interval/low", "-1.25", "−1.25"),
                ("interval/high", "0.25", "+0.25"),
            ],
        ),
    ],
)
def test_what_a_template_shows(template, expected):
    assert shown(template) == [(f"sections/one/{path}", value, text) for path, value, text in expected]


@pytest.mark.parametrize("path", ["nothing", "rows/1/value", "share/more", "names/last"])
def test_a_number_that_is_not_there(path):
    with pytest.raises(KeyError, match="the numbers of the page have no"):
        page("title", NUMBERS, [Section("one", "One", rows=(("row", f"{{{path}}}"),))])


def small_figure() -> Figure:
    return pictures.heat_maps({"": np.arange(6.0).reshape(2, 3)})


def test_a_figure_takes_the_colours_of_the_page():
    made = inlined(small_figure(), "a", "<title> & more")
    assert made == inlined(small_figure(), "a", "<title> & more")
    assert made.startswith('<svg viewBox="0 0 ')
    assert 'aria-labelledby="a-title"' in made
    assert '<title id="a-title">&lt;title&gt; &amp; more</title>' in made
    assert "currentColor" in made
    for gone in ("#000000", "fill: #ffffff", "<metadata", "<style", "<?xml", "xlink", "Date"):
        assert gone not in made


def test_colours_and_ids_in_a_text_are_text():
    figure = small_figure()
    figure.axes[0].set_title('#000000 id="x" url(#x)')
    assert '#000000 id="x" url(#x)' in inlined(figure, "a", "a")


@pytest.mark.sweep
def test_worse_is_red():
    """Red is where the numbers are low, or high, as the caller says."""
    values = np.array([[-1.0, 0.0, 1.0]])
    for worse, column in (("low", 0), ("high", 2)):
        (image,) = pictures.heat_maps({"": values}, diverging=True, worse=worse).axes[0].get_images()
        red, _, blue, _ = image.to_rgba(values)[0, column]
        assert red > 2 * blue
    (image,) = pictures.heat_maps({"": 0 * values}, diverging=True).axes[0].get_images()
    assert image.get_clim() == (-1, 1)
