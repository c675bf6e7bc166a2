"""Settings of the tests of the training loop."""

import os
import tempfile
from pathlib import Path

import pytest

from tests.support.tiny_training import known_roof  # noqa: F401


@pytest.fixture
def tmp_path():
    """A folder in memory, if the system has one: a kill loses nothing on any disk, and these tests flush."""
    memory = "/dev/shm"
    free = os.statvfs(memory).f_bavail * os.statvfs(memory).f_frsize if os.path.isdir(memory) else 0
    with tempfile.TemporaryDirectory(dir=memory if free > 200e6 else None) as folder:
        yield Path(folder)
