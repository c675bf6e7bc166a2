"""`cross_entropy` by the `cpu` backend: csrc/cpu/cross_entropy; contract in fastbert/ops/cross_entropy.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import DTYPE_CODES, STORED
from fastbert.runtime.loader import extension as _C

DTYPES = STORED


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, classes = logits.shape
    loss = logits.new_empty((), dtype=torch.float32)
    lse = logits.new_empty((2, rows), dtype=torch.float32)
    count = labels.new_empty(())
    _C.cpu_cross_entropy_fwd(
        *(DTYPE_CODES[logits.dtype], rows, classes),
        *(logits.data_ptr(), logits.stride(0), labels.data_ptr()),
        *(ignore_index, label_smoothing),
        *(loss.data_ptr(), lse.data_ptr(), count.data_ptr()),
        torch.get_num_threads(),
    )
    return loss, lse, count


def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    rows, classes = logits.shape
    dlogits = logits.new_empty(rows, classes)
    _C.cpu_cross_entropy_bwd(
        *(DTYPE_CODES[logits.dtype], rows, classes),
        *(logits.data_ptr(), logits.stride(0), labels.data_ptr()),
        *(ignore_index, label_smoothing),
        *(dloss.data_ptr(), lse.data_ptr(), count.data_ptr(), dlogits.data_ptr()),
        torch.get_num_threads(),
    )
    return dlogits
