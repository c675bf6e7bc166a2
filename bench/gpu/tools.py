"""What checks and compiles single kernels: processes of their own, compute-sanitizer."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CHECKS = Path(__file__).resolve().with_name("checks.py")


def in_processes(
    units: Iterable[Any],
    run: Callable[[Any], None],
    at_once: int,
    left: Callable[[], float],
    most: float = math.inf,
) -> Iterator[tuple[Any, int | str]]:
    """Run each unit in its own forked process, some side by side, and yield it when it has ended.

    Args:
        units: what is run.
        run: called with a unit, in its process.
        at_once: how many run side by side.
        left: seconds until all must have ended.
        most: seconds that one unit may take.

    Yields:
        The unit, and the exit status of its process; "skipped" where too little time was left to begin it,
        "timeout" where it did not end in its time.
    """
    context, waiting, running = multiprocessing.get_context("fork"), list(units), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            unit = waiting.pop(0)
            if left() < 1.0:
                yield unit, "skipped"
                continue
            process = context.Process(target=run, args=(unit,))
            process.start()
            running[unit] = process, time.monotonic() + min(most, left())
        for unit, (process, until) in list(running.items()):
            process.join(0.05)
            status = process.exitcode
            if status is None and time.monotonic() < until:
                continue
            if status is None:
                process.kill()
                process.join(10)
                status = "timeout"
            del running[unit]
            yield unit, status


def program(name: str, tiny: bool) -> str:
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
