"""What runs the layers of an encoder: one decision per call, and the executors. Start with `plan.py`."""
