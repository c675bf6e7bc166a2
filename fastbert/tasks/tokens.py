"""What the windows of `squad` and `ner` need of a tokenizer."""

from __future__ import annotations

from tokenizers import Tokenizer


def check_whole(tokenizer: Tokenizer) -> None:
    """Raise a ValueError if the tokenizer cuts or pads, because windows are cut from whole texts."""
    for name, setting in (("truncation", tokenizer.truncation), ("padding", tokenizer.padding)):
        if setting is not None:
            raise ValueError(f"tokenizer: expected one without {name}, got {setting}")
