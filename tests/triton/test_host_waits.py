"""Run tests/support/host_waits.py: how often a call waits for its GPU, counted on a fake device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.sweep
def test_in_a_process_of_its_own():
    path = Path(__file__).parents[1] / "support" / "host_waits.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=short"]
    command += [str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parents[2])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 60
