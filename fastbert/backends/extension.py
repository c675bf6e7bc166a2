"""Arguments of calls to `fastbert._C`: codes of dtypes, addresses, dropout's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fastbert.ops.checks import TensorOrNone
from fastbert.ops.dropout import threshold
from fastbert.runtime.loader import address

if TYPE_CHECKING:
    from fastbert.ops.attention import AttentionInputs

# The codes of csrc/dtype.h.
DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The dtypes that its kernels store.
STORED = tuple(DTYPE_CODES)

_NO_DROPOUT = (0, 0, 0, 1.0)


def vector(t: torch.Tensor | None) -> tuple[int, int]:
    """(address, dtype code) of a parameter; zeros for None."""
    return (0, 0) if t is None else (address(t), DTYPE_CODES[t.dtype])


def dropout(p: float, seed: TensorOrNone, offset: int) -> tuple[int, int, int, float]:
    """(address of the seed, offset, threshold, 1 / (1 - p)): the numbers of csrc/layer_norm.h."""
    return (seed.data_ptr(), offset, threshold(p), 1.0 / (1.0 - p)) if p > 0 else _NO_DROPOUT


def bias_args(
    bias: torch.Tensor | None, batch: int, nheads: int, max_seqlen: int
) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """(the bias as the kernels read it, its address and strides): csrc/attention.h, Bias."""
    if bias is None:
        return None, (0, 0, 0, 0)
    bias = bias.float().expand(batch, nheads, max_seqlen, max_seqlen)
    if bias.stride(3) != 1 and max_seqlen > 1:  # one value for a whole row, or transposed
        bias = bias.contiguous()
    return bias, (bias.data_ptr(), *bias.stride()[:3])


def _head_rows(t: torch.Tensor) -> tuple[int, ...]:
    """(address, elements from token to token, elements from head to head)."""
    return t.data_ptr(), *t.stride()[:2]


def attention(inputs: AttentionInputs) -> tuple[tuple[Any, ...], list[Any]]:
    """(arguments of csrc/bindings/attention.cpp, tensors behind their addresses, to outlive the call)."""
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, window, bias, gate, dropout_p, seed, offset = inputs
    total, nheads, headdim = q.shape
    batch = cu_seqlens.shape[0] - 1
    cu_seqlens = cu_seqlens.contiguous()
    bias, bias_numbers = bias_args(bias, batch, nheads, max_seqlen)
    if gate is not None:
        gate = gate.float().contiguous()
    sizes = DTYPE_CODES[q.dtype], batch, nheads, headdim, total, max_seqlen, k.shape[1], cu_seqlens.data_ptr()
    rows = *_head_rows(q), *_head_rows(k), *_head_rows(v)
    left, right = (min(side, max_seqlen) for side in window)
    scores = softmax_scale, left, right, *bias_numbers, 0 if gate is None else gate.data_ptr()
    return (*sizes, *rows, *scores, *dropout(dropout_p, seed, offset)), [cu_seqlens, bias, gate]
