r"""What 8 or 4 bits do to each layer: a report, before anything is quantised.

    SQNR = 10 log10(Σ x² / Σ (x - x̂)²) in dB, of a weight or a layer's outputs; x̂ is what the bits make of x
    outliers = max_j m_j / median_j m_j,  m_j = max over tokens of |x_j|, of a layer's inputs x

6 dB are one bit. The outputs' SQNR compares one layer on the inputs that it has in the float model, so the
errors of the layers before it are not in it. Outliers widen the range in which a token is rounded.

Source: Bondarenko, Nagel and Blankevoort 2021, "Understanding and Overcoming the Challenges of Efficient
Transformer Quantization", sec. 3 (outliers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastbert.compression.shrink import name_of
from fastbert.layers import float8, quantized, quantized_table, quantizing
from fastbert.layers.modules import part
from fastbert.layers.smoothing import Calibration
from fastbert.models.base import PreTrainedModel


class QuantizedLayer(NamedTuple):
    """One weight in the report.

    Attributes:
        name: the module's name in the model.
        weight_sqnr: of its weight, in dB; infinite if nothing is lost.
        output_sqnr: of its outputs, in dB; None for a table, or without `run`.
        outliers: of its inputs; None for a table, or without `run`.
    """

    name: str
    weight_sqnr: float
    output_sqnr: float | None = None
    outliers: float | None = None


def quantization_report(
    model: PreTrainedModel,
    weights: str | None = "int8",
    *,
    embeddings: str | None = None,
    activations: str = "dynamic",
    smooth: float | None = None,
    calibrate: Calibration | None = None,
    run: Callable[[], object] | None = None,
) -> list[QuantizedLayer]:
    """What `model.quantize` with the same arguments would do to each weight.

    Args:
        model: a floating-point model of this package on the CPU. It is not changed.
        weights, embeddings, activations, smooth, calibrate: as in `quantize`. "fp8" is computed in PyTorch's
            plain arithmetic, so it needs no GPU.
        run: calls the model on texts, such as `lambda: encoder.encode(texts)`; None reports weights alone.

    Returns:
        One `QuantizedLayer` per linear layer that has weights, in the model's order, and one for the table
        of words.

    Raises:
        TypeError, ValueError: as `quantize`; or `run` did not call a layer.
    """
    if weights == "fp8":
        float8.check_alone(activations, embeddings=embeddings, smooth=smooth, calibrate=calibrate)
    else:
        quantizing.check_kinds(weights, embeddings, activations)
    if quantized.is_quantized(model):
        raise ValueError("model: is quantised already; expected a floating-point one")
    if weights == "fp8":
        return _rows(model, float8.linears(model), run)
    calibration = quantizing.calibrated(model, weights, activations, smooth, calibrate)
    rows: list[QuantizedLayer] = []
    if embeddings is not None and (made := quantized_table.replacement(model, embeddings)) is not None:
        table = quantized_table.table_of(model)
        rows.append(QuantizedLayer(name_of(model, table), _decibels(table.weight, made.dequantized())))
    if weights is None:
        return rows
    return rows + _rows(model, quantizing.linears(model, weights, activations, calibration), run)


def _rows(
    model: PreTrainedModel,
    found: Sequence[tuple[nn.Module, str, quantized.QuantizedLinear]],
    run: Callable[[], object] | None,
) -> list[QuantizedLayer]:
    """One row per linear layer."""
    rows: list[QuantizedLayer] = []
    watches = [_Watch(part(layer, path), made) for layer, path, made in found if made.weight.numel()]
    if run is not None:
        _call(run, watches)
    for watch in watches:
        name, weight = name_of(model, watch.linear), watch.linear.weight
        if run is not None and not watch.signal:
            raise ValueError(f"run: did not call {name} on any values")
        more = () if run is None else (_ratio(watch.signal, watch.noise), watch.outliers())
        rows.append(QuantizedLayer(name, _decibels(weight, watch.made.dequantized()), *more))
    return rows


class _Watch:
    """The sums of one linear layer over all its calls."""

    def __init__(self, linear: Any, made: quantized.QuantizedLinear):
        self.linear, self.made = linear, made
        self.signal = self.noise = 0.0
        self.most = torch.zeros(linear.in_features)

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach()
        y = F.linear(x, self.linear.weight, self.linear.bias).double()
        self.signal += y.square().sum().item()
        self.noise += (y - self.made(x)).square().sum().item()
        self.most = torch.maximum(self.most, x.abs().flatten(0, -2).amax(0).float())

    def outliers(self) -> float:
        """The largest input over the median one; infinite if most inputs are always 0."""
        median = self.most.median().item()
        return self.most.max().item() / median if median else math.inf


@torch.no_grad()
def _call(run: Callable[[], object], watches: list[_Watch]) -> None:
    hooks = [watch.linear.register_forward_pre_hook(watch) for watch in watches]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()


def _decibels(weight: Tensor, rounded: Tensor) -> float:
    wide = weight.detach().double()
    return _ratio(wide.square().sum().item(), (wide - rounded).square().sum().item())


def _ratio(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if signal and noise else math.inf
