"""Finds in a model: encoders and layers to accelerate, other transformers models, and fastbert's own."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fastbert.acceleration.classes import Accelerated
from fastbert.models.bert import BertModel
from fastbert.models.families import FAMILIES, Family

OWN = "fastbert's own model, which needs no accelerate"


def encoders(root: nn.Module) -> Iterator[tuple[str, Any, tuple[str, str], Any]]:
    """All encoders of a family and their layers, each encoder before its layers.

    Yields:
        (name, module, (model_type, kind), the encoder's transformers config); kind is "model" or "layer".
    """
    for name, module in root.named_modules():
        family = family_of(module)
        if family is None or family[1] != "model":
            continue
        yield name, module, family, module.config
        for path, child in module.named_modules(prefix=name):
            inside = family_of(child)
            if inside is not None and inside[1] == "layer":
                yield path, child, inside, module.config


def other_models(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the outermost transformers models without an encoder of a family."""
    if "transformers" not in sys.modules:
        return
    kind = sys.modules["transformers"].PreTrainedModel
    skip: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in skip or not issubclass(type(module), kind):
            continue
        if next(encoders(module), None) is None:
            skip.update(id(child) for child in module.modules())
            yield name, module


def own_models(root: nn.Module) -> list[tuple[str, BertModel]]:
    """(name, module) of fastbert's own encoders."""
    return [(name, module) for name, module in root.named_modules() if isinstance(module, BertModel)]


def kind_of(module: nn.Module) -> str | None:
    """The kind that `family_of` returns: "model", "layer", "spans" or None."""
    family = family_of(module)
    return None if family is None else family[1]


def family_of(module: nn.Module) -> tuple[str, str] | None:
    """(model_type, "model", "layer" or "spans") of a module of a family's transformers class.

    A subclass that keeps the class's `forward` counts too. `forward` is unwrapped first, because transformers
    wraps it in every subclass of a layer, even if FSDP makes the subclass. None for any other module.
    """
    for cls in type(module).__mro__:
        found = _CLASSES.get((cls.__module__, cls.__name__))
        if found is not None and "fastbert_base" not in vars(cls):
            same = inspect.unwrap(type(module).forward) is inspect.unwrap(cls.forward)
            return found if isinstance(module, Accelerated) or same else None
    return None


def is_other_spans(module: nn.Module) -> bool:
    """Whether a module's class is a subclass of a question-answering head with a forward of its own."""
    kinds = (_CLASSES.get((cls.__module__, cls.__name__), ("", "")) for cls in type(module).__mro__)
    return family_of(module) is None and any(kind == "spans" for _, kind in kinds)


def _classes(family: Family) -> dict[tuple[str, str], tuple[str, str]]:
    home, layer = family.stock_module, family.stock_layer.name or f"{family.class_prefix}Layer"
    spans = family.class_names.get("ForQuestionAnswering", "ForQuestionAnswering")
    return {
        (home, f"{family.class_prefix}Model"): (family.model_type, "model"),
        (home, layer): (family.model_type, "layer"),
        (home, f"{family.class_prefix}{spans}"): (family.model_type, "spans"),
    }


_FUSED = [family for family in FAMILIES.values() if family.accelerated]
_CLASSES = {key: found for family in _FUSED for key, found in _classes(family).items()}
