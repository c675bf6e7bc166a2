"""Run tests/support/host_waits.py: how often a call waits for its GPU, counted on a fake device."""

from __future__ import annotations

import pytest

from tests.support.processes import passed_alone


@pytest.mark.sweep
def test_in_a_process_of_its_own():
    assert passed_alone("host_waits.py") >= 60
