"""Quantised models for inference: `model.quantize("int8")`, and on a CPU `accelerate(model, dtype="int8")`.

A weight is rounded once, to integers from -127 to 127, with one float32 scale per output channel. The input
is rounded in each call, every row to 8 bits by the row's own range (fastbert/ops/linear_int8.py). Instead all
rows of a layer may have one range, found by calibration, or stay in floating point (`activations`).

The linear layers of every encoder layer are quantised, which do nearly all of a model's arithmetic. The
pooler, the projection of ELECTRA and ALBERT and the heads are not: they cost little, and no later layer
averages their rounding out. LayerNorm, softmax and the residual sums stay in the model's dtype. The table of
words is quantised on request (`quantized_table.py`).

"int4" weights are 8-bit weights that a file stores in 4 bits (`int4.py`).

`quantize` (`quantizing.py`) replaces a model's own linear layers by `QuantizedLinear`. An accelerated model
of transformers keeps them, and their quantised copies (`copy_of`) are derived weights (runtime/prepared.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers import int4, quantized_table
from fastbert.layers.integers import NO_TRAINING, IntegerWeight
from fastbert.ops import checks, integer_table
from fastbert.ops.linear_int8 import linear_int8, panel_maker
from fastbert.runtime import prepared

# What `accelerate` takes
MODES = ("int8",)


class QuantizedLinear(IntegerWeight):
    """nn.Linear with an 8-bit weight, for inference. It has buffers and no parameters.

    `weight` stays int8 and `scale` float32, whatever dtype the module is moved to; `bias` takes that dtype.
    See `IntegerWeight`.

    Args:
        in_features, out_features: as nn.Linear.
        bias: whether the layer has one.
        dtype: the bias's dtype.
        device: the buffers' device.

    Attributes:
        weight: (out, in) int8, from -127 to 127.
        scale: (out,) float32, > 0; weight * scale is the floating-point weight, rounded.
        bias: (out,) or None.
        smooth: (in,) float32, > 0, by which inputs are multiplied before they are rounded; or None. `weight`
            is the weight divided by it; see `smoothing.py`.
        input_range: (2,) float32, of the inputs times smooth, with "static" activations; else None.
        bits: of a weight in a file, 8 or 4.
        activations: how inputs are rounded, one of `ACTIVATIONS`.
    """

    bias: Tensor | None
    smooth: Tensor | None
    input_range: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        self.in_features, self.out_features, self.bits = in_features, out_features, 8
        self.activations = "dynamic"
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("smooth", None)
        self.register_buffer("input_range", None)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls,
        linear: nn.Module,
        name: str = "linear",
        bits: int = 8,
        smooth: Tensor | None = None,
        input_range: Tensor | None = None,
    ) -> QuantizedLinear:
        """The quantised copy of an nn.Linear: symmetric, with scale = max |weight| / 127 per output channel.

        With 4 bits the integers are those of `fastbert.layers.int4`. A channel of zeros has scale 1. A copy
        of a layer on the meta device has the shapes and no values.

        Args:
            linear: an nn.Linear, which is not changed.
            name: the layer's name in errors.
            bits: 8 or 4.
            smooth, input_range: see `QuantizedLinear`; the copy's own.

        Raises:
            TypeError: `linear` is no nn.Linear with floating-point weights.
            ValueError: a weight or bias is NaN or infinite in float32.
        """
        if not isinstance(linear, nn.Linear) or linear.weight.dtype not in checks.FLOATS:
            kind = linear.weight.dtype if isinstance(linear, nn.Linear) else type(linear).__name__
            raise TypeError(f"{name}: expected an nn.Linear with floating-point weights, got {kind}")
        weight, bias = linear.weight, linear.bias
        out, width = weight.shape
        made = cls(width, out, bias is not None, dtype=weight.dtype, device=weight.device)
        made.bits, made.smooth, made.input_range = bits, smooth, input_range
        if weight.is_meta or weight.numel() == 0:
            if made.bias is not None and not made.bias.is_meta:
                check_finite(weight, bias, name)
                made.bias.copy_(bias)
            return made
        integers, scale = rounded_channels(weight if smooth is None else weight.float() / smooth, bits)
        # One weight that is not finite makes its channel's scale so
        check_finite(scale, bias, name)
        made.scale.copy_(scale)
        made.weight.copy_(integers)
        if made.bias is not None:
            made.bias.copy_(bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in `x`'s dtype; see `fastbert.ops.linear_int8`."""
        return int8_product(x, self, [self])

    def dequantized(self) -> Tensor:
        """The weight in floating point: (out, in) float32."""
        weight = self.weight.float() * self.scale[:, None]
        return weight if self.smooth is None else weight * self.smooth

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        out, bias = self.out_features, self.bias is not None
        more = "" if self.smooth is None else ", smooth=True"
        more += "" if self.activations == "dynamic" else f", activations={self.activations!r}"
        return f"in_features={self.in_features}, out_features={out}, bias={bias}{more}"

    def rows(self) -> tuple[Tensor | None, Tensor | None, bool]:
        """smooth, input_range and float_rows for `linear_int8`."""
        return self.smooth, self.input_range, self.activations == "float"


def rounded_channels(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(weight (out, in) int8 from -127 to 127, scale (out,) float32) of a floating-point weight.

    With 4 bits the integers are those of `fastbert.layers.int4`.
    """
    return int4.rounded(weight) if bits == 4 else integer_table.rounded(weight, 8)


@torch.no_grad()
def check_finite(weight: Tensor, bias: Tensor | None, name: str) -> None:
    """Raise ValueError if the weight or bias of the linear layer `name` is NaN or infinite in float32."""
    for what, tensor in (("weight", weight.float()), ("bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"{name}.{what}: holds NaN or infinity; expected finite weights")


def copy_of(linear: nn.Module, name: str = "linear") -> QuantizedLinear:
    """`QuantizedLinear.from_linear(linear, name)`, kept until the weight or the bias of `linear` changes."""
    sources = tuple(t for t in (linear.weight, linear.bias) if isinstance(t, Tensor))
    return prepared.derived(linear, "int8 copy", sources, lambda: QuantizedLinear.from_linear(linear, name))


def int8_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[QuantizedLinear],
    activation: str | None = None,
    with_bias: bool = True,
    gated: str | None = None,
) -> Tensor:
    """act(x @ [W1; W2; …].T + [b1; b2; …]) of quantised layers, as one product.

    Args:
        x: (..., in).
        owner: the module that keeps what is derived from the weights.
        modules: all with a bias, or all without one.
        activation, gated: as in `linear_int8`; a gate of one module alone.
        with_bias: False leaves the biases out.
    """
    if torch.compiler.is_compiling():
        biased = with_bias and modules[0].bias is not None
        return linear_int8(x, *_joined(modules, biased), activation, None, gated, *modules[0].rows())
    dtype = x.dtype if x.dtype == torch.float64 else checks.autocast_dtype(x) or x.dtype
    how = with_bias, gated is not None
    weight, scale, bias, panels = int8_operands(x.device, dtype, owner, modules, *how)
    return linear_int8(x, weight, scale, bias, activation, panels, gated, *modules[0].rows())


def int8_operands(
    device: torch.device,
    dtype: torch.dtype,
    owner: nn.Module,
    modules: list[QuantizedLinear],
    with_bias: bool = True,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(weight, scale, bias, panels) of several quantised layers as one, for `linear_int8` on rows of `dtype`.

    See `int8_product` for the arguments. `panels` is None if the serving backend makes none.
    """
    biased = with_bias and modules[0].bias is not None
    if len(modules) == 1:
        weight, scale, bias = _joined(modules, biased)
    else:
        sources = tuple(t for m in modules for t in (m.weight, m.scale, m.bias) if t is not None)
        weight, scale, bias = prepared.derived(
            owner, ("int8", biased), sources, lambda: _joined(modules, biased)
        )
    panels, make_panels = None, panel_maker(device, dtype)
    if make_panels is not None:
        # Kept for this backend alone, because no other backend could read them
        key = "int8 panels", make_panels, gated
        panels = prepared.derived(owner, key, (weight,), lambda: make_panels(weight, gated))
    return weight, scale, bias, panels


def int8_joins(x: Tensor, modules: Sequence[Any]) -> bool:
    """Whether the modules can be one product, which is faster because `x` is quantised once."""
    rows = [m.rows() for m in modules]
    if len({(smooth is None, ends is None, floats) for smooth, ends, floats in rows}) > 1:
        return False
    if len({m.bias is None for m in modules}) > 1:
        return False
    given = [t for own in rows for t in own[:2] if isinstance(t, Tensor)]
    each = len(given) // len(modules)
    if len(modules) == 1 or each == 0:
        return True
    if torch.compiler.is_compiling():
        return False

    def are_equal() -> bool:
        return all(torch.equal(given[i % each], t) for i, t in enumerate(given))

    return prepared.derived(modules[0], "equal rows", tuple(given), are_equal)


def int8_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[QuantizedLinear], gated: bool = False
) -> list[tuple[Any, ...]] | None:
    """What `ops.encoder_layer` describes, of query, key and value as one product, and of each layer after.

    Args:
        x: rows with the dtype and device that the layer runs in.
        owner: the module that keeps what is derived from query, key and value.
        modules: see `LinearKind`.

    Returns:
        One tuple per product; None if query, key and value cannot be one product.
    """
    joined = 1 if len(modules) < 6 else 3
    qkv, after = modules[:joined], modules[joined:]
    if not int8_joins(x, qkv):
        return None
    operands = []
    for whose, together in ((owner, qkv), *((m, [m]) for m in after)):
        up = gated and together[0] is modules[-2]
        weight, scale, bias, panels = int8_operands(x.device, x.dtype, whose, together, gated=up)
        operands.append((weight, panels, scale, bias, *together[0].rows()))
    return operands


def _joined(modules: list[QuantizedLinear], biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if len(modules) == 1:
        return modules[0].weight, modules[0].scale, modules[0].bias if biased else None
    return (
        torch.cat([m.weight for m in modules]),
        torch.cat([m.scale for m in modules]),
        torch.cat([m.bias for m in modules if m.bias is not None]) if biased else None,
    )


def table_product(x: Tensor, table: quantized_table.QuantizedEmbedding, bias: Tensor | None) -> Tensor:
    """(…, width) -> x @ table.T + bias, (…, rows of the table): an 8-bit linear layer of the table's rows."""

    def linear() -> QuantizedLinear:
        made = QuantizedLinear(table.embedding_dim, table.num_embeddings, bias is not None, device="meta")
        made.weight, made.scale = table.integers(), table.scale
        made.bias = None if bias is None else bias.detach()
        return made

    sources = tuple(t for t in (table.weight, table.scale, bias) if t is not None)
    own = prepared.derived(table, "decoder", sources, linear)
    return int8_product(x, own, [own])


def num_weights(model: nn.Module, tables: bool = True) -> int:
    """The number of weights and biases in the quantised parts of `model`: buffers, not parameters.

    Args:
        tables: whether to count those of the table of words.
    """
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    words = [m for m in model.modules() if isinstance(m, QUANTIZED[1])] if tables else []
    linear = sum(t.numel() for m in quantized for t in (m.weight, m.bias) if t is not None)
    return linear + sum(m.num_embeddings * m.embedding_dim for m in words)


def is_quantized(model: nn.Module) -> bool:
    """Whether any part of `model` holds integers as weights."""
    return any(isinstance(module, QUANTIZED) for module in model.modules())


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise RuntimeError if the model is quantised. `what` names the call that would train it."""
    if is_quantized(model):
        raise RuntimeError(f"{what}: {type(model).__name__} {NO_TRAINING}")


# What `quantize` puts into a model: for weights, and for embeddings
QUANTIZED = QuantizedLinear, quantized_table.QuantizedEmbedding
