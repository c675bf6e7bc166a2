"""`attention` by the `cpu` backend: csrc/cpu/attention; contract in fastbert/ops/attention.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.backends.cpu.linear import linear_panels
from fastbert.backends.extension import DTYPE_CODES, STORED
from fastbert.backends.extension import attention as attention_args
from fastbert.ops.attention import AttentionInputs
from fastbert.ops.attention_grid import bits_shape
from fastbert.ops.attention_inputs import AttentionNeeds
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.checks import TensorOrNone
from fastbert.runtime.loader import extension as _C

DTYPES = STORED
# Columns of a panel of a table (csrc/cpu/linear.h)
_PANEL = 64


def reads_relative(relative: RelativeScores, headdim: int, training: bool) -> bool:
    """Whether `attention` may pass these scores of distances to the launchers."""
    return relative.positions is None


def attention_fwd(
    inputs: AttentionInputs,
    return_probs: bool,
    save_bits: bool,
    places: Tensor | None = None,
    relative: RelativeScores | None = None,
) -> tuple[Tensor, ...]:
    args, _held = attention_args(inputs)
    scores, _held_scores = relative_args(relative)
    q, cu_seqlens, max_seqlen = inputs.q, inputs.cu_seqlens, inputs.max_seqlen
    (total, nheads, _), end = q.shape, int(cu_seqlens[-1])
    out = q.new_empty(q.shape)
    lse = q.new_empty((nheads, total), dtype=torch.float32)
    batch = cu_seqlens.shape[0] - 1
    probs = q.new_zeros((batch, nheads, max_seqlen, max_seqlen) if return_probs else 0)
    keep_bits = q.new_empty(bits_shape(nheads, total, max_seqlen, save_bits), dtype=torch.int32)
    _C.cpu_attention_fwd(
        args,
        out.data_ptr(),
        lse.data_ptr(),
        probs.data_ptr() if return_probs else 0,
        keep_bits.data_ptr() if save_bits else 0,
        torch.get_num_threads(),
        scores,
    )
    if end < total:
        out[end:], lse[:, end:] = 0, 0
    return out, lse, probs, keep_bits


def attention_bwd(
    dout: Tensor,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    keep_bits: Tensor | None,
    need: AttentionNeeds,
    places: Tensor | None = None,
    relative: RelativeScores | None = None,
    need_scores: Sequence[bool] = (False, False, False),
) -> tuple[Tensor, ...]:
    args, _held = attention_args(inputs)
    scores, _held_scores = relative_args(relative)
    q, cu_seqlens, max_seqlen = inputs.q, inputs.cu_seqlens, inputs.max_seqlen
    (total, nheads, _), batch, end = q.shape, cu_seqlens.shape[0] - 1, int(cu_seqlens[-1])
    qkv = zip(inputs[:3], need[:3], strict=True)
    grads = [q.new_empty(t.shape if needed else 0) for t, needed in qkv]
    ds = lse.new_zeros((batch, nheads, max_seqlen, max_seqlen) if need.dbias else 0)
    dgate = lse.new_empty((batch, nheads) if need.dgate else 0, dtype=torch.float64)
    ncolumns, distances = (0, 0) if relative is None else (_ncolumns(relative), relative.columns.shape[0])
    sizes = (total, nheads, ncolumns), (total, nheads, ncolumns), (batch, nheads, distances)
    dtypes = torch.float32, torch.float32, torch.float64
    dscores = [
        lse.new_zeros(size if needed else 0, dtype=dtype)
        for size, dtype, needed in zip(sizes, dtypes, need_scores, strict=True)
    ]
    wanted = zip(dscores, need_scores, strict=True)
    _C.cpu_attention_bwd(
        args,
        0 if keep_bits is None else keep_bits.data_ptr(),
        dout.data_ptr(),
        *(grad.data_ptr() if needed else 0 for grad, needed in zip(grads, need[:3], strict=True)),
        ds.data_ptr() if need.dbias else 0,
        dgate.data_ptr() if need.dgate else 0,
        torch.get_num_threads(),
        scores,
        *(grad.data_ptr() if needed else 0 for grad, needed in wanted),
    )
    if end < total:
        for grad in grads:
            grad[end:] = 0
    dbias = ds.sum_to_size(inputs.bias.shape) if need.dbias else ds
    found = *grads, dbias, dgate.sum(0).float() if need.dgate else lse.new_empty(0)
    if relative is None:
        return found
    dbias_of_columns = lse.new_zeros((nheads, ncolumns) if need_scores[2] else 0)
    if need_scores[2]:
        dbias_of_columns.index_add_(1, relative.columns, dscores[2].sum(0).float())
    return *found, *dscores[:2], dbias_of_columns


def relative_args(relative: RelativeScores | None) -> tuple[tuple[Any, ...], list[Any]]:
    """(arguments of `relative_of` in csrc/bindings/attention.cpp, tensors behind their addresses)."""
    if relative is None:
        return (), []
    columns, query, key, bias, _ = relative
    ncolumns = _ncolumns(relative)
    given = [t for t in (query, key) if t is not None]
    # The kernels read pairs of bf16
    half = ncolumns > 1 and all(t.dtype == torch.bfloat16 for t in given)
    query, key = (None if t is None else _rows(t if half else t.float()) for t in (query, key))
    columns = columns.contiguous()
    if bias is not None:
        # Once per distance, so that neighbours are side by side
        bias = bias.detach().float().index_select(1, columns)
    of_rows = [n for t in (query, key) for n in _strided(t)]
    numbers = columns.data_ptr(), columns.shape[0], ncolumns, half, *of_rows, *_strided(bias)[:1]
    return numbers, [columns, query, key, bias]


def table_panels(table: Tensor) -> Tensor:
    rows, nheads, headdim = table.shape
    padded = table.new_zeros(nheads, -(-rows // _PANEL) * _PANEL, headdim)
    padded[:, :rows] = table.transpose(0, 1)
    return linear_panels(padded.flatten(0, 1))


def table_scores(x: Tensor, panels: Tensor, table_rows: int, first: int, count: int) -> Tensor:
    x = _rows(x)
    rows, nheads, headdim = x.shape
    begin, end = first // _PANEL * _PANEL, -(-(first + count) // _PANEL) * _PANEL
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype
    out = x.new_empty(nheads, rows, end - begin, dtype=dtype)
    numbers = DTYPE_CODES[x.dtype], rows, nheads, headdim, x.data_ptr(), *x.stride()[:2]
    table = panels.data_ptr(), table_rows, first, count
    _C.cpu_table_scores(*numbers, *table, out.data_ptr(), torch.get_num_threads())
    return out.transpose(0, 1)[..., first - begin : first - begin + count]


def _ncolumns(relative: RelativeScores) -> int:
    return next(t.shape[-1] for t in relative[1:4] if t is not None)


def _rows(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _strided(t: TensorOrNone) -> tuple[int, ...]:
    """(address, elements from row to row, elements from head to head); zeros for None."""
    return (0, 0, 0) if t is None else (t.data_ptr(), *t.stride()[:2])
