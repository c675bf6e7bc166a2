"""`cross_entropy` by the `reference` backend; contract in fastbert/ops/cross_entropy.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.checks import FLOATS, compute_dtype

DTYPES = FLOATS


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    keep = labels != ignore_index
    x, target = logits[keep].to(compute_dtype(logits)), labels[keep].unsqueeze(1)
    top = x.amax(1)
    shifted = x - top.unsqueeze(1)
    log_sum = shifted.exp().sum(1).log()
    loss = log_sum - (1.0 - label_smoothing) * shifted.gather(1, target).squeeze(1)
    if label_smoothing > 0:
        loss = loss - label_smoothing * shifted.mean(1)
    lse = x.new_zeros(2, logits.shape[0])
    lse[0, keep], lse[1, keep] = top, log_sum
    count = keep.sum()
    return loss.sum() / count.clamp(min=1), lse, count


def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    count: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    keep = labels != ignore_index
    x = logits[keep].to(lse.dtype)
    share = label_smoothing / x.shape[1]
    # added up before it is rounded: of one class it is 1, and p - 1 is 0
    target = torch.full_like(x, share).scatter_(1, labels[keep].unsqueeze(1), 1.0 - label_smoothing + share)
    p = torch.exp(x - lse[0, keep].unsqueeze(1) - lse[1, keep].unsqueeze(1))
    dlogits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    dlogits[keep] = ((p - target) * (dloss / count.clamp(min=1))).to(logits.dtype)
    return dlogits
