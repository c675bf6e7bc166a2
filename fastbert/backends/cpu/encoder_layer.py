"""A whole layer by the `cpu` backend: csrc/cpu/encoder_layer; contract in fastbert/ops/encoder_layer.py."""

from __future__ import annotations

from itertools import chain

import torch

from fastbert._native import DTYPE_CODES, vector
from fastbert._native import extension as _C
from fastbert.backends.cpu.attention import bias_args
from fastbert.backends.cpu.linear import ACTIVATIONS

_NOTHING = (0, 0, 0, 0)  # in place of the key's and the value's layer, where one product makes all three


def encoder_layer_weights(linears, norms):
    """What `encoder_layer_fwd` takes: the numbers for csrc/bindings/encoder_layer.cpp, the instruction set
    that 8-bit weights are packed for, and the tensors behind the numbers.
    """
    numbers, isa = [], _C.cpu_isa()
    for packed, scale, bias in linears:
        numbers += (packed.data_ptr(), 0 if scale is None else scale.data_ptr(), *vector(bias))
        if scale is not None and len(numbers) == 4:
            numbers += 2 * _NOTHING
    for weight, bias in norms:
        numbers += (*vector(weight), *vector(bias))
    return tuple(numbers), isa, tuple(chain(*linears, *norms))


def encoder_layer_fwd(
    x, weights, cu_seqlens, max_seqlen, nheads, inner, softmax_scale, bias, gate, activation, eps
):
    numbers, isa, _held = weights
    if isa != _C.cpu_isa():
        raise RuntimeError(f"weights: packed for {isa}, and {_C.cpu_isa()} is in use now")
    total, hidden = x.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    bias, bias_numbers = bias_args(bias, batch, nheads, max_seqlen)
    if gate is not None:
        gate = gate.float().contiguous()
    y = x.new_empty(total, hidden)
    _C.cpu_encoder_layer_fwd(
        DTYPE_CODES[x.dtype], (batch, nheads, hidden // nheads, total, max_seqlen, inner), numbers,
        cu_seqlens.data_ptr(), x.data_ptr(), x.stride(0), *eps, ACTIVATIONS[activation], softmax_scale,
        bias_numbers, 0 if gate is None else gate.data_ptr(), y.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y
