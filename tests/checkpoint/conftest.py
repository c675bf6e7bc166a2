"""A model that the tests of this folder save."""

import pytest

from tests.support.checkpoints import theirs


@pytest.fixture
def bert_mlm():
    return theirs("BertForMaskedLM")
