"""Pre-training: text, a vocabulary, a corpus, masking rules. Start with `corpus.py`."""
