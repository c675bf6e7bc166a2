"""Processes of their own: Python code, and some that train together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist

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


def ranks(script: str, folder: Path, world: int = 2, seconds: float = 240.0) -> list[dict]:
    """What the `world` ranks of tests/support/`script` write, as RANK.json; skips without gloo.

    Each rank is a process, `SCRIPT RANK FOLDER WORLD`, whose script ends with `as_rank`.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    path = Path(__file__).with_name(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "FASTBERT_CACHE": ""}
    said = [folder / f"{rank}.txt" for rank in range(world)]
    workers = []
    for rank in range(world):
        with said[rank].open("w") as output:
            command = [sys.executable, str(path), str(rank), str(folder), str(world)]
            workers.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    try:
        deadline = time.monotonic() + seconds
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            if any(worker.poll() for worker in workers):  # the others would wait for it
                break
            time.sleep(0.1)
    finally:
        for worker in workers:
            worker.kill()
    codes = [worker.wait() for worker in workers]
    written = sorted(path.name for path in folder.glob("*.json"))
    said_last = "\n".join(words.read_text()[-3000:] for words in said)
    assert codes == [0] * world, f"exit codes {codes}, results {written}\n{said_last}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def as_rank(found: Callable[[int], dict]) -> NoReturn:
    """Be one of the processes that `ranks` starts: write `found(rank)` to FOLDER/RANK.json and leave.

    The ranks meet through a file in FOLDER and leave together. Neither the group nor Python is ended: a
    thread of gloo may still hold a tensor, whose end asks for Python's lock. Then ending the group hangs,
    because it holds that lock and waits for the thread, and ending Python aborts ("terminate called without
    an active exception", pytorch/pytorch#179291).
    """
    rank, folder, world = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    text = json.dumps(found(rank))
    (folder / f"{rank}.tmp").write_text(text)
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
    while not all((folder / f"{other}.json").exists() for other in range(world)):  # `ranks` ends a wait
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
