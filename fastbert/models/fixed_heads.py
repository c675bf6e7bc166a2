"""Models whose heads attend by fixed patterns, to be trained: `config.fixed_heads`, and `fix_heads`.

A head with a pattern has values and its part of the attention's output, but no queries and keys, so those two
linear layers have fewer rows. `fastbert.analysis.fixed` tries patterns on a trained model without changing a
weight.

Source: Raganato, Scherrer and Tiedemann 2020, "Fixed Encoder Self-Attention Patterns in Transformer-Based
Machine Translation".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fastbert.layers.modules import attach, is_plain, part
from fastbert.layers.patterns import Heads
from fastbert.models.base import PreTrainedModel


def fix_heads(model: PreTrainedModel, patterns: Sequence[str] | Sequence[Sequence[str]]) -> PreTrainedModel:
    """A copy of `model` in which some heads attend by fixed patterns, without their queries and keys.

    Args:
        model: a model of this package, not quantised, with learned heads only. It is not changed.
        patterns: `config.fixed_heads` of the copy: a name of `fastbert.layers.patterns.NAMES` per head, the
            same for all layers, or a list of such lists, one per layer. At least one head of a layer is
            "learned"; none is "separators", as a layer does not know where they are.

    Returns:
        The copy. `save_pretrained` and `from_pretrained` support it; transformers does not.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a model of fastbert, got {type(model).__name__}")
    if model.config.fixed_heads is not None:
        raise ValueError("model: expected one with learned heads only, but it has config fixed_heads")
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"patterns: expected a list of names, or a list of them per layer, got {patterns!r}")
    # The config refuses what is neither a name nor a row of names
    as_lists = [list(row) if isinstance(row, tuple) else row for row in patterns]
    config = type(model.config).from_dict(model.config.to_dict(), fixed_heads=as_lists)
    layers = model.base_model.layer_list()
    for i, layer in enumerate(layers):
        names = layer.form.names
        for path in (names.query, names.key):
            if layer.int8 or not is_plain(part(layer, path), nn.Linear):
                raise ValueError(
                    f"model: expected plain linear layers, but {path} of layer {i} is "
                    f"{type(part(layer, path)).__name__}"
                )
    found = copy.deepcopy(model)
    rows = config.fixed_patterns() or []
    done: set[nn.Module] = set()
    for i, layer in enumerate(found.base_model.layer_list()):
        # a shared layer appears once per use
        if layer in done:
            continue
        done.add(layer)
        heads = Heads(rows[i % len(rows)])
        layer.form = replace(layer.form, heads=heads)
        for path in (layer.form.names.query, layer.form.names.key):
            attach(layer, path, _learned_rows(part(layer, path), heads, layer.form.head_dim))
    for module in found.modules():
        if isinstance(module, PreTrainedModel):
            module.config = config
    return found


def _learned_rows(module: Any, heads: Heads, head_dim: int) -> nn.Linear:
    """The rows of a query's or key's linear layer that belong to learned heads."""
    weight = module.weight
    rows = [head * head_dim + i for head in heads.learned for i in range(head_dim)]
    smaller = nn.Linear(
        module.in_features, len(rows), module.bias is not None, device=weight.device, dtype=weight.dtype
    )
    at = torch.tensor(rows, device=weight.device)
    for name, own in smaller.named_parameters():
        whole = getattr(module, name)
        own.requires_grad_(False).copy_(whole.detach().index_select(0, at))
        own.requires_grad_(whole.requires_grad)
    return smaller.train(module.training)
