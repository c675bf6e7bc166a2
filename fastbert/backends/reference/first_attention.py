"""`first_attention` by the `reference` backend; contract in fastbert/ops/first_attention.py."""

from __future__ import annotations

from fastbert.ops.checks import FLOATS
from fastbert.ops.first_attention import first_attention_ref

DTYPES = FLOATS


def first_attention_fwd(x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate):
    return first_attention_ref(
        x, q, key_weight, value_weight, value_bias, cu_seqlens, softmax_scale, bias, gate
    )
