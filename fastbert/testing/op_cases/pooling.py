"""Cases of `pooling`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.pooling import MODES
from fastbert.testing.error_rule import Case, Outputs, draws, ends_of


@dataclass(frozen=True, repr=False)
class PoolingCase(Case):
    """Packed sequences of `lengths` tokens of `width` numbers, and `tail` rows of NaN behind them."""

    lengths: tuple[int, ...]
    mode: str = "mean"
    width: int = 32
    tail: int = 0

    op = "pooling"
    marks = "tail=tail{}"
    options = ("mode",)
    grad_inputs = ("hidden",)

    @property
    def shape(self) -> str:
        numbers = len(self.lengths), max(self.lengths), self.width
        return f"{'x'.join(map(str, numbers))}-total{sum(self.lengths)}-{self.mode}"

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        hidden = randn(sum(self.lengths) + self.tail, self.width)
        hidden[sum(self.lengths) :] = torch.nan
        return {"hidden": hidden, "cu_seqlens": ends_of(self.lengths, device)}

    def eager(self, hidden: Tensor, cu_seqlens: Tensor) -> Outputs:
        rows = []
        for tokens in hidden[: sum(self.lengths)].split(self.lengths):
            if not len(tokens):
                rows.append(tokens.sum(0))
            elif self.mode in ("cls", "lasttoken"):
                rows.append(tokens[0 if self.mode == "cls" else -1])
            elif self.mode == "weightedmean":
                weights = torch.arange(1, len(tokens) + 1, dtype=tokens.dtype, device=tokens.device)
                rows.append((tokens * weights[:, None]).sum(0) / weights.sum())
            elif self.mode == "mean_sqrt_len_tokens":
                rows.append(tokens.sum(0) / len(tokens) ** 0.5)
            else:
                rows.append(tokens.mean(0) if self.mode == "mean" else tokens.amax(0))
        return torch.stack(rows)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        # this mode's numbers are those of the mean, times the root of the length
        size = max(self.lengths) ** 0.5 if self.mode == "mean_sqrt_len_tokens" else 1.0
        return 4 * torch.finfo(inputs["hidden"].dtype).eps * size

    def flops(self) -> int:
        return 0 if self.mode in ("cls", "lasttoken") else sum(self.lengths) * self.width

    def bytes(self, dtype: torch.dtype) -> int:
        rows = sum(n > 0 for n in self.lengths) if self.mode in ("cls", "lasttoken") else sum(self.lengths)
        return rows * self.width * dtype.itemsize + len(self.lengths) * (self.width * 4 + 4)


SMALL = [PoolingCase((3, 0, 41, 1), mode) for mode in MODES]
ON_GPU = [PoolingCase((33, 1, 40), mode, 768) for mode in MODES]  # the blocks of base and large
CASES = [
    *SMALL,
    *(PoolingCase((130, 64, 1, 0, 33), mode, 768) for mode in MODES),
    *(PoolingCase((5, 2, 0), mode, 17, tail=4) for mode in MODES),
    PoolingCase((0, 0), "mean"),
    PoolingCase((0,), "max", 1),
    PoolingCase((512,), "max", 3),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [PoolingCase(lengths, mode, 768) for mode in MODES]
