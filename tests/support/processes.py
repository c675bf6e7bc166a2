"""Python code in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run `code` in the root of the tree, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | env,
        text=True,
        capture_output=True,
        timeout=120,
    )


def passed_alone(file: str) -> int:
    """Run the tests of a file of tests/support in a process of their own; how many there are. All pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"tests/support/{file}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])
