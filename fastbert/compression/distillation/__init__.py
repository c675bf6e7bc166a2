"""Distillation: a student learns what a teacher computes. Start with `run.py` and `recipes.py`."""
