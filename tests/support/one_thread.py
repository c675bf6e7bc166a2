"""A fixture for tests of tiny models: a second thread costs more than it does.

Several threads run in tests/cpu, in tests/sentences and where a test sets their number.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)
