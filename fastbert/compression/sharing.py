"""A model whose layers share weights in groups, as ALBERT's do; and back, in `shrink.dense`.

A shared model has a smaller file and fewer parameters, and takes the same time. Sharing loses accuracy: train
the model afterwards, or distil into it. The config key `layer_groups` has the group of each layer.

Source: Lan et al. 2019, "ALBERT", sec. 3.1, "Cross-layer parameter sharing".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from fastbert.compression import shrink
from fastbert.layers.modules import part
from fastbert.models.base import PreTrainedModel
from fastbert.runtime import expected

_Model = TypeVar("_Model", bound=PreTrainedModel)
STARTS = ("mean", "first")


@torch.no_grad()
def share(model: _Model, groups: int | Sequence[int] = 1, start: str = "mean") -> _Model:
    """A copy of a model whose layers share weights. The model itself is not changed.

    Args:
        model: a model of this package with plain linear layers that are all of one kind.
        groups: how many groups of consecutive layers, of sizes as equal as can be; or the group of each
            layer, from 0.
        start: what a group begins with: the "mean" of its layers' weights, or the "first" layer's.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    shrink.check(model)
    depth = model.config.num_hidden_layers
    if isinstance(groups, int):
        if isinstance(groups, bool) or not 1 <= groups <= depth:
            raise ValueError(f"groups: expected a number from 1 to {depth}, or one per layer, got {groups!r}")
        groups = [i * groups // depth for i in range(depth)]
    expected.one_of(STARTS, start=start)
    # The config of the result names what does not fit
    config = type(model.config).from_dict(model.config.to_dict(), layer_groups=list(groups))
    place = f"{shrink.name_of(model, part(model.base_model, model.family.layers))}."
    state = dict(model.state_dict(keep_vars=True))
    layers = {key: state.pop(key) for key in list(state) if key.startswith(place)}
    for group in range(max(groups) + 1):
        members = [i for i, each in enumerate(groups) if each == group]
        for key, value in layers.items():
            if not key.startswith(own := f"{place}{members[0]}."):
                continue
            leaf, mean = key.removeprefix(own), value
            if start == "mean":
                each = [layers[f"{place}{i}.{leaf}"].double() for i in members]
                mean = nn.Parameter(torch.stack(each).mean(0).to(value.dtype), value.requires_grad)
            state[f"{place}{group}.{leaf}"] = mean
    return shrink.made(model, {"layer_groups": config.layer_groups}, state)
