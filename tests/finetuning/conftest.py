"""Settings of the tests of fine-tuning."""

import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.rule_tasks import tiny_model
from tests.support.tiny_training import folder_in_memory, known_roof  # noqa: F401, fixtures


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost a tiny model more than they compute, and those of OpenMP do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def memory():
    with folder_in_memory() as folder:
        yield Path(folder)


@pytest.fixture
def tmp_path(memory):
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def model(memory):
    return tiny_model(memory / "model")
