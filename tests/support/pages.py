"""A page of HTML as tests ask about it."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link", "col", "wbr"}


class Page(HTMLParser):
    """Reads a page and fails on tags that do not match.

    Attributes:
        ids: ids of all elements, in order.
        wanted: ids that links, uses and clip paths name.
        loads: what the page would fetch: src, and href of anything but a link within the page.
        tags: how often each occurs.
        shown: (path, value or None, text) of each number and text that comes from the JSON file.
        texts: per tag, the texts inside elements of that tag.
        bare: texts of cells of results that come from no number.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.wanted: set[str] = set()
        self.loads: list[str] = []
        self.tags: dict[str, int] = {}
        self.shown: list[tuple[str, str | None, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.bare: list[str] = []
        self._open: list[tuple[str, dict[str, str]]] = []
        assert text.startswith("<!DOCTYPE html>\n")
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {[tag for tag, _ in self._open]}"

    def handle_starttag(self, tag, attrs):
        assert len(attrs) == len(dict(attrs)), f"<{tag}> has an attribute twice"
        self._see(tag, dict(attrs))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag, attrs):
        assert self._inside("svg"), f"<{tag}/> is for SVG"
        self._see(tag, dict(attrs))

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        opened, attrs = self._open.pop()
        assert opened == tag, f"</{tag}> closes <{opened}>"
        if "data-at" in attrs:
            self.shown.append((attrs["data-at"], attrs.get("value"), self.texts[tag][-1]))

    def handle_data(self, data):
        for tag in {tag for tag, _ in self._open}:
            self.texts[tag][-1] += data
        cell = next((attrs for tag, attrs in self._open if tag == "td"), None)
        made = any("data-at" in attrs for _, attrs in self._open)
        if cell is not None and not made and cell.get("data-label", "here") == "here":
            self.bare.append(data)

    def _inside(self, tag: str) -> bool:
        return any(tag == opened for opened, _ in self._open)

    def _see(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if "id" in attrs:
            self.ids.append(attrs["id"])
        for name in ("href", "xlink:href", "src", "data", "srcset", "poster"):
            where = attrs.get(name)
            if where is not None and where.startswith("#"):
                self.wanted.add(where[1:])
            elif where is not None and not where.startswith("data:image/png;base64,"):
                self.loads.append(where)
        for value in attrs.values():
            self.wanted.update(re.findall(r"url\(#([^)]*)\)", value or ""))
            self.loads.extend(re.findall(r"url\((?!#)([^)]*)\)", value or ""))
        self.wanted.update((attrs.get("aria-labelledby") or "").split())


def value_at(numbers, path: str):
    """What a JSON file has at a path of a page."""
    for step in path.split("/"):
        numbers = numbers[int(step)] if isinstance(numbers, list) else numbers[step]
    return numbers


def is_rounding(text: str, value: float) -> bool:
    """Whether a text such as "−1,234.5" or "12.3%" is a number rounded to its last digit."""
    text = text.replace("−", "-").replace(",", "")
    scale = 100 if text.endswith("%") else 1
    mantissa, _, power = text.rstrip("%").partition("e")
    digits = len(mantissa.partition(".")[2]) - int(power or 0)
    near = 0.5 * 10.0**-digits * (1 + 1e-9) + 1e-12 * abs(value) * scale
    return math.isfinite(value) and abs(float(text.rstrip("%")) - value * scale) <= near
