"""8-bit linear layers for inference on a CPU: `model.quantize("int8")`, `accelerate(model, dtype="int8")`.

Per output channel the weight is rounded to integers from -127 to 127 under a float32 scale, once. The rows it
is multiplied with are rounded to 8 bits as they come, each by its own range (fastbert/ops/linear_int8.py).

What is quantised: the six linear layers of every encoder layer, nearly all of a model's arithmetic. Not the
embeddings, which are looked up and multiply nothing, nor the pooler, ELECTRA's and ALBERT's projection and
the heads, which cost little and whose rounding nothing after them averages out. LayerNorm, softmax and the
residual sums stay in the model's dtype.

`quantize` puts `QuantizedLinear` in the place of a model's own linear layers. In an accelerated model of
transformers they stay, and their quantised copies (`copy_of`) are derived weights (prepared.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.modules import attach, is_plain, part
from fastbert.ops import checks
from fastbert.ops.linear_int8 import linear_int8, panel_maker
from fastbert.runtime import prepared

MODES = ("int8",)
# What config.json says of a quantised checkpoint. It has no `quant_method` on purpose: a method it does not
# know transformers skips with a warning, and takes the integers for weights; without one it raises.
CONFIG = {
    "format": "fastbert-int8",
    "weights": "int8, symmetric, one float32 scale an output channel",
    "activations": "8 bits, asymmetric, one range a token, dynamic",
}
_NO_TRAINING = (
    "is quantised to 8 bits, which have no gradient: it cannot be trained. Load the floating-point "
    "checkpoint, train that, and quantise it afterwards"
)


class QuantizedLinear(nn.Module):
    """nn.Linear with an 8-bit weight, for inference. Buffers, no parameters.

    Whatever dtype the module is moved to, `weight` stays int8 and `scale` float32; `bias` follows.

    Args:
        in_features, out_features: as nn.Linear.
        bias: whether there is one.
        dtype: of the bias.
        device: where to make the buffers.

    Attributes:
        weight: (out, in) int8, from -127 to 127.
        scale: (out,) float32, > 0; weight * scale is what was rounded.
        bias: (out,) or None.
    """

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
        self.training = False

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, name: str = "linear") -> QuantizedLinear:
        """The quantised copy of an nn.Linear: symmetric, scale = max |weight| / 127 of each output channel.

        A channel of zeros has scale 1. On the meta device the shapes alone are made.

        Args:
            linear: stays as it is.
            name: what errors call it.

        Raises:
            TypeError: `linear` is no nn.Linear of floating-point weights.
            ValueError: a weight or bias is NaN or infinite in float32.
        """
        if not isinstance(linear, nn.Linear) or linear.weight.dtype not in checks.FLOATS:
            kind = linear.weight.dtype if isinstance(linear, nn.Linear) else type(linear).__name__
            raise TypeError(f"{name}: expected an nn.Linear of floating-point weights, got {kind}")
        weight, bias = linear.weight, linear.bias
        out, width = weight.shape
        made = cls(width, out, bias is not None, dtype=weight.dtype, device=weight.device)
        if weight.is_meta:
            return made
        wide = weight.float()
        scale = wide.abs().amax(1) / wide.new_tensor(127.0)
        check_finite(scale, bias, name)  # one weight that is not finite makes its channel's scale the same
        scale.masked_fill_(scale < torch.finfo(torch.float32).tiny, 1.0)  # too small to divide by: zeros
        made.scale.copy_(scale)
        made.weight.copy_((wide / scale[:, None]).round_().clamp_(-127, 127))
        if bias is not None:
            made.bias.copy_(bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) of `x`'s dtype; see `fastbert.ops.linear_int8`."""
        return int8_product(x, self, [self])

    def dequantized(self) -> Tensor:
        """(out, in) float32: the weight that the integers stand for."""
        return self.weight.float() * self.scale[:, None]

    def train(self, mode: bool = True) -> QuantizedLinear:
        """Only `train(False)`, which changes nothing.

        Raises:
            RuntimeError: for `train()`.
        """
        if mode:
            raise RuntimeError(f"{type(self).__name__} {_NO_TRAINING}")
        return self

    def extra_repr(self) -> str:
        """Shown between the parentheses of `repr`."""
        out, bias = self.out_features, self.bias is not None
        return f"in_features={self.in_features}, out_features={out}, bias={bias}"

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """What is wrong with `tensor` as this module's buffer `name`, or None."""
        wanted = {"weight": torch.int8, "scale": torch.float32}.get(name)
        if wanted is None:
            return None
        if tensor.dtype != wanted or tensor.layout is not torch.strided:
            return f"dtype {tensor.dtype}; expected {wanted} of a weight quantised by fastbert"
        if tensor.is_meta or tensor.numel() == 0:
            return None
        low, high = torch.aminmax(tensor)
        if name == "weight" and low < -127:
            return "holds -128; expected integers from -127 to 127"
        if name == "scale" and not (low > 0 and torch.isfinite(high)):
            return "expected positive finite scales"
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
        if problems:  # copying would round floating-point weights to integers
            error_msgs += problems
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn, recurse=True):
        before = {name: self._buffers[name] for name in ("weight", "scale")}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if self._buffers[name].dtype != buffer.dtype:  # .half() and the like: move, keep the numbers
                self._buffers[name] = buffer.to(self._buffers[name].device)
        return self


@torch.no_grad()
def check_finite(weight: Tensor, bias: Tensor | None, name: str) -> None:
    """Raise ValueError where a linear layer's weight or bias is NaN or infinite in float32; `name` is the
    layer's.
    """
    for what, tensor in (("weight", weight.float()), ("bias", bias)):
        if tensor is not None and not torch.isfinite(tensor).all():
            raise ValueError(f"{name}.{what}: holds NaN or infinity; expected finite weights")


def copy_of(linear: nn.Linear, name: str = "linear") -> QuantizedLinear:
    """`QuantizedLinear.from_linear(linear, name)`, kept until the weight or the bias of `linear` changes."""
    sources = tuple(t for t in (linear.weight, linear.bias) if t is not None)
    return prepared.derived(linear, "int8 copy", sources, lambda: QuantizedLinear.from_linear(linear, name))


def int8_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[QuantizedLinear],
    activation: str | None = None,
    with_bias: bool = True,
) -> Tensor:
    """act(x @ [W1; W2; …].T + [b1; b2; …]) of quantised layers, as one product.

    Args:
        x: (..., in).
        owner: the module that what is derived from the weights belongs to.
        modules: all of them with a bias, or none.
        activation: as in `linear_int8`.
        with_bias: False leaves the biases out.

    Raises:
        RuntimeError: off the CPU.
    """
    if x.device.type != "cpu":
        raise RuntimeError(
            f"int8 layers are for inference on a CPU, and their input is on {x.device}: move the model back "
            "by model.cpu(), or use a bfloat16 or float16 model there"
        )
    if torch.compiler.is_compiling():
        biased = with_bias and modules[0].bias is not None
        return linear_int8(x, *_joined(modules, biased), activation)
    dtype = x.dtype if x.dtype == torch.float64 else checks.autocast_dtype(x) or x.dtype
    weight, scale, bias, panels = int8_operands(x.device, dtype, owner, modules, with_bias)
    return linear_int8(x, weight, scale, bias, activation, panels)


def int8_operands(
    device: torch.device,
    dtype: torch.dtype,
    owner: nn.Module,
    modules: list[QuantizedLinear],
    with_bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(weight, scale, bias, panels) of quantised layers as one, for `linear_int8` on rows of that dtype.

    Arguments as in `int8_product`; kept for `owner`. panels is None where the serving backend makes none.
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
        # kept for this backend alone: another one could not read them
        panels = prepared.derived(owner, ("int8 panels", make_panels), (weight,), lambda: make_panels(weight))
    return weight, scale, bias, panels


def int8_joins(x: Tensor, modules: list[QuantizedLinear]) -> bool:
    """Whether one product of all the modules is possible: then it is faster, as `x` is quantised once."""
    return len({m.bias is None for m in modules}) == 1


def int8_layer_operands(
    x: Tensor, owner: nn.Module, modules: list[QuantizedLinear]
) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor | None]] | None:
    """(weight, panels, scale, bias) of query, key and value as one product, and of the three that follow.

    Args:
        x: rows of the dtype and on the device that the layer runs in.
        owner: the module that what is derived from query, key and value belongs to.
        modules: query, key, value, attention output, intermediate, output.

    Returns:
        As above; None where query, key and value cannot be joined.
    """
    qkv, after = modules[:3], modules[3:]
    if not int8_joins(x, qkv):
        return None
    operands = []
    for whose, together in ((owner, qkv), *((m, [m]) for m in after)):
        weight, scale, bias, panels = int8_operands(x.device, x.dtype, whose, together)
        operands.append((weight, panels, scale, bias))
    return operands


def _joined(modules: list[QuantizedLinear], biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    if len(modules) == 1:
        return modules[0].weight, modules[0].scale, modules[0].bias if biased else None
    return (
        torch.cat([m.weight for m in modules]),
        torch.cat([m.scale for m in modules]),
        torch.cat([m.bias for m in modules]) if biased else None,
    )


def in_config(config: Any) -> bool:
    """Whether a config says that its checkpoint holds weights quantised here."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("format") == CONFIG["format"]


def num_weights(model: nn.Module) -> int:
    """How many weights and biases `model`'s 8-bit layers hold; its parameters do not count them."""
    quantized = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    return sum(t.numel() for m in quantized for t in (m.weight, m.bias) if t is not None)


def is_quantized(model: nn.Module) -> bool:
    """Whether any part of `model` holds 8-bit weights."""
    return any(isinstance(module, QuantizedLinear) for module in model.modules())


def check_trainable(model: nn.Module, what: str) -> None:
    """Raise RuntimeError if the model is quantised; `what` is the call that would train it."""
    if is_quantized(model):
        raise RuntimeError(f"{what}: {type(model).__name__} {_NO_TRAINING}")


def quantize(model: nn.Module, dtype: str = "int8") -> nn.Module:
    """Quantise the encoder layers' linear layers in place, for inference on a CPU.

    Puts the model in eval mode and freezes what is left of its parameters: gradients of parts of a model
    would look like those of the whole. A model that is quantised already stays as it is.

    Args:
        model: a model of this package, on the CPU, its linear layers plain ones.
        dtype: "int8".

    Returns:
        `model`.

    Raises:
        ValueError: an unknown dtype, a model elsewhere than on the CPU, or a weight that is not finite.
        TypeError: a linear layer is not the plain nn.Linear (LoRA, parametrized, hooked), by name. Nothing is
            changed then either.
    """
    _check_mode(dtype)
    if model.device.type != "cpu":
        hint = "load its weights first" if model.device.type == "meta" else "call model.cpu() first"
        raise ValueError(f"model: on {model.device}; int8 is for inference on a CPU: {hint}")
    _replace(model)
    return model


def prepare(model: nn.Module) -> None:
    """Put empty quantised layers into a model on the meta device, to load a quantised checkpoint into."""
    _replace(model)


def _check_mode(dtype: Any) -> None:
    if not isinstance(dtype, str) or dtype not in MODES:
        raise ValueError(f"dtype: expected {' or '.join(map(repr, MODES))}, got {dtype!r}")


def _replace(model: nn.Module) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    made: list[tuple[nn.Module, str, QuantizedLinear]] = []
    for layer in {id(layer): layer for layer in model.base_model.layers()}.values():  # shared ones once
        paths = layer.form.names
        for path in (
            paths.query,
            paths.key,
            paths.value,
            paths.attention_output,
            paths.intermediate,
            paths.output,
        ):
            module, name = part(layer, path), f"{names[id(layer)]}.{path}"
            if isinstance(module, QuantizedLinear):
                continue
            if not is_plain(module, nn.Linear) or "forward" in vars(module):
                raise TypeError(
                    f"{name}: expected a plain nn.Linear, got {type(module).__name__}"
                    f"{'' if type(module) is not nn.Linear else ' with hooks'}: merge adapters, and remove "
                    "hooks and parametrizations, before quantising"
                )
            made.append((layer, path, QuantizedLinear.from_linear(module, name)))
    for layer, path, module in made:
        attach(layer, path, module)
    prepared.clear(model)
    model.eval()
    model.requires_grad_(False)
