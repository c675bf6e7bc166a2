"""A folder of verdicts for each test."""

import pytest

from fastbert.testing import verdicts


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdicts, "_warned", False)
    return tmp_path / "cache" / "self_checks"
