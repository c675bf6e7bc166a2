"""A float model to quantise."""

from __future__ import annotations

import pytest

from tests.support.quantized_models import ours


@pytest.fixture
def bert():
    return ours("bert")
