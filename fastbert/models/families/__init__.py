"""What each model family changes against BERT, as data.

A family says how its checkpoints name the parts of an encoder, which config keys it spells differently, how
it counts positions and which heads it has. `layers/`, `bert.py`, `heads/` and `acceleration/` read this
table. So every parameter has HuggingFace's name and shape in every family.

To add a family with BERT's mathematics, add an entry to a file of this folder, write its classes in a file of
`fastbert/models/` that is named after its model_type (copy `roberta.py`), and list them in
`fastbert/__init__.pyi`.

Families that need other mathematics are refused, with the reason in `REFUSED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastbert.models.families import (
    albert,
    bert,
    big_bird,
    deberta_v2,
    distilbert,
    electra,
    jina_bert,
    longformer,
    mobilebert,
    modernbert,
    mpnet,
    neobert,
    rotary,
    xlnet,
)
from fastbert.models.families.family import FAMILIES, REFUSED, Family

for _module in (
    *(bert, distilbert, electra, albert, mpnet, modernbert, rotary, deberta_v2, neobert, mobilebert),
    *(big_bird, longformer, xlnet, jina_bert),
):
    FAMILIES.update((family.model_type, family) for family in _module.FAMILIES)


def families_with(task: str) -> tuple[str, ...]:
    """The model types that have a class for a task which only `Family.lacks` denies."""
    return tuple(name for name, family in FAMILIES.items() if task not in family.lacks)


def family_of(model_type: object, keys: Mapping[str, Any] = MappingProxyType({})) -> Family:
    """The family of a `model_type`, or the variant of it that these config keys choose.

    Raises:
        TypeError, ValueError: for anything else; the error has the reason if it is known.
    """
    if not isinstance(model_type, str):
        raise TypeError(f"model_type: expected a text, got {repr(model_type)[:80]}")
    if model_type in FAMILIES:
        for family in FAMILIES.values():
            of, key, value = family.variant_of or (None, "", None)
            if of == model_type and keys.get(key) == value:
                return family
        return FAMILIES[model_type]
    known = ", ".join(FAMILIES)
    if model_type in REFUSED:
        raise ValueError(
            f"model_type: {model_type!r} is not supported: {REFUSED[model_type]}; supported: {known}"
        )
    raise ValueError(f"model_type: {model_type!r} is not supported: unknown architecture; supported: {known}")
