"""Objectives of pre-training: which examples an epoch has, and the losses of a model on them.

Start with `masked.py`, BERT's own; each further objective describes what it does differently.
"""
