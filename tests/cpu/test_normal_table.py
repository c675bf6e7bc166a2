"""The committed table of the normal distribution is the output of the script that makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc" / "cpu"


@pytest.mark.sweep
def test_the_committed_table_is_the_scripts_output():
    pytest.importorskip("mpmath")
    made = subprocess.run(
        [sys.executable, str(CSRC / "normal_table.py")],
        capture_output=True,
        env={"PYTHONIOENCODING": "utf-8"},
        check=True,
        timeout=300,
    ).stdout
    assert made == (CSRC / "normal_table.h").read_bytes()
