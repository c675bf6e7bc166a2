"""Texts and a tokenizer, which the analyses' tests share."""

from __future__ import annotations

from tests.analysis.conftest import pairs, texts, tokenizer

__all__ = ["pairs", "texts", "tokenizer"]
