"""compute-sanitizer over single kernels, for gpu/checks.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).resolve().with_name("checks.py")


def program(name: str, tiny: bool) -> str:
    """The path of a tool, or why there is none."""
    if tiny:
        return "needs a GPU"
    return shutil.which(name) or f"no {name} on the PATH"


def sanitized(program: str, tool: str, cases: str, seconds: float) -> tuple[str, str | None]:
    """(status, reason) of one of compute-sanitizer's tools over `tiny-cases` or `hopper-cases`."""
    command = [program, f"--tool={tool}", "--error-exitcode=99", "--target-processes=application-only"]
    command += [sys.executable, str(CHECKS), cases]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has bounds of its own
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env)
    except subprocess.TimeoutExpired:
        return "skipped", f"did not end within {seconds:.0f} s"
    text = done.stdout + done.stderr
    print(text[-3000:], flush=True)
    if done.returncode == 0 and f"{cases.replace('-', ' ')}: done" in text:
        return "ok", None
    found = [line for line in text.splitlines() if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line]
    if done.returncode == 99 and "not supported" not in text:
        return "failed", f"{'; '.join(found)}: {text[-1500:]}"
    return "skipped", f"the tool does not work here (exit status {done.returncode}): {text[-600:]}"
