"""Fresh tables of backends."""

import pytest

from fastbert.runtime import dispatch
from fastbert.testing import proving, verdicts


@pytest.fixture
def clean_tables(tmp_path, monkeypatch):
    """Drop verdicts and resolved launchers after each test."""
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_warned", False)
    monkeypatch.setattr(verdicts, "found", {})
    monkeypatch.setattr(proving, "_alone", set())
    dispatch._resolved.clear()
    yield
    dispatch._resolved.clear()
