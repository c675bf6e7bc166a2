"""Smaller and faster models: pruning and distillation. Start with `pruning.py`, or `distillation/run.py`."""
