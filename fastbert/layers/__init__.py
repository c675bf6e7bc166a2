"""The math of the paper, as calls to ops."""
