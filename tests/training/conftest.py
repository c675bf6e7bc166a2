"""Settings of the tests of the training loop."""

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
