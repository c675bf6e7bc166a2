"""Quantised models for inference on a CPU: `model.quantize("int8")`, `accelerate(model, dtype="int8")`.

A weight is rounded once, to integers from -127 to 127, with one float32 scale per output channel. The input
is rounded in each call, every row to 8 bits by the row's own range (fastbert/ops/linear_int8.py).

The linear layers of every encoder layer are quantised, which do nearly all of a model's arithmetic. The
pooler, the projection of ELECTRA and ALBERT and the heads are not: they cost little, and no later layer
averages their rounding out. LayerNorm, softmax and the residual sums stay in the model's dtype. The table of
words is quantised on request (`quantized_table.py`).

"int4" weights are 8-bit weights that a file stores in 4 bits (`int4.py`).

`quantize` replaces a model's own linear layers by `QuantizedLinear`. An accelerated model of transformers
keeps them, and their quantised copies (`copy_of`) are derived weights (runtime/prepared.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers import int4, quantized_table
from fastbert.layers.integers import NO_TRAINING, IntegerWeight
from fastbert.layers.modules import attach, is_plain, part
from fastbert.layers.smoothing import Calibration, check_smooth, smoothing
from fastbert.ops import checks, integer_table
from fastbert.ops.linear_int8 import linear_int8, panel_maker
from fastbert.runtime import prepared

# What `accelerate` takes
MODES = ("int8",)
# The entry of a quantised checkpoint in config.json. It has no `quant_method` on purpose. Without one
# transformers raises; an unknown one it skips with a warning, and loads the integers as weights. "weights"
# and "embeddings" are absent if they are floating-point.
CONFIG = {
    "format": "fastbert-int8",
    "weights": "int8, symmetric, one float32 scale per output channel",
    "activations": "8 bits, asymmetric, one range per token, dynamic",
}
WEIGHTS = {
    "int8": CONFIG["weights"],
    "int4": "int4, symmetric, groups of 32 with a factor from 1 to 18, one float32 scale per output channel",
}
EMBEDDINGS = {
    "int8": "int8, symmetric, one float32 scale per row",
    "int4": "int4, symmetric, two per byte, one float32 scale per row",
}


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
        bits: of a weight in a file, 8 or 4.
    """

    bias: Tensor | None
    smooth: Tensor | None

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
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("smooth", None)

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Module, name: str = "linear", bits: int = 8, smooth: Tensor | None = None
    ) -> QuantizedLinear:
        """The quantised copy of an nn.Linear: symmetric, with scale = max |weight| / 127 per output channel.

        With 4 bits the integers are those of `fastbert.layers.int4`. A channel of zeros has scale 1. A copy
        of a layer on the meta device has the shapes and no values.

        Args:
            linear: an nn.Linear, which is not changed.
            name: the layer's name in errors.
            bits: 8 or 4.
            smooth: see `QuantizedLinear`; the copy's own.

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
        made.bits, made.smooth = bits, smooth
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
        smooth = "" if self.smooth is None else ", smooth=True"
        return f"in_features={self.in_features}, out_features={out}, bias={bias}{smooth}"


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

    Raises:
        RuntimeError: off the CPU.
    """
    if x.device.type != "cpu":
        raise RuntimeError(
            f"int8 layers are for inference on a CPU, and their input is on {x.device}: call model.cpu(), or "
            "use a bfloat16 or float16 model there"
        )
    if torch.compiler.is_compiling():
        biased = with_bias and modules[0].bias is not None
        return linear_int8(x, *_joined(modules, biased), activation, None, gated, modules[0].smooth)
    dtype = x.dtype if x.dtype == torch.float64 else checks.autocast_dtype(x) or x.dtype
    how = with_bias, gated is not None
    weight, scale, bias, panels = int8_operands(x.device, dtype, owner, modules, *how)
    return linear_int8(x, weight, scale, bias, activation, panels, gated, modules[0].smooth)


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
    factors = [m.smooth for m in modules if m.smooth is not None]
    if len({m.bias is None for m in modules}) > 1 or len(factors) not in (0, len(modules)):
        return False
    if len(factors) < 2:
        return True
    if torch.compiler.is_compiling():
        return False

    def are_equal() -> bool:
        return all(torch.equal(factors[0], each) for each in factors[1:])

    return prepared.derived(modules[0], "equal factors", tuple(factors), are_equal)


def int8_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[QuantizedLinear], gated: bool = False
) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]] | None:
    """(weight, panels, scale, bias, smooth) of query, key and value as one product, and of each layer after.

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
        operands.append((weight, panels, scale, bias, together[0].smooth))
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


def in_config(config: Any) -> bool:
    """Whether a config marks its checkpoint as one with weights quantised by this package."""
    entry = config.get("quantization_config")
    return (
        isinstance(entry, dict)
        and entry.get("format") == CONFIG["format"]
        and entry.get("weights") in (None, *WEIGHTS.values())
        and entry.get("embeddings") in (None, *EMBEDDINGS.values())
    )


def kinds_of(model: nn.Module) -> tuple[str | None, str | None]:
    """What `quantize` has made of a model: (weights, embeddings), each "int8", "int4" or None."""
    bits: dict[type, int] = {type(m): m.bits for m in model.modules() if isinstance(m, _QUANTIZED)}
    weights, embeddings = (f"int{bits[kind]}" if kind in bits else None for kind in _QUANTIZED)
    return weights, embeddings


def num_weights(model: nn.Module, tables: bool = True) -> int:
    """The number of weights and biases in the quantised parts of `model`: buffers, not parameters.

    Args:
        tables: whether to count those of the table of words.
    """
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    words = [m for m in model.modules() if isinstance(m, _QUANTIZED[1])] if tables else []
    linear = sum(t.numel() for m in quantized for t in (m.weight, m.bias) if t is not None)
    return linear + sum(m.num_embeddings * m.embedding_dim for m in words)


def is_quantized(model: nn.Module) -> bool:
    """Whether any part of `model` holds integers as weights."""
    return any(isinstance(module, _QUANTIZED) for module in model.modules())


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise RuntimeError if the model is quantised. `what` names the call that would train it."""
    if is_quantized(model):
        raise RuntimeError(f"{what}: {type(model).__name__} {NO_TRAINING}")


def quantize(
    model: Any,
    weights: str | None = "int8",
    *,
    embeddings: str | None = None,
    smooth: float | None = None,
    calibrate: Calibration | None = None,
) -> Any:
    """Quantise the encoder layers' linear layers, the table of words or both in place, for a CPU.

    The model is put in eval mode, and its remaining parameters are frozen: gradients of a part of the model
    would look like gradients of the whole. A part that is quantised so already is not changed.

    Args:
        model: a model of this package on the CPU, with plain linear layers.
        weights: "int8"; "int4", which files store in 4 bits and which runs as int8; or None.
        embeddings: "int8", "int4" or None: the table of words, and a decoder that is tied to it.
        smooth: from 0 to 1, how much of the range of inputs moves into the weights (SmoothQuant's alpha, 0.5
            in the paper): outputs do not change but for rounding. None: nothing moves.
        calibrate: typical inputs for `smooth`, an iterable of dicts of the model's keyword arguments; or a
            function without arguments that runs the model on them.

    Returns:
        `model`.

    Raises:
        ValueError: an unknown value, or None for both; a model that is not on the CPU; a weight that is not
            finite; a part with other bits already; `smooth` outside 0 to 1, without weights, or only one of
            `smooth` and `calibrate`.
        TypeError: a linear layer is no plain nn.Linear (LoRA, parametrized, hooked), or the table no plain
            nn.Embedding. The message names it.

    A model that is refused is not changed.
    """
    check_kinds(weights, embeddings)
    if model.device.type != "cpu":
        hint = "load its weights first" if model.device.type == "meta" else "call model.cpu() first"
        raise ValueError(f"model: on {model.device}; int8 is for inference on a CPU: {hint}")
    _replace(model, weights, embeddings, factors_of(model, weights, smooth, calibrate))
    return model


def factors_of(
    model: Any, weights: str | None, smooth: float | None, calibrate: Calibration | None
) -> dict[str, Tensor]:
    """Name -> `smooth` of each linear layer; empty if nothing is smoothed. See `quantize`."""
    check_smooth(smooth, calibrate)
    if smooth is None or calibrate is None:
        return {}
    if weights is None:
        raise ValueError(f"smooth: expected None without weights, got {smooth!r}")
    found = list(each_linear(model))
    for _, _, module, name in found:
        check_plain(module, name)
    return smoothing(model, found, smooth, calibrate)


def check_kinds(weights: Any, embeddings: Any) -> None:
    """Raise ValueError unless `quantize` takes these arguments."""
    for name, value, known in (("weights", weights, WEIGHTS), ("embeddings", embeddings, EMBEDDINGS)):
        if value is not None and (not isinstance(value, str) or value not in known):
            raise ValueError(f"{name}: expected {', '.join(map(repr, known))} or None, got {value!r}")
    if weights is None and embeddings is None:
        raise ValueError("weights, embeddings: expected at least one, got None for both")


def prepare(model: Any, config: Any) -> None:
    """Put empty quantised parts into a model on the meta device, which then loads a quantised checkpoint.

    Args:
        config: the checkpoint's, which says what is quantised (`in_config`).
    """
    entry = config.get("quantization_config")
    weights, embeddings = (
        next((kind for kind, text in known.items() if text == entry.get(name)), None)
        for name, known in (("weights", WEIGHTS), ("embeddings", EMBEDDINGS))
    )
    _replace(model, weights, embeddings, {})
    if entry.get("smooth"):
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.smooth = torch.empty(
                    module.in_features, dtype=torch.float32, device=module.weight.device
                )


def _replace(model: Any, weights: str | None, embeddings: str | None, factors: Mapping[str, Tensor]) -> None:
    made = [] if weights is None else linears(model, weights, factors)
    table = None if embeddings is None else quantized_table.replacement(model, embeddings)
    for layer, path, module in made:
        attach(layer, path, module)
    if table is not None:
        quantized_table.put(model, table)
    prepared.clear(model)
    model.eval()
    model.requires_grad_(False)


def each_linear(model: Any) -> Iterator[tuple[nn.Module, str, Any, str]]:
    """(layer, path in the layer, linear layer, name in the model) of each linear layer that is quantised.

    Raises:
        TypeError: a layer has mathematics of its own.
    """
    names = {id(module): name for name, module in model.named_modules()}
    # A shared layer appears once
    for layer in {id(layer): layer for layer in model.base_model.layer_list()}.values():
        if not hasattr(layer, "form"):
            raise TypeError(f"{names[id(layer)]}: a {type(layer).__name__} has no int8 form")
        for path in layer.form.linears:
            yield layer, path, part(layer, path), f"{names[id(layer)]}.{path}"


def check_plain(module: nn.Module, name: str) -> None:
    """Raise TypeError unless the linear layer `name` is a plain nn.Linear."""
    if not is_plain(module, nn.Linear) or "forward" in vars(module):
        raise TypeError(
            f"{name}: expected a plain nn.Linear, got {type(module).__name__}"
            f"{'' if type(module) is not nn.Linear else ' with hooks'}: merge adapters, and remove "
            "hooks and parametrizations, before quantising"
        )


def linears(
    model: Any, weights: str, factors: Mapping[str, Tensor] | None = None
) -> list[tuple[nn.Module, str, QuantizedLinear]]:
    """(layer, path, what replaces the linear layer there) of all linear layers that are not quantised yet.

    Args:
        weights: "int8" or "int4".
        factors: name -> the layer's `smooth`.

    Raises:
        TypeError, ValueError: as `quantize`.
    """
    bits, made = {"int8": 8, "int4": 4}[weights], []
    for layer, path, module, name in each_linear(model):
        if not isinstance(module, QuantizedLinear):
            check_plain(module, name)
            own = QuantizedLinear.from_linear(module, name, bits, (factors or {}).get(name))
            made.append((layer, path, own))
        elif module.bits != bits:
            raise ValueError(
                f"weights: {name} has {module.bits} bits already, got {weights!r}; load the floating-point "
                "checkpoint and quantise that"
            )
    return made


# What `quantize` puts into a model: for weights, and for embeddings
_QUANTIZED = QuantizedLinear, quantized_table.QuantizedEmbedding
