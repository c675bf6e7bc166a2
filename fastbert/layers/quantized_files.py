"""What files hold of a quantised model beside its state: the entry of the config, and weights of 4 bits."""

from __future__ import annotations

from typing import TypeGuard

from torch import Tensor, nn

from fastbert.layers import int4, quantizing
from fastbert.layers.integers import IntegerWeight
from fastbert.layers.quantized import QuantizedLinear


def entry_of(model: nn.Module) -> dict[str, str] | None:
    """The entry of `model` in config.json; None if it is not quantised."""
    weights, embeddings = quantizing.kinds_of(model)
    if weights is None and embeddings is None:
        return None
    entry = dict(quantizing.CONFIG)
    if weights is None:
        del entry["weights"], entry["activations"]
    else:
        entry["weights"] = quantizing.WEIGHTS[weights]
        layers = (m for m in model.modules() if isinstance(m, QuantizedLinear))
        entry["activations"] = quantizing.ACTIVATIONS[next(layers).activations]
    if embeddings is not None:
        entry["embeddings"] = quantizing.EMBEDDINGS[embeddings]
    if any(isinstance(m, QuantizedLinear) and m.smooth is not None for m in model.modules()):
        entry["smooth"] = "one float32 factor per input"
    return entry


def holds_group(module: nn.Module) -> TypeGuard[QuantizedLinear]:
    """Whether files hold the weight of `module` in 4 bits."""
    return isinstance(module, QuantizedLinear) and module.bits == 4


def bytes_saved(model: nn.Module) -> int:
    """Bytes by which the files of `model` are smaller than its state."""
    few = filter(holds_group, model.modules())
    return sum(m.weight.nbytes - int4.bytes_of(*m.weight.shape) for m in few)


def as_stored(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's state as files hold it: a weight of 4 bits as `weight` and `group` (`int4.packed`).

    Raises:
        ValueError: a weight of 4 bits was replaced by other integers; the message names it.
    """
    stored = dict(state)
    for name, module in model.named_modules():
        if holds_group(module) and (key := f"{name}.weight") in state:
            try:
                stored[key], stored[f"{name}.group"] = int4.packed(state[key])
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
    return stored


def from_stored(module: IntegerWeight, weight: Tensor, group: Tensor) -> Tensor:
    """The weight of a layer of 4 bits, from what `as_stored` made of it.

    Raises:
        ValueError: `group` does not fit the layer or the weight.
    """
    if not holds_group(module):
        raise ValueError("expected no `group` of a layer that config quantization_config gives 8 bits")
    return int4.unpacked(weight, group, module.in_features)
