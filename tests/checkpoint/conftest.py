"""A model that the tests of this folder save."""

import pytest

from tests.support.checkpoints import theirs
from tests.support.one_thread import one_thread  # noqa: F401


@pytest.fixture
def bert_mlm():
    return theirs("BertForMaskedLM")
