"""Cases of `linear_distillation`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.testing.error_rule import Case, Outputs, draws


@dataclass(frozen=True, repr=False)
class LinearDistillationCase(Case):
    """(rows, in_features) by (classes, in_features), the teacher's width another; `chunk_rows` at a time."""

    rows: int
    in_features: int
    classes: int
    teacher_features: int = 20
    temperature: float = 2.0
    bias: bool = True
    chunk_rows: int | None = None

    op = "linear_distillation"
    shape = "{0.rows}x{0.in_features}x{0.classes}"
    marks = "teacher_features=teacher{} temperature=temperature{:g} bias=no_bias chunk_rows=chunk{}"
    options = ("temperature",)
    grad_inputs = ("x", "weight", "bias")
    output_names = ("loss",)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        found = {}
        for name, width in (("", self.in_features), ("teacher_", self.teacher_features)):
            found[f"{name}x"] = randn(self.rows, width)
            found[f"{name}weight"] = randn(self.classes, width, scale=2 * width**-0.5)
            found[f"{name}bias"] = randn(self.classes, scale=0.5) if self.bias else None
        return found

    def call(self, x: Tensor, **inputs: Any) -> Outputs:
        chunk_bytes = self.chunk_rows and 3 * self.chunk_rows * self.classes * x.element_size()
        return super().call(x=x, **inputs, chunk_bytes=chunk_bytes)

    def eager(self, **inputs: Any) -> Outputs:
        both = (F.linear(*(inputs[f"{of}{n}"] for n in ("x", "weight", "bias"))) for of in ("", "teacher_"))
        log_q, log_p = (
            F.log_softmax((t if t.dtype == torch.float64 else t.float()) / self.temperature, 1) for t in both
        )
        return self.temperature**2 * F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """What an error of some eps in each logit's products does to the loss and through softmax."""
        x, weight = inputs["x"], inputs["weight"]
        eps = torch.finfo(x.dtype).eps
        pairs = ((inputs[f"{of}x"], inputs[f"{of}weight"]) for of in ("", "teacher_"))
        logit = 1 + sum((a.norm(dim=1).max() * w.norm(dim=1).max()).item() for a, w in pairs)
        size = {"dx": weight.abs().max().item() / self.rows, "dweight": x.abs().max().item()}.get(name, 1.0)
        return eps * logit * size * self.temperature

    def flops(self) -> int:
        return 2 * self.rows * (self.in_features + self.teacher_features) * self.classes

    def bytes(self, dtype: torch.dtype) -> int:
        width = self.in_features + self.teacher_features
        return ((self.rows + self.classes) * width + 2 * self.classes * self.bias) * dtype.itemsize


SMALL = [
    LinearDistillationCase(5, 24, 40),
    LinearDistillationCase(7, 17, 9, temperature=1.0, bias=False, chunk_rows=3),
]
ON_GPU = [LinearDistillationCase(150, 128, 30522, 256, chunk_rows=64)]
CASES = [
    *SMALL,
    LinearDistillationCase(1, 1, 1),
    LinearDistillationCase(7, 16, 2, temperature=10.0, bias=False),
    LinearDistillationCase(6, 64, 30522, 96),  # masked language model
    LinearDistillationCase(130, 96, 211, 128, chunk_rows=20),
    LinearDistillationCase(40, 128, 1000, 24, temperature=0.5, chunk_rows=40),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [LinearDistillationCase(max(1, sum(lengths) * 15 // 100), 768, 30522, 768)]  # as DistilBERT
