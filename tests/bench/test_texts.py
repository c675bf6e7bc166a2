"""The texts of the benchmarks are real, distinct and the same again."""

from __future__ import annotations

from itertools import islice

import pytest

from bench.lib import texts


def test_sentences_are_real_distinct_and_the_same_again(monkeypatch):
    some = list(islice(texts.docstrings(), 400))
    monkeypatch.setattr(texts, "docstrings", lambda: iter(some))
    many = texts.sentences(330)
    assert many == texts.sentences(330)
    assert len(set(many)) == 330
    assert texts.sentences(8) == many[:8]
    lengths = [len(text.split()) for text in many]
    assert min(lengths) <= 6
    assert max(lengths) >= 30
    with pytest.raises(ValueError, match=r"^sentences: expected at most .*, got 100000$"):
        texts.sentences(100000)


@pytest.mark.sweep
def test_paragraphs_are_prose_distinct_and_the_same_again(monkeypatch):
    some = list(islice(texts.docstrings(), 4000))
    monkeypatch.setattr(texts, "docstrings", lambda: iter(some))
    many = texts.paragraphs(300)
    assert many == texts.paragraphs(300)
    assert len(set(many)) == 300
    assert all(">>>" not in text and "\n" not in text and len(text.split()) >= 4 for text in many)
    assert max(len(text.split()) for text in many) > 60
    with pytest.raises(ValueError, match=r"^paragraphs: expected at most .*, got 100000$"):
        texts.paragraphs(100000)
