"""`attention_received` by the `reference` backend; contract in fastbert/ops/attention_received.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.attention_received import AttentionReceivedInputs, attention_received_ref
from fastbert.ops.checks import FLOATS

DTYPES = FLOATS


def attention_received_fwd(inputs: AttentionReceivedInputs) -> Tensor:
    return attention_received_ref(*inputs)
