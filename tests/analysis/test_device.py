"""Run tests/support/analysis_on_device.py: every analysis on a device that is not the CPU, a fake one."""

from __future__ import annotations

import pytest

from tests.support.processes import passed_alone


@pytest.mark.sweep
def test_in_a_process_of_its_own():
    assert passed_alone("analysis_on_device.py") == 19
