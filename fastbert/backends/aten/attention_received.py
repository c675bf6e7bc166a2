"""`attention_received` by the `aten` backend; contract in fastbert/ops/attention_received.py.

On a dense grid, one head after the other: a head's probabilities are the largest tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.ops.attention_grid import from_grid, to_grid
from fastbert.ops.attention_received import AttentionReceivedInputs
from fastbert.ops.checks import FLOATS, compute_dtype

DTYPES = FLOATS


def attention_received_fwd(inputs: AttentionReceivedInputs) -> Tensor:
    q, k, cu_seqlens, max_seqlen, lse, softmax_scale = inputs
    (total, nheads, _), compute = q.shape, compute_dtype(q)
    real = torch.arange(max_seqlen, device=q.device) < cu_seqlens.diff()[:, None]
    # A query that is not there, or sees nothing, has probabilities exp(-inf) = 0
    lse = to_grid(lse.t(), cu_seqlens, max_seqlen).permute(2, 0, 1)
    lse = lse.masked_fill(lse.isneginf() | ~real, torch.inf)
    queries, keys = (to_grid(t.to(compute), cu_seqlens, max_seqlen).permute(2, 0, 1, 3) for t in (q, k))
    received = queries.new_zeros(queries.shape[1:3])
    for head in range(nheads):
        scores = queries[head] @ keys[head * k.shape[1] // nheads].mT
        received += (scores * softmax_scale - lse[head].unsqueeze(-1)).exp_().sum(1)
    return from_grid(received, cu_seqlens, total)
