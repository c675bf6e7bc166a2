"""SmoothQuant: inputs of uneven columns are evened out before they are rounded to 8 bits.

    s_j = max |x_j|^alpha / max_i |w_ij|^(1 - alpha)        per input j of a linear layer
    y = (x / s) (W diag(s))ᵀ + b                            = x Wᵀ + b

max |x_j| is over typical inputs (calibration), max |w_ij| over all linear layers that read the same input,
which so have the same factors. x / s is computed where rows are rounded (`smooth` of the op `linear_int8`),
not by the norm before it: after BERT's norms the same numbers are the residual too.

Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", eq. 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.modules import attach, take_over

# Keyword arguments of the model, call by call; or what calls it
Calibration = Iterable[Mapping[str, Any]] | Callable[[], Any]
# (layer, path in the layer, linear layer, name in the model)
Linears = Sequence[tuple[nn.Module, str, nn.Linear, str]]
MOST = 2.0**16  # the largest s, and 1 / the smallest


class _Observed(nn.Linear):
    """nn.Linear that remembers the least and the largest x of each input and 0, over all calls."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        take_over(self, linear)
        self.ends = torch.zeros(2, linear.in_features, device=linear.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        """As nn.Linear."""
        rows = input.detach().flatten(0, -2).float()
        self.ends = torch.stack(torch.aminmax(torch.cat((self.ends, rows)), dim=0))
        return super().forward(input)


def check_calibration(activations: str, smooth: Any, calibrate: Any) -> None:
    """Raise ValueError unless `smooth` is None or from 0 to 1, and `calibrate` is given if it is needed."""
    number = isinstance(smooth, (int, float)) and not isinstance(smooth, bool)
    if smooth is not None and not (number and 0 <= smooth <= 1):
        raise ValueError(f"smooth: expected None or a number from 0 to 1, got {smooth!r}")
    if smooth is not None and activations == "float":
        raise ValueError(f"smooth: expected None with activations='float', got {smooth!r}")
    if calibrate is None and (smooth is not None or activations == "static"):
        what = "smooth" if smooth is not None else "activations='static'"
        raise ValueError(f"calibrate: expected typical inputs with {what}, got None")
    if calibrate is not None and smooth is None and activations != "static":
        raise ValueError("calibrate: expected None without smooth or activations='static'")


@torch.no_grad()
def ranges(model: nn.Module, linears: Linears, calibrate: Calibration) -> dict[str, Tensor]:
    """Name -> (2, in) float32, the least and the largest of 0 and each input of a linear layer.

    Args:
        model: a model of this package; it runs in eval mode, and is as before afterwards.
        linears: plain nn.Linear layers.
        calibrate: see `quantize`.

    Raises:
        TypeError, ValueError: naming the argument: there are no inputs, or they make some that are not
            finite.
    """
    modes = [(module, module.training) for module in model.modules()]
    observed = {name: _Observed(module) for _, _, module, name in linears}
    try:
        for layer, path, _, name in linears:
            attach(layer, path, observed[name])
        model.eval()
        if callable(calibrate):
            calibrate()
        else:
            for inputs in calibrate:
                if not isinstance(inputs, Mapping):
                    raise TypeError(f"calibrate: expected dicts of inputs, got {type(inputs).__name__}")
                model(**inputs)
    finally:
        for layer, path, module, _ in linears:
            attach(layer, path, module)
        for module, training in modes:
            module.training = training
    found = {name: module.ends for name, module in observed.items()}
    if linears and not any(ends.any() for ends in found.values()):
        raise ValueError("calibrate: expected at least one input of the model")
    for name, ends in found.items():
        if not torch.isfinite(ends).all():
            raise ValueError(f"calibrate: expected finite inputs of {name}")
    return found


@torch.no_grad()
def smoothing(found: Mapping[str, Tensor], linears: Linears, alpha: float) -> dict[str, Tensor]:
    """Name -> (in,) float32: 1 / s for each linear layer, as `QuantizedLinear.smooth` has it.

    `found` is what `ranges` returned for `linears`. Layers read the same input if its max |x_j| are equal to
    the bit. An input that is always 0, or that no weight reads, has s = 1.
    """
    together = {}
    for layer, _, module, name in linears:
        # A shared layer's ends may differ, as it may end with queries of first tokens alone
        key = id(layer), found[name].abs().amax(0).cpu().numpy().tobytes()
        together.setdefault(key, []).append((name, module.weight))
    factors = {}
    for members in together.values():
        largest = found[members[0][0]].double().abs().amax(0)
        zeros = members[0][1].new_zeros(1, len(largest))
        weights = torch.cat([zeros, *(weight for _, weight in members)]).double().abs().amax(0)
        s = (largest**alpha / weights ** (1 - alpha)).clamp(1 / MOST, MOST)
        s = torch.where((largest > 0) & (weights > 0), s, 1.0)
        factors |= {name: s.reciprocal().float() for name, _ in members}
    return factors
