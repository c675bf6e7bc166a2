"""A HuggingFace directory <-> a module. Start with `load.py`, which names the steps of loading.

`save.py` is the way back. This room knows no models: a family's names come with the model's config
(`config.family`).
"""
