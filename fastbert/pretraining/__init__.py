"""Pre-training: text to a vocabulary and a corpus. Start with `corpus.py`."""
