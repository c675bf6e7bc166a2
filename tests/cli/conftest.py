"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from fastbert.models.bert import BertModel


@pytest.fixture
def drawn():
    """Figures are drawn."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures are blank unless the test takes `drawn`: drawing takes longer than an analysis."""

    def blank(figure, file, **options):
        file.write("<svg></svg>") if hasattr(file, "write") else Path(file).touch()

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", blank)


@pytest.fixture
def no_work(monkeypatch):
    """No model runs: what is wrong is said before."""

    def run(*args, **kwargs):
        raise AssertionError("the model ran before the mistake was named")

    monkeypatch.setattr(BertModel, "encode_inputs", run)
