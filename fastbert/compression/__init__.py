"""Smaller and faster models: pruning. Each way makes a physically smaller model. Start with `pruning.py`."""
