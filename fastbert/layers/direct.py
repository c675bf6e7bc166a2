"""An encoder layer by the backends' launchers themselves, for inference on a GPU.

There a batch of few tokens takes the device less time than the host needs to check what it passes on: each
op checks all its arguments, and each layer its parts. Here the batch is checked once, and the parameters of
a layer all at a time. The launchers, their arguments and so the bits are those of the ops.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastbert.layers.form import LayerForm
from fastbert.layers.linear import joined_weights
from fastbert.layers.modules import is_plain
from fastbert.layers.sequences import Checked, Sequences
from fastbert.ops import checks, linear_norm
from fastbert.ops.attention_checks import check_bias, check_lengths
from fastbert.ops.attention_inputs import AttentionInputs
from fastbert.ops.attention_places import checked_table
from fastbert.ops.layer_norm import NARROW, LayerNormInputs
from fastbert.ops.linear import forward_of
from fastbert.ops.linear_norm import LinearNormInputs
from fastbert.runtime import dispatch

_ORDINARY = frozenset((Tensor, nn.Parameter))
_is_neg, _is_zero = torch._C.TensorBase.is_neg, torch._C.TensorBase._is_zerotensor


def on_gpu(x: Tensor) -> bool:
    """Whether the host's time counts for the layers of `x`."""
    return x.is_cuda


class Parts(NamedTuple):
    """What a layer computes with.

    Attributes:
        parameters: weight and bias of query, key, value, attention output, intermediate, output, both norms.
        eps: of both norms.
    """

    parameters: list[Tensor]
    eps: tuple[float, float]


def plain_parts(layer: nn.Module, form: LayerForm, x: Tensor) -> Parts | None:
    """The layer's parts. None if one is not plain, or if the parameters do not fit `x` and one another."""
    found, eps = [], []
    for path, kind in form.steps:
        module = layer
        for name in path:
            module = module._modules[name]
        if not is_plain(module, kind):
            return None
        own = module._parameters
        weight, bias = own.get("weight"), own.get("bias")
        if weight is None or bias is None:
            return None
        found += (weight, bias)
        if kind is nn.LayerNorm:
            eps.append(checks.eps(module.eps))
    return (
        Parts(found, tuple(eps))
        if _fit(found, _shapes(x.shape[1], found[8].numel() // x.shape[1]), x)
        else None
    )


@functools.cache
def _shapes(hidden: int, inner: int) -> list[tuple[int, ...]]:
    """Of the parameters of a layer with so many columns."""
    wide = [(hidden, hidden)] * 4 + [(inner, hidden), (hidden, inner)]
    return [shape for matrix in wide for shape in (matrix, matrix[:1])] + [(hidden,)] * 4


def _fit(parameters: list[Tensor], shapes: list[tuple[int, ...]], x: Tensor) -> bool:
    """Whether the ops would pass on these parameters as they are. Asked at every call: so C code walks lists.

    `parameter.data = other` may change all of it.
    """
    dtype, index = x.dtype, x.get_device()
    return (
        _ORDINARY.issuperset(map(type, parameters))
        and list(map(Tensor.size, parameters)) == shapes
        and all(map(Tensor.is_contiguous, parameters))
        and [t.dtype for t in parameters] == [dtype] * 16
        and list(map(Tensor.get_device, parameters)) == [index] * 16
        and not any(map(_is_neg, parameters))
        and not any(map(_is_zero, parameters))
    )


def _checked(x: Tensor, sequences: Sequences, nheads: int) -> Checked:
    """What is known of the batch; raises as `attention` does where it is wrong."""
    kept = sequences.checked
    if kept:
        found = kept[0]
        if (
            found.cu_seqlens is sequences.cu_seqlens
            and found.max_seqlen == sequences.max_seqlen
            and found.rows == x.shape[0]
            and found.given is sequences.bias
            and found.device == x.device
        ):
            return found
    ends, longest = sequences.cu_seqlens, sequences.max_seqlen
    check_lengths(ends, longest, x)
    table = checked_table(sequences.fitting_places(), ends, longest, x)
    bias = check_bias(sequences.bias, ends.shape[0] - 1, nheads, longest, x)
    bias = None if bias is None else dispatch.plain(bias)
    kept[:] = [Checked(ends, longest, x.shape[0], x.device, sequences.bias, bias, table)]
    return kept[0]


def forward(layer: nn.Module, form: LayerForm, x: Tensor, sequences: Sequences) -> Tensor | None:
    """The layer's output (total, hidden) in inference, without dropout.

    None if an op has to look at its arguments, which is for the caller to do. The caller has made sure that
    the layer drops nothing, that its own code computes the parts, and that they are not 8-bit copies.
    """
    if (
        type(x) is not Tensor
        or x.dtype not in checks.FLOATS
        or x.dim() != 2
        or x.shape[0] == 0
        or x.shape[1] != form.nheads * form.head_dim
        or x.shape[1] <= NARROW
        or not x.is_contiguous()
        or x.is_neg()
        or x._is_zerotensor()
        or sequences.return_probs
        or type(sequences.cu_seqlens) is not Tensor
        or sequences.cu_seqlens.is_neg()
        or checks.autocast_dtype(x) is not None
    ):
        return None
    parts = plain_parts(layer, form, x)
    if parts is None:
        return None
    return _run(layer, form, x, sequences, _checked(x, sequences, form.nheads), parts)


def _run(layer, form, x, sequences, batch: Checked, parts: Parts) -> Tensor:
    device, dtype, rows = x.device, x.dtype, x.shape[0]
    parameters, (eps, last_eps) = parts
    out_weight, out_bias, up_weight, up_bias, down_weight, down_bias = parameters[6:12]
    norm_weight, norm_bias, last_weight, last_bias = parameters[12:]
    product = dispatch.launcher("linear_fwd", device, dtype)
    qkv_weight, qkv_bias = joined_weights(layer, parameters[0:6:2], parameters[1:6:2], dtype)
    qkv = product(x, qkv_weight, qkv_bias, None, None, False)[0]
    q, k, v = qkv.view(rows, 3, form.nheads, form.head_dim).unbind(1)
    inputs = AttentionInputs(
        *(q, k, v, batch.cu_seqlens, batch.max_seqlen, form.head_dim**-0.5, sequences.causal),
        *(batch.bias, None, 0.0, None, 0),
    )
    attend = dispatch.launcher("attention_fwd", device, dtype)
    context = attend(inputs, False, False, batch.table)[0].view(rows, x.shape[1])
    x = _dense_norm(product, context, out_weight, out_bias, x, norm_weight, norm_bias, eps, sequences)
    activate = dispatch.launcher(forward_of(form.activation, False, rows), device, dtype)
    inner = activate(x, up_weight, up_bias, form.activation, None, False)[0]
    return _dense_norm(product, inner, down_weight, down_bias, x, last_weight, last_bias, last_eps, sequences)


def _dense_norm(product, x, weight, bias, residual, norm_weight, norm_bias, eps, sequences) -> Tensor:
    """norm(residual + x @ weight.T + bias), as `layers.linear.dense_norm` does it."""
    if linear_norm.pays(x, weight.shape[0]):
        arrivals = sequences.arrivals
        if not arrivals:
            arrivals.append(linear_norm.new_arrivals(x.device))
        function = f"linear_norm_fwd{dispatch.rows_kind(x.shape[0])}"
        launch = dispatch.launcher(function, x.device, x.dtype)
        inputs = LinearNormInputs(x, weight, bias, residual, norm_weight, norm_bias, eps, arrivals[0])
        return launch(inputs)
    z = product(x, weight, None, None, None, False)[0]
    launch = dispatch.launcher("layer_norm_fwd", x.device, x.dtype)
    return launch(LayerNormInputs(z, norm_weight, norm_bias, residual, bias, eps), False)[0]
