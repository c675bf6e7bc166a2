"""What the tests of commands share."""

from __future__ import annotations

import pytest

from fastbert.models.bert import BertModel
from tests.support import blank_figures


@pytest.fixture
def drawn():
    """Figures are drawn."""


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Figures are blank unless the test takes `drawn`."""
    if "drawn" not in request.fixturenames:
        blank_figures.replace(monkeypatch, blank_figures.BLANK)


@pytest.fixture
def no_work(monkeypatch):
    """No model runs: what is wrong is said before."""

    def run(*args, **kwargs):
        raise AssertionError("the model ran before the mistake was named")

    monkeypatch.setattr(BertModel, "encode_inputs", run)
