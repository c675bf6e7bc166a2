"""The models, by HuggingFace's contract. Imports from `checkpoint`, `layers` and below.

Start with `bert.py`, what goes in and out of an encoder; then read `encoder.py`, the loop over its layers.

- `base.py` and `loading.py`: what every model shares, and its files.
- `config.py`, `families/` and `paths.py`: what a family changes against BERT.
- `inputs.py`, `outputs.py` and `labels.py`: what callers pass and what models return.
- `heads/`: the tasks. `auto.py`: the choice of a class by `model_type`.

The classes of each family are in a file of their own (`roberta.py`, …).
"""
