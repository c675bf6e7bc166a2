"""Executor of layers that something looks at or has changed, module by module on a padded batch.

As in transformers, it runs PyTorch's own operations.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastbert.execution.call import Call, Padded, Step
from fastbert.execution.eager import recomputed
from fastbert.layers.packing import Packing


def serves(x: Tensor, call: Call) -> str | None:
    """See `plan`; any call may have such a layer."""
    return None


def takes(step: Step, x: Tensor, call: Call) -> str | tuple[Any, ...]:
    """See `plan`."""
    return () if step.reason is not None else "nothing looks at the layer's modules"


def run(group: list[tuple[Step, tuple[Any, ...]]], x: Tensor, call: Call) -> Tensor:
    """See `plan`."""
    packing, padded_mask, grid = cast(Padded, call.padded)
    for step, _ in group:
        mask = padded_mask
        if mask is not None and step.form is not None:
            mask = step.form.of_own_heads(mask, 1)
        gate = call.asked(step).gate
        given: dict[str, Any] = {} if gate is None else {"gate": gate}
        form = step.form
        if form is not None and (form.rotary or form.relative or form.blocks or form.global_tokens):
            given["grid"] = grid
        by_token = form is not None and form.global_tokens
        layer = functools.partial(_on_grid, step.layer, packing, mask, given, call.wants_attentions, by_token)
        x = call.keep(*recomputed(step, call, layer, x))
    return x


def _on_grid(
    layer: nn.Module,
    packing: Packing,
    mask: Tensor | None,
    given: dict[str, Any],
    wants_attentions: bool,
    by_token: bool,
    hidden: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """(packed output of a layer that is called on the padded batch, packed probabilities or None).

    `by_token` says whether the layer returns probabilities as (batch, seqlen, nheads, width).
    """
    x, kept = packing.grid(hidden)
    if not wants_attentions:
        return packing.from_grid(first_of(layer(x, mask, **given))), None
    y, probs = layer(x, mask, **given, output_attentions=True)
    if by_token:
        return packing.from_grid(y), packing.from_grid(probs)
    if kept is not None:
        zero = torch.zeros((), dtype=probs.dtype, device=y.device)
        probs = torch.where(kept[:, None, :, None], probs, zero)
    return packing.from_grid(y), packing.pack_scores(probs)


def first_of(output: Any) -> Tensor:
    """The hidden states in what a module or its hook has returned."""
    return output if isinstance(output, Tensor) else output[0]
