"""Smaller and faster models: pruned, distilled, with fewer tokens or layers. Start with `pruning.py`."""
