"""Executor of inference on a GPU, which runs all layers in one call of the backend (ops/encoder_layers.py).

It takes the same layers as `launchers`, and enqueues the whole stack without Python.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from fastbert.execution import launchers
from fastbert.execution.call import Call, Step
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.float_linear import joined_weights
from fastbert.ops import encoder_layers
from fastbert.ops.encoder_layers import LayerStack, LayerWeights
from fastbert.runtime import dispatch, prepared


def serves(x: Tensor, call: Call) -> str | None:
    """See `plan`."""
    reason = launchers.serves(x, call)
    if reason is None and {name for _, name in dispatch.pins()} - {"cuda"}:
        reason = "another backend is pinned"
    if reason is None and call.after_first is not None:
        reason = "a convolution follows the first layer"
    return reason


def takes(step: Step, x: Tensor, call: Call) -> str | LayerStack:
    """See `plan`."""
    taken = launchers.parameters_of(step, x)
    if isinstance(taken, str):
        return taken
    form, parameters, eps = taken
    if form.kept is not None and call.batch.has_bias:
        return "the layer has the bias of its own heads"

    def build() -> LayerStack:
        qkv = joined_weights(step.layer, parameters[0:6:2], parameters[1:6:2], x.dtype)
        how = form.nheads, form.head_dim, cast(str, form.activation), *eps
        # In the ops' order: attention's output, its norm, the feed-forward block, its norm
        rest = *parameters[6:8], *parameters[12:14], *parameters[8:12], *parameters[14:]
        return LayerStack([LayerWeights(*how, *qkv, *rest)])

    what = "layers", form.nheads, form.head_dim, form.activation, eps, x.dtype
    stack = prepared.derived(step.layer, what, tuple(parameters), build)
    return encoder_layers.gap(stack, x.device) or stack


class Joined(list[Any]):
    """A group whose layers are one stack."""

    def __init__(self, group: list[tuple[Step, LayerStack]]):
        super().__init__(group)
        self.stack = LayerStack.joined([stack for _, stack in group])
        layers = [step.layer for step, _ in group]
        self.begun = [layer for layer in layers if type(layer).begin is not PackedLayer.begin]


kept = Joined  # see `plan`


def run(group: list[tuple[Step, LayerStack]], x: Tensor, call: Call) -> Tensor:
    """See `plan`."""
    group = group if isinstance(group, Joined) else Joined(group)
    for layer in group.begun:
        layer.begin(x)
    batch, number = call.batch.dense(), group[-1][0].number
    outputs = encoder_layers.encoder_layers(
        x,
        group.stack,
        batch.cu_seqlens,
        batch.max_seqlen,
        bias=batch.bias,
        causal=batch.causal,
        first_only=call.first_only and number == call.last,
        states=call.wants_states,
    )
    for x in outputs:
        call.keep(x)
    return x
