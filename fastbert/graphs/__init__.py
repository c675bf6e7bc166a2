"""Recorded CUDA graphs of a model's forward."""
