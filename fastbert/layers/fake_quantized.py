"""Quantisation-aware training: layers that round as their quantised copies do, and learn.

    y = act(x̂ Ŵᵀ + b)        x̂: each row of x in 8 bits, Ŵ: W in 8 or 4 bits
    dx = dpre Ŵ,  dW = dpreᵀ x̂,  db = Σ dpre        straight-through: dx̂/dx = dŴ/dW = 1

The forward is the op `linear_int8` itself, on the integers that `quantize` would make. So training computes
what inference computes, bit for bit on the same backend. Each range is that of the tensor's own values: none
is cut off, so no gradient has to be set to 0. LayerNorm, softmax and activations stay in floating point.

Weights in 4 bits have a factor per 32 inputs of an output channel (`int4.py`), and are multiplied as 8-bit
integers. Tables have one scale per row.

Source: Zafrir et al. 2019, "Q8BERT: Quantized 8Bit BERT"; Bengio et al. 2013, "Estimating or Propagating
Gradients Through Stochastic Neurons for Conditional Computation" (straight-through); Shen et al. 2020,
"Q-BERT" (groups).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.modules import attach, is_plain, take_over
from fastbert.layers.quantized import (
    QuantizedLinear,
    int8_layer_operands,
    int8_product,
    rounded_channels,
)
from fastbert.layers.quantizing import check_plain, each_linear
from fastbert.ops import checks, derivatives, integer_table
from fastbert.ops.linear import linear_bwd
from fastbert.ops.linear_int8 import linear_int8, quantize_rows
from fastbert.runtime import prepared

BITS = (8, 4)


class _StraightThrough(torch.autograd.Function):
    """act(x̂ Ŵᵀ + b) of rows; backward takes rounding for the identity. `pre` is computed again there."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        x, weight, bias, bits, activation, gated = args
        integers, scale = rounded_channels(weight, bits)
        ctx.save_for_backward(x, integers, scale, bias)
        ctx.activation, ctx.gated, ctx.dtype = activation, gated, weight.dtype
        return linear_int8(x, integers, scale, bias, activation, gated=gated)

    @staticmethod
    @derivatives.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, integers, scale, bias = ctx.saved_tensors
        needs, compute = ctx.needs_input_grad[:3], checks.compute_dtype(x)
        centred, _, step = quantize_rows(x)
        rows = (centred.to(compute) * step.to(compute)).to(x.dtype)
        weight = (integers.to(compute) * scale.to(compute)[:, None]).to(x.dtype)
        pre = None if ctx.activation is None else linear_int8(x, integers, scale, bias)
        saved = rows, weight, pre, ctx.activation, ctx.gated
        dx, dweight, dbias = linear_bwd(dy.contiguous(), *saved, *needs[:2], bias is not None)
        found = dx, dweight.to(ctx.dtype), None if bias is None else dbias.to(bias.dtype)
        return (
            *(each if needed else None for each, needed in zip(found, needs, strict=True)),
            None,
            None,
            None,
        )


class _Rounded(torch.autograd.Function):
    """`rounded`, whose gradient is that of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class FakeQuantizedLinear(nn.Linear):
    """nn.Linear in training for 8-bit or 4-bit weights; it has the same parameters.

    Args:
        linear: the layer whose parameters these are.
        bits: of the weight, 8 or 4.
    """

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        nn.Module.__init__(self)
        take_over(self, linear)
        self.bits = bits

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), as the quantised layer."""
        return fake_product(input, self, [self])

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        return f"{super().extra_repr()}, bits={self.bits}"


class FakeQuantizedEmbedding(nn.Embedding):
    """nn.Embedding in training for 8-bit or 4-bit tables; it has the same parameter.

    Args:
        table: the table whose parameter this is.
        bits: of the table, 8 or 4.
    """

    def __init__(self, table: nn.Embedding, bits: int) -> None:
        nn.Module.__init__(self)
        take_over(self, table)
        self.bits = bits

    def forward(self, input: Tensor) -> Tensor:
        """(…) integers -> (…, width): the rows, rounded."""
        rows = super().forward(input)
        integers, scale = integer_table.rounded(rows.detach().flatten(0, -2), self.bits)
        return _Rounded.apply(rows, (integers * scale[:, None]).to(rows.dtype).view_as(rows))

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        return f"{super().extra_repr()}, bits={self.bits}"


def _copy(module: FakeQuantizedLinear) -> QuantizedLinear:
    """The quantised layer, kept until a parameter changes."""
    sources = tuple(t for t in (module.weight, module.bias) if t is not None)
    return prepared.derived(module, "quantised copy", sources, lambda: quantized(module))


def quantized(module: FakeQuantizedLinear, name: str = "linear") -> QuantizedLinear:
    """The quantised layer that the module trains for; `name` names it in errors."""
    return QuantizedLinear.from_linear(module, name, module.bits)


def plain(module: FakeQuantizedLinear | FakeQuantizedEmbedding) -> nn.Linear | nn.Embedding:
    """The nn.Linear or nn.Embedding with the module's parameters."""
    kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    take_over(made, module)
    return made


def fake_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[FakeQuantizedLinear],
    activation: str | None = None,
    with_bias: bool = True,
    gated: str | None = None,
) -> Tensor:
    """act(x̂ @ [Ŵ1; Ŵ2; …].T + [b1; b2; …]) as one product; see `LinearKind`."""
    weights: list[Tensor] = [m.weight for m in modules]
    biases: list[Tensor] = [m.bias for m in modules if m.bias is not None and with_bias]
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *biases))
    # Integer layers are for a CPU (docs/notes/torch.md)
    if not learns and x.device.type == "cpu" and not torch.compiler.is_compiling():
        return int8_product(x, owner, [_copy(m) for m in modules], activation, with_bias, gated)
    (x,) = checks.under_autocast(x)
    weight = weights[0] if len(modules) == 1 else torch.cat(weights)
    bias = None if not biases else biases[0] if len(modules) == 1 else torch.cat(biases)
    y: Any = _StraightThrough.apply(
        checks.rows(x.flatten(0, -2)), weight, bias, modules[0].bits, activation, gated
    )
    return y.unflatten(0, x.shape[:-1])


def fake_joins(x: Tensor, modules: list[FakeQuantizedLinear]) -> bool:
    """See `LinearKind`."""
    return len({(m.bits, m.bias is None) for m in modules}) == 1


def fake_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[FakeQuantizedLinear], gated: bool = False
) -> list[tuple[Any, ...]] | None:
    """See `LinearKind`."""
    return int8_layer_operands(x, owner, [_copy(m) for m in modules], gated)


def prepare(model: Any, weights: int = 8, embeddings: int | None = None) -> Any:
    """Let the layers of a model round in training as they will after `convert`; in place.

    The parameters stay the same objects under the same names: an optimizer may exist already, and
    `save_pretrained` writes floating-point files.

    Args:
        model: a model of this package, with plain linear layers.
        weights: bits of the linear layers of the encoder layers, 8 or 4. Their inputs have 8.
        embeddings: bits of the table of words, 8 or 4; None leaves it.

    Returns:
        `model`.

    Raises:
        ValueError: other bits, or a table that a decoder reads too.
        TypeError: a linear layer or the table is no plain one (LoRA, hooked, prepared already). The message
            names it. The model is then unchanged.
    """
    for name, value, known in (("weights", weights, BITS), ("embeddings", embeddings, (None, *BITS))):
        if value not in known or isinstance(value, (bool, float)):
            raise ValueError(f"{name}: expected {' or '.join(map(str, known))}, got {value!r}")
    linears, table = list(each_linear(model)), model.get_input_embeddings()
    for _, _, module, name in linears:
        check_plain(module, name)
    if embeddings is not None:
        if not is_plain(table, nn.Embedding):
            raise TypeError(f"embeddings: expected a plain nn.Embedding, got {type(table).__name__}")
        if model.tied_weights():
            raise ValueError("embeddings: expected None, because the decoder reads the table of words too")
        _exchange(model, table, FakeQuantizedEmbedding(table, embeddings))
    for layer, path, module, _ in linears:
        attach(layer, path, FakeQuantizedLinear(module, weights))
    prepared.clear(model)
    return model


def convert(model: Any) -> Any:
    """Quantise a model that `prepare` has prepared, for inference; in place, whether it was trained or not.

    Returns:
        `model`, as `model.quantize(…)` leaves it.

    Raises:
        ValueError: the model is not prepared, or a weight is not finite.
    """
    linears = [each for each in each_linear(model) if isinstance(each[2], FakeQuantizedLinear)]
    if not linears:
        raise ValueError("model: expected one that `prepare` has prepared")
    weights, table = linears[0][2].bits, model.get_input_embeddings()
    for layer, path, module, _ in linears:
        attach(layer, path, plain(module))
    if not isinstance(table, FakeQuantizedEmbedding):
        return model.quantize(f"int{weights}")
    _exchange(model, table, plain(table))
    return model.quantize(f"int{weights}", embeddings=f"int{table.bits}")


def _exchange(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in another's place."""
    for name, module in list(model.named_modules()):
        if module is old:
            attach(model, name, new)
