"""`cross_entropy` by the `aten` backend; contract in fastbert/ops/cross_entropy.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.checks import FLOATS, compute_dtype

DTYPES = FLOATS

# Elements held in float32 at a time: a cache on the CPU, a kernel's worth on a GPU.
_BLOCK = {"cpu": 2**18, "cuda": 2**26}


def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    keep = labels != ignore_index
    lse = logits.new_zeros((2, logits.shape[0]), dtype=compute_dtype(logits))
    losses = torch.zeros_like(lse[0])
    for rows in _blocks(logits, keep):
        x = logits.index_select(0, rows).to(lse.dtype)
        top = x.amax(1)
        x.sub_(top.unsqueeze(1))
        target = x.gather(1, labels[rows].clamp(0).unsqueeze(1)).squeeze(1)
        smooth = x.mean(1) if label_smoothing > 0 else None
        log_sum = x.exp_().sum(1).log_()
        if smooth is None:
            loss = log_sum - target
        else:
            loss = log_sum - (1.0 - label_smoothing) * target - label_smoothing * smooth
        lse[0, rows], lse[1, rows] = top, log_sum
        losses[rows] = loss
    count = keep.sum()
    return losses.masked_fill_(~keep, 0).sum() / count.clamp(min=1), lse, count


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
    dlogits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
    scale = dloss / count.clamp(min=1)
    for rows in _blocks(logits, keep):
        p = logits.index_select(0, rows).to(lse.dtype)
        p.sub_(lse[0, rows].unsqueeze(1)).sub_(lse[1, rows].unsqueeze(1)).exp_()
        target = labels[rows].clamp(0).unsqueeze(1)
        share = label_smoothing / logits.shape[1]
        # added up before it is rounded: of one class it is 1, and p - 1 is 0
        own = p.gather(1, target).sub_(1.0 - label_smoothing + share)
        if label_smoothing > 0:
            p.sub_(share)
        p.scatter_(1, target, own)
        p.mul_(scale)
        if logits.device.type != "cpu":
            p.masked_fill_(~keep[rows].unsqueeze(1), 0)
        dlogits[rows] = p.to(dlogits.dtype)
    return dlogits


def _blocks(logits, keep):
    """Row numbers in blocks: the labelled rows on the CPU, all on a GPU, where to count them is a sync."""
    if logits.device.type == "cpu":
        rows = keep.nonzero().squeeze(1)
    else:
        rows = torch.arange(logits.shape[0], device=logits.device)
    return rows.split(max(1, _BLOCK.get(logits.device.type, 2**22) // logits.shape[1]))
