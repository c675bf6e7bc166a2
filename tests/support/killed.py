"""A call in a process that is killed at one of its file operations."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def killed(call: Callable[[], object], place: Path, at: int) -> bool:
    """Call in a process that is killed at its operation number `at` beside `place`; whether it was."""
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        count = [0]

        def hook(event: str, args: tuple) -> None:
            if event not in EVENTS:
                return
            path, inside = str(args[0]), args[-1] if event in ("os.remove", "os.rmdir") else -1
            if inside != -1:  # relative to an open folder
                path = os.path.join(os.readlink(f"/proc/self/fd/{inside}"), path)
            count[0] += path.startswith(str(place.parent))
            if count[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            call()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
