"""Linear layers on 8-bit floats for inference on a GPU: `model.quantize("fp8")`.

A weight is rounded once, to E4M3 with one float32 scale per output channel; the input in each call, each row
by its own scale (fastbert/ops/linear_fp8.py). What is quantised, and what is not: see `quantized.py`.

It needs a GPU of compute capability 9.0, whose products take a scale per row, and a model in bfloat16, in
which they are stored. 8-bit integers are slower than bfloat16 on such a GPU (docs/notes/torch.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.modules import attach
from fastbert.layers.quantized import QuantizedLinear, check_finite
from fastbert.layers.quantizing import check_plain, each_linear
from fastbert.ops import checks
from fastbert.ops.linear_fp8 import FP8, linear_fp8, rounded_rows
from fastbert.runtime import prepared

# The entry of a checkpoint in config.json; see `quantizing.CONFIG`
CONFIG = {
    "format": "fastbert-fp8",
    "weights": "float8_e4m3fn, one float32 scale per output channel",
    "activations": "float8_e4m3fn, one scale per token, dynamic",
}
CAPABILITY = (9, 0)


class Float8Linear(QuantizedLinear):
    """nn.Linear with a weight of 8-bit floats, for inference; see `QuantizedLinear`.

    Attributes:
        weight: (out, in) float8_e4m3fn.
        scale: (out,) float32; weight * scale is the floating-point weight, rounded.
        bias: (out,) or None.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **factory: Any) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.weight = torch.zeros(out_features, in_features, dtype=FP8, device=self.scale.device)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, name: str = "linear") -> Float8Linear:
        """The quantised copy of a plain nn.Linear; on the meta device without values.

        Args:
            linear: is not changed.
            name: the layer's name in errors.

        Raises:
            ValueError: a weight or bias is NaN or infinite in float32.
        """
        weight, bias = linear.weight, linear.bias
        out, width = weight.shape
        made = cls(width, out, bias is not None, dtype=weight.dtype, device=weight.device)
        if weight.is_meta:
            return made
        check_finite(weight, bias, name)
        if weight.numel():
            made.weight, scale = rounded_rows(weight)
            made.scale.copy_(scale.flatten())
        if made.bias is not None:
            made.bias.copy_(bias)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out) in `x`'s dtype; see `fastbert.ops.linear_fp8`."""
        return fp8_product(x, self, [self])

    def problem(self, name: str, tensor: Tensor) -> str | None:
        """What is wrong with `tensor` as this module's buffer `name`, or None."""
        if name != "weight":
            return super().problem(name, tensor)
        if tensor.dtype != FP8 or tensor.layout is not torch.strided:
            return f"dtype {tensor.dtype}; expected {FP8} of a weight quantised by fastbert"
        finite = tensor.is_meta or bool(torch.isfinite(tensor.float()).all())
        return None if finite else "holds NaN; expected finite weights"


def fp8_product(
    x: Tensor,
    owner: nn.Module,
    modules: list[Float8Linear],
    activation: str | None = None,
    with_bias: bool = True,
    gated: str | None = None,
    input_activation: str | None = None,
) -> Tensor:
    """act(x @ [W1; W2; …].T + [b1; b2; …]) as one product; see `LinearKind`.

    `input_activation` activates x, in the pass that rounds its rows.
    """
    biased = with_bias and modules[0].bias is not None

    def joined() -> tuple[Tensor, Tensor, Tensor | None]:
        # As bytes, because not every device joins float8
        weight = torch.cat([m.weight.view(torch.uint8) for m in modules]).view(FP8)
        bias = torch.cat([m.bias for m in modules if m.bias is not None]) if biased else None
        return weight, torch.cat([m.scale for m in modules]), bias

    if len(modules) == 1:
        (module,) = modules
        operands = module.weight, module.scale, module.bias if biased else None
    elif torch.compiler.is_compiling():
        operands = joined()
    else:
        sources = tuple(t for m in modules for t in (m.weight, m.scale, m.bias) if t is not None)
        operands = prepared.derived(owner, ("fp8", biased), sources, joined)
    return linear_fp8(x, *operands, activation, gated, input_activation)


def fp8_joins(x: Tensor, modules: list[Float8Linear]) -> bool:
    """See `LinearKind`: rows are rounded once for all."""
    return len({m.bias is None for m in modules}) == 1


def no_layer_operands(x: Tensor, owner: nn.Module, modules: list[Any], gated: bool = False) -> None:
    """See `LinearKind`: no backend computes a whole layer."""


def gap(device: torch.device) -> str | None:
    """Why 8-bit floats do not pay on a device; None if they do."""
    if device.type != "cuda":
        return f"on {device}"
    own = torch.cuda.get_device_capability(device)
    return None if own >= CAPABILITY else f"on {device} with compute capability {own[0]}.{own[1]}"


def check_place(what: str, device: torch.device) -> None:
    """Raise ValueError, which begins with `what`, unless 8-bit floats run on the device."""
    if (reason := gap(device)) is not None:
        raise ValueError(f"{what}: {reason}; fp8 needs a GPU of compute capability 9.0 or above")


def check_alone(activations: str = "dynamic", **given: Any) -> None:
    """Raise ValueError, which names the first argument that is not its default: fp8 takes none of them."""
    if activations != "dynamic":
        raise ValueError(f"activations: expected 'dynamic' with fp8, got {activations!r}")
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with fp8, got {value!r}")


def quantize(model: Any) -> Any:
    """Quantise the encoder layers' linear layers to 8-bit floats in place, for inference on a GPU.

    The model is put in eval mode and frozen, as by `quantizing.quantize`.

    Args:
        model: a model of this package in bfloat16 on a GPU of compute capability 9.0, with plain linear
            layers. One that is quantised already is not changed.

    Returns:
        `model`.

    Raises:
        ValueError: another device or dtype, or a weight that is not finite.
        TypeError: a linear layer is no plain nn.Linear. The message names it.
    """
    check_place("model", model.device)
    if model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise ValueError(f"model: expected bfloat16 for fp8, got {dtype}: call model.bfloat16() first")
    return prepare(model)


def linears(model: Any) -> list[tuple[nn.Module, str, Float8Linear]]:
    """(layer, path, what replaces the linear layer there) of all linear layers that are not quantised yet.

    Raises:
        TypeError, ValueError: as `quantize`.
    """
    made = []
    for layer, path, module, name in each_linear(model):
        if type(module) is not Float8Linear:
            check_plain(module, name)
            checks.float_tensor(f"{name}.weight", module.weight)
            made.append((layer, path, Float8Linear.from_linear(module, name)))
    return made


def prepare(model: Any) -> Any:
    """Replace the linear layers on any device, where they compute in PyTorch's plain arithmetic.

    For reports and files, and for a model on the meta device, which then loads a quantised checkpoint.
    """
    for layer, path, module in linears(model):
        attach(layer, path, module)
    prepared.clear(model)
    return model.eval().requires_grad_(False)


def in_config(config: Any) -> bool:
    """Whether a config marks its checkpoint as one of 8-bit floats."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("format") == CONFIG["format"]


def entry_of(model: nn.Module) -> dict[str, str] | None:
    """The entry of the model in config.json; None if it has no 8-bit floats."""
    return dict(CONFIG) if any(type(m) is Float8Linear for m in model.modules()) else None
