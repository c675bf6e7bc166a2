"""Sentences to vectors: a model folder's settings, its tokenizer, and the encoder. Start with `encoder.py`.

Imports from `models`, `checkpoint` and below.
"""
