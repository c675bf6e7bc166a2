"""Cases of `linear_cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.testing.error_rule import Case, Outputs, draws
from fastbert.testing.op_cases.cross_entropy import eager_loss, some_labels


@dataclass(frozen=True, repr=False)
class LinearCrossEntropyCase(Case):
    """(rows, in_features) by (classes, in_features), a share of the rows labelled; `chunk_rows` at a time."""

    rows: int
    in_features: int
    classes: int
    labelled: float = 1.0
    label_smoothing: float = 0.0
    bias: bool = True
    chunk_rows: int | None = None

    op = "linear_cross_entropy"
    shape = "{0.rows}x{0.in_features}x{0.classes}"
    marks = "labelled=labelled{:g} label_smoothing=smoothing{:g} bias=no_bias chunk_rows=chunk{}"
    options = ("label_smoothing",)
    grad_inputs = ("x", "weight", "bias")
    output_names = ("loss",)

    @property
    def count(self) -> int:
        """How many rows are labelled; given to the op, which then waits for no GPU and can be captured."""
        return round(self.labelled * self.rows)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)
        labels = some_labels(g, self.rows, self.classes, self.labelled)
        return {
            "x": randn(self.rows, self.in_features),
            "weight": randn(self.classes, self.in_features, scale=2 * self.in_features**-0.5),
            "bias": randn(self.classes, scale=0.5) if self.bias else None,
            "labels": labels.to(device),
        }

    def call(self, x: Tensor, **inputs: Any) -> Outputs:
        chunk_bytes = self.chunk_rows and 2 * self.chunk_rows * self.classes * x.element_size()
        return super().call(x=x, **inputs, labelled=self.count, chunk_bytes=chunk_bytes)

    def eager(self, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Outputs:
        logits = F.linear(x, weight, bias)
        logits = logits.float() if logits.dtype != torch.float64 else logits  # as transformers has it
        return eager_loss(logits, labels, self.label_smoothing)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """What an error of some eps in each logit's products does to the loss and through softmax."""
        x, weight = inputs["x"], inputs["weight"]
        eps = torch.finfo(x.dtype).eps
        logit = 1 + (x.norm(dim=1).max() * weight.norm(dim=1).max()).item()
        count = max(1, self.count)
        size = {"dx": weight.abs().max().item() / count, "dweight": x.abs().max().item()}.get(name, 1.0)
        return eps * logit * size

    def flops(self) -> int:
        return 2 * self.count * self.in_features * self.classes

    def bytes(self, dtype: torch.dtype) -> int:
        elements = self.count * self.in_features + self.classes * self.in_features
        return (elements + self.classes * self.bias) * dtype.itemsize + 8 * self.rows


SMALL = [
    LinearCrossEntropyCase(5, 24, 40, labelled=0.6),
    LinearCrossEntropyCase(7, 17, 9, label_smoothing=0.1, bias=False, chunk_rows=3),
]
ON_GPU = [LinearCrossEntropyCase(300, 128, 30522, labelled=0.5, chunk_rows=64)]
CASES = [
    *SMALL,
    LinearCrossEntropyCase(1, 1, 1),
    LinearCrossEntropyCase(7, 16, 2, bias=False),
    LinearCrossEntropyCase(4, 8, 9, labelled=0.0),
    LinearCrossEntropyCase(24, 64, 30522, labelled=0.25),  # masked language model
    LinearCrossEntropyCase(130, 96, 211, labelled=0.7, chunk_rows=20),
    LinearCrossEntropyCase(40, 128, 1000, label_smoothing=0.1, chunk_rows=40),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [LinearCrossEntropyCase(max(1, sum(lengths) * 15 // 100), 768, 30522)]
