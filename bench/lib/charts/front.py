"""The picture on README's first screen: tokens per second beside the peers, one panel per kind of processor.

An SVG as text, so that one commit's rows make the same file with every version of every library:
`python docs/make.py` writes it, and its `--check` compares it.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from bench.lib import results
from bench.lib.quoted import DEVICE, figure, newest, rows_of

GPU = results.RESULTS / "nvidia-h200" / "encoder.json"
WORKLOADS = {"ragged16": "16 texts of mixed lengths", "8x128": "8 texts of 128 tokens"}
ON_GPU = {"squad": "96 texts of SQuAD's lengths", "full": "32 texts of 512 tokens"}
ENGINES = {
    "fastbert": "fastbert",
    "transformers": "transformers",
    "transformers_sdpa": "transformers",
    "torch_encoder": "torch.nn encoder",
    "openvino": "OpenVINO",
    "onnxruntime": "ONNX Runtime",
}
PANEL, ROW, LABEL, NUMBER = 300, 19, 112, 62  # widths and the height of a bar, in pixels
FONTS = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
BLUE, GREY, TEXT, FAINT = "#1769aa", "#b8bec6", "#1c2733", "#5d6b79"


class Bar(NamedTuple):
    """One engine's speed."""

    engine: str
    tokens_per_s: float


class Panel(NamedTuple):
    """The bars of one processor: a group per workload and precision."""

    title: str
    note: str
    groups: dict[str, list[Bar]]


def of_a_cpu(title: str, folder: str, precisions: tuple[str, ...]) -> Panel:
    """BERT-base's newest rows of a device's folder; a peer whose row is too noisy is left out."""
    rows = newest(results.RESULTS / folder)
    groups = {}
    for workload, words in WORKLOADS.items():
        for dtype in precisions:
            ours = rows[f"encoder-base-{workload}", f"fastbert-{dtype}"]
            every = rows_of(ours.run)
            bars = [Bar("fastbert", ours.extra["tokens_per_s"])]
            for name in ours.over:
                peer = every[ours.group, name]
                if "tokens/s" in figure(peer):
                    bars.append(Bar(ENGINES[name.partition("-")[0]], peer.extra["tokens_per_s"]))
            groups[f"{words}, {dtype}"] = bars
    (machine,) = {rows[key].run.machine["device"] for key in rows if key[0].startswith("encoder-base")}
    return Panel(title, f"{machine}, 2 threads, BERT-base", groups)


def of_the_gpu() -> Panel:
    """BERT-base on an H200 in bf16: each engine as it is faster, plain or replayed from a CUDA graph."""
    data = results.load(GPU)
    speeds: dict[tuple[str, str], float] = {}
    for row in data["rows"]:
        if row["status"] == "ok" and row.get("model") == "base":
            key = row["workload"], row["candidate"].partition("-")[0].removesuffix("_graphs")
            speeds[key] = max(speeds.get(key, 0.0), row["tokens_per_s"])
    groups = {
        f"{words}, bf16": [
            Bar(ENGINES[engine], speed) for (of, engine), speed in speeds.items() if of == workload
        ]
        for workload, words in ON_GPU.items()
    }
    return Panel("GPU", f"{data['environment']['device']}, BERT-base, CUDA graphs where faster", groups)


def panels() -> list[Panel]:
    """What the picture shows."""
    return [
        of_a_cpu("CPU with AVX-512", DEVICE, ("fp32", "int8")),
        of_a_cpu("CPU held to AVX2", f"{DEVICE}-avx2", ("fp32", "int8")),
        of_the_gpu(),
    ]


def _number(speed: float) -> str:
    return f"{speed / 1e6:.2f} M" if speed >= 1e6 else f"{speed:,.0f}"


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def _drawn(panel: Panel, left: float, top: float) -> tuple[list[str], float]:
    """The lines of one panel, and where it ends."""
    y = top + 16
    lines = [_text(left, y, panel.title, f'font-size="16" font-weight="600" fill="{TEXT}"')]
    lines.append(_text(left, y + 17, panel.note, f'font-size="11" fill="{FAINT}"'))
    y += 26
    largest = max(bar.tokens_per_s for bars in panel.groups.values() for bar in bars)
    for words, bars in panel.groups.items():
        y += 21
        lines.append(_text(left, y, words, f'font-size="12" font-weight="600" fill="{TEXT}"'))
        ours, best = (
            max(b.tokens_per_s for b in bars if (b.engine == "fastbert") is own) for own in (True, False)
        )
        style = f'font-size="12" font-weight="600" fill="{BLUE}" text-anchor="end"'
        lines.append(_text(left + PANEL, y, f"{ours / best:.2f} ×", style))
        y += 6
        for bar in sorted(bars, key=lambda bar: -bar.tokens_per_s):
            colour, weight = (BLUE, 600) if bar.engine == "fastbert" else (GREY, 400)
            width = max(2.0, (PANEL - LABEL - NUMBER) * bar.tokens_per_s / largest)
            style = f'font-size="12" font-weight="{weight}" fill="{TEXT}"'
            lines += [
                _text(left, y + 13, bar.engine, style),
                f'<rect x="{left + LABEL:g}" y="{y + 2:g}" width="{width:.1f}" height="{ROW - 5}" rx="2" '
                f'fill="{colour}"/>',
                _text(left + LABEL + round(width, 1) + 5, y + 13, _number(bar.tokens_per_s), style),
            ]
            y += ROW
    return lines, y


def picture(columns: int) -> str:
    """The SVG, with so many panels in a row: 3 for a desktop, 1 for a phone."""
    gap, margin = 28, 16
    lines, top, lowest = [], margin + 22.0, 0.0
    shown = panels()
    for i, panel in enumerate(shown):
        drawn, end = _drawn(panel, margin + (i % columns) * (PANEL + gap), top)
        lines += drawn
        lowest = max(lowest, end)
        if i % columns == columns - 1:
            top = lowest + 14
    width = 2 * margin + columns * PANEL + (columns - 1) * gap
    height = round(lowest) + margin
    title = "Real tokens per second; in blue: speed-up over the best peer"
    if columns > 1:
        title += "; all engines of a panel are interleaved in one run"
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONTS}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
            _text(margin, margin + 9, title, f'font-size="12" fill="{FAINT}"'),
            *lines,
            "</svg>",
            "",
        ]
    )
