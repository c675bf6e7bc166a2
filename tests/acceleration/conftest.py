"""What several files of the accelerated models' tests share."""

from __future__ import annotations

import pytest

from tests.support.accelerated_models import TEXTS
from tests.support.trainers import word_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(" ".join([*TEXTS, "where when"]).split(), 64)
