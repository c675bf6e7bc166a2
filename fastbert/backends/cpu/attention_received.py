"""`attention_received` by the `cpu` backend: csrc/cpu/attention_received; contract in fastbert/ops."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import STORED
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention_inputs import EVERYWHERE, AttentionInputs
from fastbert.ops.attention_received import AttentionReceivedInputs
from fastbert.runtime.loader import extension as _C

DTYPES = STORED


def attention_received_fwd(inputs: AttentionReceivedInputs) -> Tensor:
    q, k, cu_seqlens, max_seqlen, lse, scale = inputs
    whole = AttentionInputs(q, k, k, cu_seqlens, max_seqlen, scale, EVERYWHERE, None, None, 0.0, None, 0)
    args, _held = attention_args(whole)
    out = lse.new_empty(q.shape[0])
    _C.cpu_attention_received(args, lse.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return out
