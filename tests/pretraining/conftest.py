"""A small corpus of English text that every Python installation has."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from fastbert.pretraining.documents import split_sentences
from fastbert.pretraining.vocabulary import train
from tests.support.tiny_training import known_roof  # noqa: F401


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Twenty of the language reference's topics; a paragraph is one line."""
    chosen = sorted(topics)[:20]
    return [
        "\n".join(" ".join(p.split()) for p in topics[name].split("\n\n") if p.strip()) for name in chosen
    ]


@pytest.fixture(scope="session")
def text_file(texts, tmp_path_factory) -> Path:
    """The topics, a sentence per line and an empty line between documents."""
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join("\n".join(split_sentences(text)) for text in texts))
    return path


@pytest.fixture(scope="session")
def json_file(texts, tmp_path_factory) -> Path:
    """The same as JSON objects."""
    path = tmp_path_factory.mktemp("json") / "topics.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def tokenizer_dir(text_file, tmp_path_factory) -> Path:
    """A tokenizer of 600 pieces, trained on the topics."""
    path = tmp_path_factory.mktemp("tokenizer")
    train([text_file], path, vocab_size=600)
    return path
