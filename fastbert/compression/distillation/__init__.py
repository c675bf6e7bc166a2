"""Distillation: a student learns what a teacher computes. Losses in `losses.py` and `map_losses.py`."""
