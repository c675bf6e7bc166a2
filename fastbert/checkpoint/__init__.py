"""A HuggingFace directory <-> a module. Start with `load.py`, which lists the steps of loading.

`save.py` is the way back. Imports from `layers` and below only: this room knows no model classes, and gets a
family's names from the model's config (`config.family`).
"""
