"""Cases of `cross_entropy`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from fastbert.ops.cross_entropy import cross_entropy, cross_entropy_ref
from fastbert.testing.error_rule import Case

IGNORE = -100


@dataclass(frozen=True, repr=False)
class CrossEntropyCase(Case):
    """(rows, classes) logits of standard deviation `scale`, a share of the rows labelled."""

    rows: int
    classes: int
    labelled: float = 1.0
    label_smoothing: float = 0.0
    scale: float = 2.0

    op = "cross_entropy"
    grad_inputs = ("logits",)
    output_names = ("loss",)

    @property
    def id(self) -> str:
        options = {"label_smoothing": "smoothing{:g}", "scale": "scale{:g}"}
        return self.named(f"{self.rows}x{self.classes}", labelled="labelled{:g}", **options)

    def inputs(self, dtype, device, seed=0):
        g = torch.Generator().manual_seed(seed)
        logits = self.scale * torch.randn(self.rows, self.classes, generator=g)
        labels = torch.randint(self.classes, (self.rows,), generator=g)
        labels[torch.randperm(self.rows, generator=g)[round(self.labelled * self.rows) :]] = IGNORE
        return {"logits": logits.to(dtype).to(device), "labels": labels.to(device)}

    def call(self, logits, labels):
        return cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=self.label_smoothing)

    def eager(self, logits, labels):
        if not (labels != IGNORE).any():
            return logits.sum() * 0  # PyTorch's own is NaN here
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, label_smoothing=self.label_smoothing)

    def oracle(self, logits, labels):
        return cross_entropy_ref(logits, labels, IGNORE, self.label_smoothing)

    def floor(self, inputs, name):
        eps = torch.finfo(inputs["logits"].dtype).eps
        count = max(1.0, self.labelled * self.rows)
        return 4 * eps / count if name == "dlogits" else eps * (1 + inputs["logits"].abs().max().item())

    def flops(self):
        return round(4 * self.labelled * self.rows * self.classes)

    def bytes(self, dtype):
        return round(self.labelled * self.rows) * self.classes * dtype.itemsize + 8 * self.rows


SMALL = [
    CrossEntropyCase(5, 40, labelled=0.6),
    CrossEntropyCase(3, 17, label_smoothing=0.1),
]
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
