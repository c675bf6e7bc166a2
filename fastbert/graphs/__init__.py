"""CUDA graphs: a model's forward, recorded once and replayed. Start with `model.py`.

Imports from `models` and below.
"""
