"""The layers of an encoder, in execution order, and the attention bias of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.embeddings import relative_bias
from fastbert.layers.modules import part
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs


def layers_of(root: nn.Module, config: Any, family: Family) -> list[nn.Module]:
    """The layers of an encoder in the order in which they run; a shared one stands there as often as it
    runs.

    Args:
        root: the encoder, its parts under the family's names.
        config: its EncoderConfig or transformers config.
    """
    stack = part(root, family.layers)
    if not family.shared_layers:
        return list(stack)
    depth, groups = config.num_hidden_layers, config.num_hidden_groups
    chosen = [stack[int(i / (depth / groups))] for i in range(depth)]
    return [layer for group in chosen for layer in group.albert_layers]


def attention_bias(root: nn.Module, family: Family, inputs: Inputs, device: torch.device) -> Tensor | None:
    """The additive attention bias of a call: the caller's 4-D mask, MPNet's relative bias, their sum, or
    None.
    """
    bias, packed = inputs.bias, inputs.packing
    if family.relative_bias is None or packed.max_seqlen == 0:
        return bias
    positions = None
    if inputs.holes:
        order = torch.argsort(packed.mask.logical_not().to(torch.uint8), dim=1, stable=True)
        positions = order[:, : packed.max_seqlen]
    relative = relative_bias(part(root, family.relative_bias), packed.max_seqlen, device, positions)
    return relative if bias is None else bias + relative
