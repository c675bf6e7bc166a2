"""`first_attention` by the `reference` backend; contract in fastbert/ops/first_attention.py."""

from __future__ import annotations

from torch import Tensor

from fastbert.ops.checks import FLOATS
from fastbert.ops.first_attention import FirstAttentionInputs, first_attention_ref

DTYPES = FLOATS


def first_attention_fwd(inputs: FirstAttentionInputs) -> Tensor:
    return first_attention_ref(*inputs)
