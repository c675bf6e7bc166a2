"""Two processes that train together: each a run of one script, as `SCRIPT RANK FOLDER`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch


def two(script: str, folder: Path, seconds: float = 240.0) -> list[dict]:
    """Both ranks of tests/support/`script`: what they leave in `folder` as RANK.json. Skips without gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    path = Path(__file__).with_name(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FASTBERT_CACHE": ""}
    said = [folder / f"{rank}.txt" for rank in range(2)]
    workers = []
    for rank in range(2):
        with said[rank].open("w") as output:
            command = [sys.executable, str(path), str(rank), str(folder)]
            workers.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        deadline = time.monotonic() + seconds
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            if any(worker.poll() for worker in workers):  # the other one would wait for it
                break
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
    codes = [worker.wait() for worker in workers]
    assert codes == [0, 0], "\n".join(words.read_text()[-3000:] for words in said)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
