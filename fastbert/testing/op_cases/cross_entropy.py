"""Cases of `cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.testing.error_rule import Case, Outputs, draws

# The ops' default
IGNORE = -100


def some_labels(g: torch.Generator, rows: int, classes: int, share: float) -> torch.Tensor:
    """Labels for a share of the rows, and `IGNORE` for the rest."""
    labels = torch.randint(classes, (rows,), generator=g)
    labels[torch.randperm(rows, generator=g)[round(share * rows) :]] = IGNORE
    return labels


def eager_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """PyTorch's loss, and 0 without labels, where PyTorch's own is NaN."""
    if not (labels != IGNORE).any():
        return logits.sum() * 0
    return F.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=smoothing)


@dataclass(frozen=True, repr=False)
class CrossEntropyCase(Case):
    """(rows, classes) logits of standard deviation `scale`, a share of the rows labelled."""

    rows: int
    classes: int
    labelled: float = 1.0
    label_smoothing: float = 0.0
    scale: float = 2.0

    op = "cross_entropy"
    shape = "{0.rows}x{0.classes}"
    marks = "labelled=labelled{:g} label_smoothing=smoothing{:g} scale=scale{:g}"
    options = ("label_smoothing",)
    grad_inputs = ("logits",)
    output_names = ("loss",)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)
        logits = randn(self.rows, self.classes, scale=self.scale)
        return {"logits": logits, "labels": some_labels(g, self.rows, self.classes, self.labelled).to(device)}

    def eager(self, logits: Tensor, labels: Tensor) -> Outputs:
        return eager_loss(logits, labels, self.label_smoothing)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        eps = torch.finfo(inputs["logits"].dtype).eps
        count = max(1.0, self.labelled * self.rows)
        return 4 * eps / count if name == "dlogits" else eps * (1 + inputs["logits"].abs().max().item())

    def flops(self) -> int:
        return round(4 * self.labelled * self.rows * self.classes)

    def bytes(self, dtype: torch.dtype) -> int:
        return round(self.labelled * self.rows) * self.classes * dtype.itemsize + 8 * self.rows


SMALL = [CrossEntropyCase(5, 40, labelled=0.6), CrossEntropyCase(3, 17, label_smoothing=0.1)]
ON_GPU = [CrossEntropyCase(6, 30522, labelled=0.5, label_smoothing=0.1)]  # several blocks per row
CASES = [
    *SMALL,
    CrossEntropyCase(1, 1),
    CrossEntropyCase(3, 1, label_smoothing=0.1),  # the share of the label and that of all classes make 1
    CrossEntropyCase(7, 2),  # NSP, answer spans
    CrossEntropyCase(4, 9, labelled=0.0),
    CrossEntropyCase(24, 30522, labelled=0.25),  # masked language model
    CrossEntropyCase(12, 2111, labelled=0.5, label_smoothing=0.1),
    CrossEntropyCase(9, 1000, scale=1e4),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [CrossEntropyCase(max(1, sum(lengths) * 15 // 100), 30522)]
