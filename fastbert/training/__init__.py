"""Training: the loop and what it stands on, whatever is trained. Start with `loop.py`."""
