"""bench/gpu/first_use.py: what the first use of a model takes; here of a tiny one, which needs no check."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("options", "what"), [((), "forward"), (("--training",), "step")])
def test_the_first_calls_are_timed(options, what):
    command = [sys.executable, str(ROOT / "bench/gpu/first_use.py"), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["what"] for row in rows] == ["imported and built", what, what, what, "compiled"]
    assert [row.get("call") for row in rows[1:4]] == [1, 2, 3]
    assert all(row["seconds"] > 0 for row in rows[:4])
    assert rows[-1]["kernels"] == 0
