"""Blank figures in place of those that analyses draw, which takes longer than an analysis."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any
from unittest.mock import create_autospec

import pytest

from fastbert.analysis import pictures

NAMES = ("bars", "classes", "curves", "heat_maps", "intervals", "stacked_bars", "token_map")
DRAWN = {name: getattr(pictures, name) for name in NAMES}


class Blank:
    """A figure that shows nothing."""

    def savefig(self, file: str | Path | IO[str], **options: Any) -> None:
        """An empty file, or an SVG without content."""
        if isinstance(file, (str, Path)):
            Path(file).touch()
        else:
            file.write("<svg></svg>")

    def get_size_inches(self) -> tuple[float, float]:
        """One by one."""
        return 1.0, 1.0


# calls with other arguments than the functions take fail as before
BLANK = {name: create_autospec(function, return_value=Blank()) for name, function in DRAWN.items()}


def replace(patch: pytest.MonkeyPatch, functions: dict[str, Any]) -> None:
    """Draw with other functions until `patch` is undone."""
    for name, function in functions.items():
        patch.setattr(pictures, name, function)
