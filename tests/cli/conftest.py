"""What the tests of commands share."""

from __future__ import annotations

import pytest

from fastbert.models.bert import BertModel


@pytest.fixture
def no_work(monkeypatch):
    """No model runs: what is wrong is said before."""

    def run(*args, **kwargs):
        raise AssertionError("the model ran before the mistake was named")

    monkeypatch.setattr(BertModel, "encode_inputs", run)
