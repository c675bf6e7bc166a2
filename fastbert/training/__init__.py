"""Training: the loop and what it stands on, for every trainer, whatever it trains on. Start with `loop.py`."""
