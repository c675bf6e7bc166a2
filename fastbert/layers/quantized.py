"""8-bit linear layers for inference on a CPU: `model.quantize("int8")`, `accelerate(model, dtype="int8")`.

A weight is rounded once, to integers from -127 to 127, with one float32 scale per output channel. The input
is rounded in each call, every row to 8 bits by the row's own range (fastbert/ops/linear_int8.py).

The linear layers of every encoder layer are quantised, which do nearly all of a model's arithmetic. The
embeddings are not, because they multiply nothing. Neither are the pooler, the projection of ELECTRA and
ALBERT and the heads: they cost little, and no later layer averages their rounding out. LayerNorm, softmax and
the residual sums stay in the model's dtype.

`quantize` replaces a model's own linear layers by `QuantizedLinear`. An accelerated model of transformers
keeps them, and their quantised copies (`copy_of`) are derived weights (runtime/prepared.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.modules import attach, is_plain, part
from fastbert.layers.smoothing import Calibration, check_smooth, smoothing
from fastbert.ops import checks
from fastbert.ops.linear_int8 import linear_int8, panel_maker
from fastbert.runtime import prepared

MODES = ("int8",)
# The entry of a quantised checkpoint in config.json. It has no `quant_method` on purpose. Without one
# transformers raises; an unknown one it skips with a warning, and loads the integers as weights.
CONFIG = {
    "format": "fastbert-int8",
    "weights": "int8, symmetric, one float32 scale per output channel",
    "activations": "8 bits, asymmetric, one range per token, dynamic",
}
_NO_TRAINING = (
    "is quantised to 8 bits, which have no gradient: it cannot be trained. Load the floating-point "
    "checkpoint, train that, and quantise it afterwards"
)


class QuantizedLinear(nn.Module):
    """nn.Linear with an 8-bit weight, for inference. It has buffers and no parameters.

    `weight` stays int8 and `scale` float32, whatever dtype the module is moved to; `bias` takes that dtype.

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
    """

    weight: Tensor
    scale: Tensor
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
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer(
            "weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        )
        self.register_buffer("scale", torch.ones(out_features, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("smooth", None)
        self.training = False

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Module, name: str = "linear", smooth: Tensor | None = None
    ) -> QuantizedLinear:
        """The quantised copy of an nn.Linear: symmetric, with scale = max |weight| / 127 per output channel.

        A channel of zeros has scale 1. A copy of a layer on the meta device has the shapes and no values.

        Args:
            linear: an nn.Linear, which is not changed.
            name: the layer's name in errors.
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
        made.smooth = smooth
        if weight.is_meta or weight.numel() == 0:
            if made.bias is not None and not made.bias.is_meta:
                check_finite(weight, bias, name)
                made.bias.copy_(bias)
            return made
        integers, scale = rounded_channels(weight if smooth is None else weight.float() / smooth)
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

    @prepared.plain_train
    def train(self, mode: bool = True) -> QuantizedLinear:
        """Accept `train(False)`, which changes nothing.

        Raises:
            RuntimeError: for training mode.
        """
        if mode:
            raise RuntimeError(f"{type(self).__name__} {_NO_TRAINING}")
        return self

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        out, bias = self.out_features, self.bias is not None
        smooth = "" if self.smooth is None else ", smooth=True"
        return f"in_features={self.in_features}, out_features={out}, bias={bias}{smooth}"

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """What is wrong with `tensor` as this module's buffer `name`, or None."""
        wanted = {"weight": torch.int8, "scale": torch.float32, "smooth": torch.float32}.get(name)
        if wanted is None:
            return None
        if tensor.dtype != wanted or tensor.layout is not torch.strided:
            return f"dtype {tensor.dtype}; expected {wanted} of a weight quantised by fastbert"
        if tensor.is_meta or tensor.numel() == 0:
            return None
        low, high = torch.aminmax(tensor)
        if name == "weight" and low < -127:
            return "holds -128; expected integers from -127 to 127"
        if name != "weight" and not (low > 0 and torch.isfinite(high)):
            return f"expected positive finite {'scales' if name == 'scale' else 'factors'}"
        return None

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        problems = [
            f"{prefix}{name}: {problem}"
            for name in self._buffers
            if isinstance(tensor := state_dict.get(prefix + name), Tensor)
            and (problem := self.problem(name, tensor))
        ]
        # Copying would round floating-point weights to integers
        if problems:
            error_msgs += problems
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn, recurse=True):
        kept = [(name, t) for name, t in self._buffers.items() if name != "bias" and t is not None]
        super()._apply(fn, recurse)
        # `.half()` and its kin move these buffers and keep their dtype
        for name, before in kept:
            if (now := getattr(self, name)).dtype != before.dtype:
                self._buffers[name] = before.to(now.device)
        return self


def symmetric_steps(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """(integers from -most to most, scale (…, 1)), both float32: `x` in equal steps along its last dimension.

    scale is max |x| / most, or 1 where that is not a normal float32: such small values become zeros.
    """
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / wide.new_tensor(float(most))
    scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 1.0)
    return (wide / scale).round_().clamp_(-most, most), scale


def rounded_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(weight (out, in) int8 from -127 to 127, scale (out,) float32) of a floating-point weight."""
    integers, scale = symmetric_steps(weight, 127)
    return integers.to(torch.int8), scale.squeeze(1)


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


def in_config(config: Any) -> bool:
    """Whether a config marks its checkpoint as one with weights quantised by this package."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("format") == CONFIG["format"]


def num_weights(model: nn.Module) -> int:
    """The number of weights and biases in the 8-bit layers of `model`: buffers, not parameters."""
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    return sum(t.numel() for m in quantized for t in (m.weight, m.bias) if t is not None)


def is_quantized(model: nn.Module) -> bool:
    """Whether any part of `model` holds 8-bit weights."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise RuntimeError if the model is quantised. `what` names the call that would train it."""
    if is_quantized(model):
        raise RuntimeError(f"{what}: {type(model).__name__} {_NO_TRAINING}")


def quantize(
    model: Any, dtype: str = "int8", *, smooth: float | None = None, calibrate: Calibration | None = None
) -> Any:
    """Quantise the encoder layers' linear layers in place, for inference on a CPU.

    The model is put in eval mode, and its remaining parameters are frozen: gradients of a part of the model
    would look like gradients of the whole. A model that is quantised already is not changed.

    Args:
        model: a model of this package on the CPU, with plain linear layers.
        dtype: "int8".
        smooth: from 0 to 1, how much of the range of inputs moves into the weights (SmoothQuant's alpha, 0.5
            in the paper): outputs do not change but for rounding. None: nothing moves.
        calibrate: typical inputs for `smooth`, an iterable of dicts of the model's keyword arguments; or a
            function without arguments that runs the model on them.

    Returns:
        `model`.

    Raises:
        ValueError: an unknown dtype, a model that is not on the CPU, a weight that is not finite, `smooth`
            outside 0 to 1, or only one of `smooth` and `calibrate`.
        TypeError: a linear layer is no plain nn.Linear (LoRA, parametrized, hooked). The message names it.

    A model that is refused is not changed.
    """
    _check_mode(dtype)
    if model.device.type != "cpu":
        hint = "load its weights first" if model.device.type == "meta" else "call model.cpu() first"
        raise ValueError(f"model: on {model.device}; int8 is for inference on a CPU: {hint}")
    check_smooth(smooth, calibrate)
    factors = {}
    if smooth is not None and calibrate is not None:
        linears = list(each_linear(model))
        for _, _, module, name in linears:
            check_plain(module, name)
        factors = smoothing(model, linears, smooth, calibrate)
    _replace(model, factors)
    return model


def prepare(model: Any, config: Any) -> None:
    """Put empty quantised layers into a model on the meta device, which then loads a quantised checkpoint.

    Args:
        config: the checkpoint's.
    """
    _replace(model, {})
    if config.get("quantization_config").get("smooth"):
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.smooth = torch.empty(
                    module.in_features, dtype=torch.float32, device=module.weight.device
                )


def entry_of(model: nn.Module) -> dict[str, str]:
    """The entry of a quantised model in config.json."""
    smooth = any(isinstance(m, QuantizedLinear) and m.smooth is not None for m in model.modules())
    return {**CONFIG, "smooth": "one float32 factor per input"} if smooth else dict(CONFIG)


def _check_mode(dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in MODES:
        raise ValueError(f"dtype: expected {' or '.join(map(repr, MODES))}, got {dtype!r}")


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


def _replace(model: Any, factors: Mapping[str, Tensor]) -> None:
    made: list[tuple[nn.Module, str, QuantizedLinear]] = []
    for layer, path, module, name in each_linear(model):
        if isinstance(module, QuantizedLinear):
            continue
        check_plain(module, name)
        made.append((layer, path, QuantizedLinear.from_linear(module, name, factors.get(name))))
    for layer, path, module in made:
        attach(layer, path, module)
    prepared.clear(model)
    model.eval()
    model.requires_grad_(False)
