"""A call in a process that is killed at one of its file operations."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.lives import Operations


def killed(call: Callable[[], object], place: Path, at: int) -> bool:
    """Call in a process that is killed at its operation number `at` beside `place`; whether it was."""
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        # The tokenizer's threads do not survive a fork
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        Operations(place.parent, lambda name: os.kill(os.getpid(), signal.SIGKILL), at)
        try:
            call()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
