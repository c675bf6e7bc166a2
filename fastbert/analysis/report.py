"""A page of results: one HTML file that includes its figures and needs neither scripts nor a network.

No number of a result is written by hand. The texts are templates: "{path}" or "{path:format}" is replaced by
the value that the page's JSON file has at that path, such as "intervals/entropy" or "worst/0/name" of the
section, or "/n" of the whole. On the page each number is an element of its own, `<data value=… data-at=…>`,
with the number in full and its path. An interval is its mean and, in brackets, its ends.

`sections` has the texts of the sections; a function that returns a `Section` adds a further section.
"""

from __future__ import annotations

import html
import io
import re
import string
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class Drawing:
    """A figure of a section.

    Attributes:
        name: a name of letters, digits and "-", unique within its section.
        title: plain text, also the picture's name for screen readers.
        says: a template for the text below the picture.
        figure: a figure of `pictures`, without a title.
        numbers: numbers for the JSON file, at "figures/<name>" of the section.
        sample: a template for the number of examples and the seed.
    """

    name: str
    title: str
    says: str
    figure: Figure
    numbers: Mapping[str, Any] = field(default_factory=dict)
    sample: str = "examples: n = {/n:,}, seed {/seed}"


@dataclass(frozen=True)
class Published:
    """A published number beside ours.

    Attributes:
        what: what is measured. `what`, `theirs` and `source` are plain text.
        ours: a template.
        theirs: what is published.
        source: the model and the paper.
    """

    what: str
    ours: str
    theirs: str
    source: str


@dataclass(frozen=True)
class Section:
    """What a page shows of one analysis.

    Attributes:
        name: a name of letters, digits and "-"; the page's numbers have the section's at "sections/<name>".
        title: plain text.
        says: templates, a paragraph each: what the figures show, for a reader who has never seen one.
        drawings: figures.
        rows: (plain text, template) of a table.
        published: rows of a second table.
        brief: (plain text, template) for the list at the top of the page.
        missing: why there is nothing to show, plain text; "" if there is.
    """

    name: str
    title: str
    says: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    rows: Sequence[tuple[str, str]] = ()
    published: Sequence[Published] = ()
    brief: Sequence[tuple[str, str]] = ()
    missing: str = ""

    def numbers(self) -> dict[str, Any]:
        """The numbers of the section's figures."""
        return {"figures": {drawing.name: dict(drawing.numbers) for drawing in self.drawings}}


def page(title: str, numbers: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """The HTML file. The same arguments make the same bytes.

    Args:
        title: plain text.
        numbers: content of the JSON file beside the page, with each section's numbers at "sections/<name>".
        sections: the sections, in order.

    Raises:
        ValueError: two sections or figures have one name, or a name is invalid.
        KeyError: a template names what `numbers` lacks.
    """
    names = [section.name for section in sections]
    names += [f"{section.name}-{drawing.name}" for section in sections for drawing in section.drawings]
    wrong = [name for name in names if not _NAME.fullmatch(name) or names.count(name) > 1]
    if wrong:
        raise ValueError(f"sections: expected names of letters, digits and '-' that differ, got {wrong[0]!r}")
    texts = [_Texts(numbers, section.name) for section in sections]
    links = "".join(
        f'<li><a href="#{section.name}">{html.escape(section.title)}</a></li>\n' for section in sections
    )
    brief = [
        (f'<a href="#{section.name}">{html.escape(label)}</a>', text.filled(template))
        for section, text in zip(sections, texts, strict=True)
        for label, template in section.brief
    ]
    parts = [
        f"<header>\n<h1>{html.escape(title)}</h1>\n{_INTRODUCTION}</header>\n",
        f'<nav aria-label="Sections">\n<ul>\n{links}</ul>\n</nav>\n<main>\n',
        f'<section id="brief">\n<h2>In brief</h2>\n{_table(brief)}</section>\n' if brief else "",
        *(_section(section, text) for section, text in zip(sections, texts, strict=True)),
        "</main>\n",
    ]
    return _PAGE.substitute(title=html.escape(title), style=_STYLE, body="".join(parts))


class _Texts:
    """Templates of one section, filled from the page's numbers."""

    def __init__(self, numbers: Mapping[str, Any], section: str) -> None:
        self.numbers, self.section = numbers, section

    def filled(self, template: str) -> str:
        """HTML of a template."""
        made = []
        for literal, path, form, _ in string.Formatter().parse(template):
            made.append(html.escape(literal, quote=False))
            if path is not None:
                where = path[1:] if path.startswith("/") else f"sections/{self.section}/{path}"
                made.append(_shown(self._at(where), where, form or ""))
        return "".join(made)

    def _at(self, where: str) -> Any:
        found: Any = self.numbers
        for step in where.split("/"):
            try:
                found = found[int(step)] if isinstance(found, list) else found[step]
            except (KeyError, IndexError, ValueError, TypeError):
                raise KeyError(f"{where}: the numbers of the page have no {step!r}") from None
        return found


def _shown(value: Any, where: str, form: str) -> str:
    """HTML of a number, a text, an interval, or a list of these."""
    if value is None:
        return "not known"
    if isinstance(value, Mapping):
        mean = _shown(value["mean"], f"{where}/mean", form)
        if value["low"] is None:
            return mean
        # ends that look like the mean are left out
        if len({format(value[name], form) for name in ("mean", "low", "high")}) == 1:
            return mean
        low, high = (_shown(value[end], f"{where}/{end}", form) for end in ("low", "high"))
        return f'{mean} <span class="interval">[{low}, {high}]</span>'
    if isinstance(value, list):
        return ", ".join(_shown(each, f"{where}/{i}", form) for i, each in enumerate(value)) or "none"
    at = html.escape(where)
    if isinstance(value, str):
        return f'<span data-at="{at}">{html.escape(value, quote=False)}</span>'
    text = format(value, form)
    if not any(digit in text for digit in "123456789"):
        # no sign before 0.00
        text = text.lstrip("+-")
    return f'<data value="{value!r}" data-at="{at}">{text.replace("-", "−")}</data>'


def _section(section: Section, texts: _Texts) -> str:
    made = [f'<section id="{section.name}">\n<h2>{html.escape(section.title)}</h2>\n']
    made += [f"<p>{texts.filled(paragraph)}</p>\n" for paragraph in section.says]
    if section.missing:
        made.append(f'<p class="missing">Not computed: {html.escape(section.missing)}</p>\n')
    if section.drawings:
        figures = "".join(_figure(section.name, drawing, texts) for drawing in section.drawings)
        made.append(f'<div class="figures">\n{figures}</div>\n')
    if section.rows:
        rows = [(html.escape(label), texts.filled(template)) for label, template in section.rows]
        made.append(_table(rows))
    if section.published:
        rows = [
            (html.escape(row.what), texts.filled(row.ours), html.escape(row.theirs), html.escape(row.source))
            for row in section.published
        ]
        made.append("<h3>Beside what is published</h3>\n")
        made.append(_table(rows, ("here", "published", "by whom, of which model")))
    return "".join([*made, "</section>\n"])


def _table(rows: Iterable[Sequence[str]], heads: Sequence[str] = ()) -> str:
    """A table of HTML cells. A row's first cell is its name; `heads` are the names of the other columns."""
    labels = [f' data-label="{head}"' for head in heads] or [""]
    lines = [
        f'<tr><th scope="row">{first}</th>'
        + "".join(f"<td{label}>{cell}</td>" for label, cell in zip(labels, rest, strict=True))
        + "</tr>\n"
        for first, *rest in rows
    ]
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    head = f"<thead><tr><td></td>{head}</tr></thead>\n" if heads else ""
    kind = ' class="wide"' if heads else ""
    return f"<table{kind}>\n{head}<tbody>\n{''.join(lines)}</tbody>\n</table>\n"


def _figure(section: str, drawing: Drawing, texts: _Texts) -> str:
    name = f"{section}-{drawing.name}"
    picture = inlined(drawing.figure, name, drawing.title)
    caption = f"<b>{html.escape(drawing.title)}.</b> {texts.filled(drawing.says)}"
    sample = f'<span class="sample">{texts.filled(drawing.sample)}</span>'
    return f'<figure id="{name}">\n{picture}<figcaption>{caption} {sample}</figcaption>\n</figure>\n'


# --- figures ------------------------------------------------------------------------------------------------


def inlined(figure: Figure, name: str, title: str) -> str:
    """A matplotlib figure as an SVG element for a page.

    Its ids begin with `name`, so that the ids of two figures differ. Black becomes the colour of the page's
    text, and white becomes transparent.

    Args:
        figure: a figure of matplotlib.
        name: an id of HTML.
        title: plain text, the figure's name for screen readers.
    """
    import matplotlib

    file = io.StringIO()
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.sans-serif": ["DejaVu Sans"],
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # the browser's fonts draw the glyph
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], count=1, flags=re.S)
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, count=1, flags=re.S)
    wanted = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    text = re.sub(r"<[^>]+>", lambda tag: _own_tag(tag[0], name, wanted), text)
    width, height = figure.get_size_inches()
    # 96 px per inch; at most a third larger than that, if the page has room
    size = f'viewBox="0 0 {72 * width:g} {72 * height:g}" style="max-width:{128 * width:.0f}px"'
    start = f'<svg {size} role="img" aria-labelledby="{name}-title">\n'
    start += f'<title id="{name}-title">{html.escape(title, quote=False)}</title>\n'
    return start + text[text.index(">") + 1 :].lstrip()


def _own_tag(tag: str, name: str, wanted: set[str]) -> str:
    """A tag of a figure with its ids and colours as the page needs them."""
    found = re.search(r' id="([^"]*)"', tag)
    if found:
        kept = f' id="{name}-{found[1]}"' if found[1] in wanted else ""
        tag = tag.replace(found[0], kept)
    tag = tag.replace('xlink:href="', 'href="').replace('href="#', f'href="#{name}-')
    tag = tag.replace("url(#", f"url(#{name}-")
    return tag.replace("#000000", "currentColor").replace("fill: #ffffff", "fill: none")


# --- what is the same on every page -------------------------------------------------------------------------

_PAGE = string.Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style</style>
</head>
<body>
$body</body>
</html>
"""
)

_INTRODUCTION = """<p>A model like BERT reads a text as tokens: words, pieces of words, and special tokens at
the ends. It has layers, one after the other, and in each layer several <b>heads</b>. A head gives every token
a share of <b>attention</b> to each token of the text; the shares add up to 1. What a head brings back is a
mean over the tokens it looked at, weighted by these shares. This page shows what the heads of one model do on
one set of texts.</p>
<p>Head 3-7 is the seventh head of the third layer. Numbers in brackets are the ends of an interval: when the
examples are drawn anew from these, with replacement, the mean lies between them in 95 of 100 draws
(bootstrap). One example has no interval, and ends that would look like the mean are left out. Every number
is also in <code>report.json</code>, and what the figures draw in <code>report.npz</code>, both beside this
page.</p>
"""

_STYLE = """:root{color-scheme:light dark;--line:rgba(128,128,128,.35);--soft:rgba(128,128,128,.1)}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:64rem;background:Canvas;color:CanvasText;
font:1rem/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0 1rem}
h2{font-size:1.3rem;line-height:1.25;margin:2.5rem 0 .5rem;padding-top:.75rem;
border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p{max-width:44rem;margin:.5rem 0}
nav ul{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;list-style:none;margin:1rem 0 0;padding:0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:1rem;
margin:1rem 0}
figure{margin:0;max-width:30rem;padding:.5rem;border:1px solid var(--line);border-radius:.4rem}
figure svg{display:block;width:100%;height:auto;margin:0 auto}
figure svg text{fill:currentColor}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figcaption{font-size:.85rem;line-height:1.4;margin-top:.4rem}
.sample,.interval{opacity:.75}
.sample{display:block}
.interval,data{white-space:nowrap}
.missing{padding:.5rem .75rem;background:var(--soft);border-left:3px solid var(--line)}
table{border-collapse:collapse;margin:.75rem 0;font-size:.9rem;font-variant-numeric:tabular-nums}
td{overflow-wrap:anywhere}
th,td{text-align:left;vertical-align:top;padding:.3rem .9rem .3rem 0;border-bottom:1px solid var(--line)}
th[scope=row]{font-weight:400}
@media (max-width:40rem){.wide thead{display:none}.wide tr{display:block;padding:.4rem 0;
border-bottom:1px solid var(--line)}.wide th,.wide td{display:block;border:0;padding:.1rem 0}
.wide th[scope=row]{font-weight:600}.wide td::before{content:attr(data-label)": ";opacity:.75}}
@page{margin:1.5cm}
@media print{:root{color-scheme:light}body{max-width:none;padding:0;font-size:10pt}nav{display:none}
figure,tr{break-inside:avoid}h2,h3{break-after:avoid}.figures{grid-template-columns:1fr 1fr 1fr}}
"""
