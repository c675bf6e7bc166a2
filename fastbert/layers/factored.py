"""A table of words as a product of two matrices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastbert.layers.linear import apply_linear


class FactoredTable(nn.Embedding):
    """A table (rows, width) of a smaller rank: its row i is `projection(weight[i])`, weight (rows, rank).

    Args:
        rows, width: the sizes of the table.
        rank: the number of columns that are kept per row.
        padding_idx: see `nn.Embedding`.
    """

    def __init__(self, rows: int, width: int, rank: int, padding_idx: int | None = None):
        super().__init__(rows, rank, padding_idx, _weight=torch.empty(rows, rank))
        self.projection = nn.Linear(rank, width, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Ids of any shape -> (…, width), in the dtype of the weight."""
        return apply_linear(self.projection, super().forward(input)).to(self.weight.dtype)
