"""The examples of the analysis tests."""

from __future__ import annotations

from tests.analysis.conftest import labelled, pairs

__all__ = ["labelled", "pairs"]
