"""Objectives of pre-training: which examples an epoch has, and the losses of a model on them.

Start with `masked.py`, BERT's own; the others are told by what they do differently.
"""
