"""Settings of the tests of the training loop."""

from pathlib import Path

import pytest

from tests.support.tiny_training import folder_in_memory, known_roof  # noqa: F401, fixtures


@pytest.fixture
def tmp_path():
    with folder_in_memory() as folder:
        yield Path(folder)
