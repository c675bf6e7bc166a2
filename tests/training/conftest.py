"""Settings of the tests of the training loop."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from fastbert.training import work

ROOF = 1e12


@pytest.fixture(autouse=True)
def tiny_models_on_one_thread(monkeypatch):
    """Their threads would only wait for each other, and to measure the roof takes longer than to train."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(work, "roof", lambda device, dtype: ROOF)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tmp_path():
    """A folder in memory, if the system has one: a kill loses nothing on any disk, and these tests flush."""
    memory = "/dev/shm"
    free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize if os.path.isdir(memory) else 0
    with tempfile.TemporaryDirectory(dir=memory if free > 200e6 else None) as folder:
        yield Path(folder)
