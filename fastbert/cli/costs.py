"""What a smaller model costs beside the model that it comes from, as the compressing commands print it."""

from __future__ import annotations

from typing import Any

from fastbert.compression.size import TOKENS, size_of, tokens_per_second


def costs(before: Any, after: Any, timed: bool = True) -> list[str]:
    """Parameters, megabytes, operations per token and, if `timed`, tokens per second of two models."""
    sizes = [size_of(model) for model in (before, after)]
    rows = [
        ("parameters", *(size.parameters for size in sizes), ",.0f"),
        ("size, MB", *(size.bytes / 1e6 for size in sizes), ",.1f"),
        (f"MFLOP per token, {TOKENS} tokens", *(size.flops / 1e6 for size in sizes), ",.1f"),
    ]
    if timed:
        rows.append(("tokens per second", *tokens_per_second([before, after]), ",.0f"))
    lines = []
    for name, old, new, form in rows:
        ratio = new / old if name == "tokens per second" else old / (new or 1e-6)
        lines.append(f"{name:<28} {old:>14{form}} -> {new:>14{form}}  {ratio:.2f} x")
    return lines
