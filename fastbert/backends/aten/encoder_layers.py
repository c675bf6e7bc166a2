"""`encoder_layers` by the `aten` backend's ops in turn; contract in fastbert/ops/encoder_layers.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.backends.aten.attention import attention_fwd
from fastbert.backends.aten.layer_norm import layer_norm_fwd
from fastbert.backends.aten.linear import linear_fwd
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE, AttentionInputs
from fastbert.ops.checks import FLOATS
from fastbert.ops.encoder_layers import LayersInputs, first_rows
from fastbert.ops.layer_norm import LayerNormInputs
from fastbert.ops.linear import LinearInputs

DTYPES = FLOATS


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Tensor:
    return linear_fwd(LinearInputs(x, weight, bias, activation), False)[0]


def encoder_layers_fwd(inputs: LayersInputs) -> list[Tensor]:
    x, stack, cu_seqlens, max_seqlen, bias, causal, first_only, states = inputs
    found = []
    window = CAUSAL if causal else EVERYWHERE
    for number, w in enumerate(stack.layers):
        qkv = _product(x, w.qkv_weight, w.qkv_bias).view(-1, 3, w.nheads, w.headdim).unbind(1)
        how = cu_seqlens, max_seqlen, w.headdim**-0.5, window, bias, None, 0.0, None, 0
        context = attention_fwd(AttentionInputs._make((*qkv, *how)), False, False)[0].flatten(1)
        if first_only and number == len(stack.layers) - 1:
            x, context = first_rows(x, cu_seqlens), first_rows(context, cu_seqlens)
        z = _product(context, w.out_weight, None)
        a = layer_norm_fwd(LayerNormInputs(z, w.norm_weight, w.norm_bias, x, w.out_bias, w.eps), False)[0]
        z = _product(_product(a, w.up_weight, w.up_bias, w.activation), w.down_weight, None)
        last = LayerNormInputs(z, w.last_weight, w.last_bias, a, w.down_bias, w.last_eps)
        x = layer_norm_fwd(last, False)[0]
        found.append(x)
    return found if states else found[-1:]
