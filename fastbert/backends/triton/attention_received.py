"""`attention_received` by the `triton` backend; contract in fastbert/ops/attention_received.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.backends.aten import attention_received as aten
from fastbert.backends.triton.device import STORED, kernels
from fastbert.ops.attention_received import AttentionReceivedInputs

DTYPES = STORED


def attention_received_fwd(inputs: AttentionReceivedInputs) -> Tensor:
    fits = inputs.q.shape[-1] <= kernels("attention").MAX_HEADDIM
    return (kernels("attention_received") if fits else aten).attention_received_fwd(inputs)
