"""The models, by HuggingFace's contract. Start with `bert.py`: what goes in and out of an encoder.

From there: `base.py` what every model shares, `loading.py` files, `config.py` and `families.py` what a
family changes against BERT, `inputs.py` and `outputs.py` what callers give and get, `heads/` the tasks,
`auto.py` the choice of a class by `model_type`. Each family's classes are in its own file (`roberta.py`, …).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastbert.runtime import moved

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """What older pickles look for here."""
        return moved.find(__name__, name)
