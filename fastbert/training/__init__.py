"""Training: the loop and its parts, for any module that returns losses. Start with `loop.py`."""
