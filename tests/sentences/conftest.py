"""The real all-MiniLM-L6-v2: its folder, one encoder for all tests, and copies to change."""

import pytest

from fastbert.sentences.encoder import SentenceEncoder
from tests.support.sentence_folders import SENTENCES, changeable


@pytest.fixture(scope="session")
def directory(minilm):
    return minilm


@pytest.fixture(scope="session")
def encoder(directory):
    return SentenceEncoder.from_pretrained(directory, device="cpu")


@pytest.fixture(scope="session")
def embeddings(encoder):
    return encoder.encode(SENTENCES)


@pytest.fixture(scope="session")
def stock(directory):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(directory), device="cpu")


@pytest.fixture
def copy(directory, tmp_path):
    return changeable(directory, tmp_path / "model")
