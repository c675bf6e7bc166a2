r"""Encoder layers in one call, on packed tokens. Inference only.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    a = LayerNorm(x + attention(q, k, v) Woᵀ + bo)
    y = LayerNorm(a + act(a Wiᵀ + bi) Wfᵀ + bf)        of one layer; y is the next layer's x

`reference` computes in float32 (float64 for float64) and rounds each layer's output once. A backend that
calls its kernels one after the other rounds every result to the dtype of `x`, as eager PyTorch does.

On a GPU the host takes longer to enqueue a layer's seven kernels from Python than the device takes to run
them for a short text. One call enqueues all of them. Where no backend does that, models call the ops
`linear`, `attention` and `layer_norm`, and `gap` returns the reason.

There is no custom op and no autograd here: training and torch.compile call the ops.

Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.activation import ACTIVATIONS, activate_ref
from fastbert.ops.attention import attention_ref
from fastbert.ops.attention_checks import check_bias, check_lengths
from fastbert.runtime import dispatch


class LayerWeights(NamedTuple):
    """The parameters of one layer, all of one dtype. Matrices are (outputs, inputs), each with its bias.

    Attributes:
        nheads, headdim: their product, the width of attention, need not be the hidden size.
        activation: activation of the feed-forward block, a name of `ops.activation`.
        eps, last_eps: eps of the norm after attention, and of the norm after the feed-forward block.
        qkv_weight: (3 · width, hidden): query, key and value, one below the other.
        out_weight: (hidden, width), the attention's output; norm_weight: (hidden,).
        up_weight: (inner, hidden); down_weight: (hidden, inner); last_weight: (hidden,).
    """

    nheads: int
    headdim: int
    activation: str
    eps: float
    last_eps: float
    qkv_weight: Tensor
    qkv_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    up_weight: Tensor
    up_bias: Tensor
    down_weight: Tensor
    down_bias: Tensor
    last_weight: Tensor
    last_bias: Tensor


class LayerStack:
    """Layers in execution order, checked once, with the objects that a backend makes of them.

    Args:
        layers: one or more, of one hidden size, dtype and device. Their tensors must stay where they are.

    Raises:
        TypeError, ValueError: naming the parameter, what came and what was expected.
    """

    def __init__(self, layers: Sequence[LayerWeights]):
        if not layers:
            raise ValueError("layers: expected at least one")
        self.layers = tuple(layers)
        like = layers[0].qkv_weight
        checks.float_tensor("layer 0, qkv_weight", like)
        if like.dim() != 2:
            raise ValueError(f"layer 0, qkv_weight: expected two dimensions, got shape {tuple(like.shape)}")
        self.hidden = like.shape[-1]
        self.dtype, self.device = like.dtype, like.device
        for number, layer in enumerate(layers):
            self._check(number, layer, like)
        self.made: dict[str, Any] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All parameters."""
        return tuple(t for layer in self.layers for t in layer[5:])

    @classmethod
    def joined(cls, stacks: Sequence[LayerStack]) -> LayerStack:
        """The layers of stacks of one hidden size, dtype and device, one after the other."""
        self, first = cls.__new__(cls), stacks[0]
        for stack in stacks:
            same = stack.hidden == first.hidden and stack.dtype == first.dtype
            if not same or stack.device != first.device:
                raise ValueError(
                    f"stacks: expected {first.hidden} columns of {first.dtype} on {first.device}, "
                    f"got {stack.hidden} of {stack.dtype} on {stack.device}"
                )
        self.layers = tuple(layer for stack in stacks for layer in stack.layers)
        self.hidden, self.dtype, self.device, self.made = first.hidden, first.dtype, first.device, {}
        return self

    def _check(self, number: int, layer: LayerWeights, like: Tensor) -> None:
        names = [f"layer {number}, {name}" for name in LayerWeights._fields[5:]]
        for name, tensor in zip(names, layer[5:], strict=True):
            checks.float_tensor(name, tensor, like)
            checks.same_dtype(name, tensor, "qkv_weight", like)
        width, hidden, inner = layer.nheads * layer.headdim, self.hidden, layer.up_bias.numel()
        shapes = [
            shape
            for rows, columns in ((3 * width, hidden), (hidden, width), (inner, hidden), (hidden, inner))
            for shape in ((rows, columns), (rows,))
        ]
        shapes[4:4] = shapes[10:10] = [(hidden,)] * 2
        for name, tensor, shape in zip(names, layer[5:], shapes, strict=True):
            checks.shape(name, tensor, shape)
        for eps in (layer.eps, layer.last_eps):
            checks.eps(eps)
        if layer.activation not in ACTIVATIONS:
            raise ValueError(
                f"layer {number}, activation: expected one of {', '.join(ACTIVATIONS)}, "
                f"got {layer.activation!r}"
            )


class LayersInputs(NamedTuple):
    """The arguments of `encoder_layers` as a backend takes them: checked."""

    x: Tensor
    stack: LayerStack
    cu_seqlens: Tensor
    max_seqlen: int
    bias: Tensor | None = None
    causal: bool = False
    first_only: bool = False
    states: bool = False


def encoder_layers_ref(
    x: Tensor,
    stack: LayerStack,
    cu_seqlens: Tensor,
    max_seqlen: int,
    bias: Tensor | None = None,
    causal: bool = False,
    first_only: bool = False,
    states: bool = False,
) -> list[Tensor]:
    """Plain PyTorch in float64 for float64 `x`, else in float32. Arguments as in `encoder_layers`."""
    compute, found = checks.compute_dtype(x), []
    for number, layer in enumerate(stack.layers):
        w = LayerWeights(*layer[:5], *(t.to(compute) for t in layer[5:]))
        y = x.to(compute)
        qkv = (y @ w.qkv_weight.T + w.qkv_bias).view(-1, 3, w.nheads, w.headdim)
        scale = w.headdim**-0.5
        given = {"softmax_scale": scale, "causal": causal, "bias": bias}
        context = attention_ref(*qkv.unbind(1), cu_seqlens, max_seqlen, **given)[0].flatten(1)
        if first_only and number == len(stack.layers) - 1:
            y, context = first_rows(y, cu_seqlens), first_rows(context, cu_seqlens)
        a = _norm(y + context @ w.out_weight.T + w.out_bias, w.norm_weight, w.norm_bias, w.eps)
        inner = activate_ref(a @ w.up_weight.T + w.up_bias, w.activation)
        z = a + inner @ w.down_weight.T + w.down_bias
        x = _norm(z, w.last_weight, w.last_bias, w.last_eps).to(x.dtype)
        found.append(x)
    return found if states else found[-1:]


def first_rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(total, columns) -> (batch, columns): the first row of each sequence; of an empty one any row."""
    return x.index_select(0, cu_seqlens[:-1].long().clamp_max(x.shape[0] - 1))


def _norm(z: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = z - z.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


# --- public functions ---------------------------------------------------------------------------------------


def gap(stack: LayerStack, device: torch.device) -> str | None:
    """Why no backend runs these layers in one call on the device; None if one does.

    A backend that does has one more function:

        encoder_layers_gap(stack) -> why it does not take these layers, or None
    """
    try:
        found = dispatch.serving_function("encoder_layers_gap", ("encoder_layers",), device, stack.dtype)
    except dispatch.BackendError as error:
        return str(error)
    if found is None:
        return "no backend that is proven here runs layers in one call"
    return found(stack)


def encoder_layers(
    x: Tensor,
    stack: LayerStack,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    bias: Tensor | None = None,
    causal: bool = False,
    first_only: bool = False,
    states: bool = False,
) -> list[Tensor]:
    """Packed tokens through all layers of `stack`.

    Args:
        x: (total, hidden), of the layers' dtype, with at least one row.
        stack: the layers.
        cu_seqlens, max_seqlen, bias, causal: as in `ops.attention`, packed layout.
        first_only: the last layer computes only the first token of each sequence. The row of an empty
            sequence has no meaning.
        states: whether the output of every layer is wanted.

    Returns:
        The output of the last layer alone, or of every layer in order: each (total, hidden); the last one
        (batch, hidden) with `first_only`. Rows after the last sequence have no meaning.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
        RuntimeError: gradients are enabled and an argument requires one.
    """
    checks.float_tensor("x", x)
    if x.dtype != stack.dtype or x.device != stack.device:
        raise ValueError(
            f"x: expected {stack.dtype} on {stack.device} as the layers, got {x.dtype} on {x.device}"
        )
    if x.dim() != 2 or x.shape[1] != stack.hidden or x.shape[0] == 0:
        raise ValueError(f"x: expected shape (total >= 1, {stack.hidden}), got {tuple(x.shape)}")
    check_lengths(cu_seqlens, max_seqlen, x)
    for nheads in {layer.nheads for layer in stack.layers} if bias is not None else ():
        bias = check_bias(bias, cu_seqlens.shape[0] - 1, nheads, max_seqlen, x)
    if torch.is_grad_enabled():
        checks.inference_only("encoder_layers", (x, bias, *stack.tensors))
    given = cu_seqlens, max_seqlen, bias, causal, first_only, states
    return dispatch.call("encoder_layers_fwd", x, LayersInputs(x.contiguous(), stack, *given))
