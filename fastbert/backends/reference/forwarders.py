"""The `reference` launchers that call little but their op's own reference; contracts in fastbert/ops."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops import packing
from fastbert.ops.attention_received import AttentionReceivedInputs, attention_received_ref
from fastbert.ops.checks import FLOATS
from fastbert.ops.encoder_layers import LayersInputs, encoder_layers_ref
from fastbert.ops.first_attention import FirstAttentionInputs, first_attention_ref
from fastbert.ops.linear_fp8 import LinearFp8Inputs, linear_fp8_ref
from fastbert.ops.linear_int8 import LinearInt8Inputs, linear_int8_ref
from fastbert.ops.linear_norm import LinearNormInputs, linear_norm_ref
from fastbert.ops.pooling import pooling_ref
from fastbert.ops.rotary import rotary_ref

DTYPES = {
    "attention_received": FLOATS,
    "encoder_layers": FLOATS,
    "first_attention": FLOATS,
    "linear_fp8": FLOATS,
    "linear_int8": FLOATS,
    "linear_norm": FLOATS,
    # nothing is computed
    "packing": packing.DTYPES,
    "pooling": FLOATS,
    "rotary": FLOATS,
}


def attention_received_fwd(inputs: AttentionReceivedInputs) -> Tensor:
    return attention_received_ref(*inputs)


def encoder_layers_fwd(inputs: LayersInputs) -> list[Tensor]:
    return encoder_layers_ref(*inputs)


def first_attention_fwd(inputs: FirstAttentionInputs) -> Tensor:
    return first_attention_ref(*inputs)


def linear_fp8_fwd(inputs: LinearFp8Inputs) -> Tensor:
    return linear_fp8_ref(*inputs)


def linear_int8_fwd(inputs: LinearInt8Inputs) -> Tensor:
    x, weight, scale, bias, activation, _, gated, smooth, input_range, float_rows = inputs
    return linear_int8_ref(x, weight, scale, bias, activation, gated, smooth, input_range, float_rows)


def linear_norm_fwd(inputs: LinearNormInputs) -> Tensor:
    return linear_norm_ref(*inputs[:-1])


def packing_fwd(x: Tensor, indices: Tensor) -> Tensor:
    return x[indices]


def packing_bwd(x: Tensor, indices: Tensor, rows: int) -> Tensor:
    padded = x.new_zeros(rows, x.shape[1])
    padded[indices] = x
    return padded


def pooling_fwd(hidden: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    return pooling_ref(hidden, cu_seqlens, mode)


def pooling_bwd(dy: Tensor, hidden: Tensor, y: Tensor, cu_seqlens: Tensor, mode: str) -> Tensor:
    with torch.enable_grad():
        wide = hidden.detach().to(y.dtype).requires_grad_()
        (grad,) = torch.autograd.grad(pooling_ref(wide, cu_seqlens, mode), wide, dy)
    return grad.to(hidden.dtype)


def rotary_fwd(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return rotary_ref(x, cos, sin, positions, interleaved)


def rotary_bwd(dy: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return rotary_ref(dy, cos, -sin, positions, interleaved)
