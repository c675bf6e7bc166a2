"""The calls that make tensors with a column per class, and their numbers of rows."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class VocabularyRows(TorchDispatchMode):
    """The row counts of all tensors with one column per class that are made.

    Args:
        classes: the number of columns.
    """

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes, self.rows = classes, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            of_classes = isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[-1] == self.classes
            if of_classes and t.is_contiguous():  # which a transposed weight is not
                self.rows.append(t.numel() // self.classes)
        return out
