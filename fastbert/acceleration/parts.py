"""Finds in a model: encoders and layers to accelerate, other transformers models, and fastbert's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fastbert.acceleration.model import family_of
from fastbert.models.bert import BertModel

OWN = "fastbert's own model, which needs no accelerate"


def encoders(root: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[str, str], Any]]:
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


def other_models(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
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


def own_models(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of fastbert's own encoders."""
    return [(name, module) for name, module in root.named_modules() if isinstance(module, BertModel)]


def kind_of(module: nn.Module) -> str | None:
    """What `family_of` says that the module is: "model", "layer", "spans" or None."""
    family = family_of(module)
    return None if family is None else family[1]
