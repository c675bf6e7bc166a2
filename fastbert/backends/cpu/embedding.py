"""`embedding` by the `cpu` backend: csrc/cpu/embedding; contract in fastbert/ops/embedding.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.extension import DTYPE_CODES, STORED, dropout, vector
from fastbert.ops.checks import TensorOrNone
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.integer_table import bits_of
from fastbert.runtime.loader import address
from fastbert.runtime.loader import extension as _C

DTYPES = STORED

_NONE = (0, 0, 0, 0)


def _flat(ids: TensorOrNone) -> TensorOrNone:
    """The ids side by side in memory: broadcast ids may all be one element."""
    return None if ids is None else ids.contiguous()


def _lookup(table, ids):
    if table is None:
        return _NONE
    return address(table), table.stride(0), table.shape[0], 0 if ids is None else ids.data_ptr()


def embedding_fwd(inputs: EmbeddingInputs, save: bool) -> tuple[Tensor, ...]:
    source, tokens = inputs.source, inputs.tokens
    hidden, scale = source.shape[-1], inputs.word_scale
    words = inputs.word if inputs.inputs_embeds is None else inputs.inputs_embeds
    # these copies must outlive the call
    ids = [_flat(t) for t in (inputs.input_ids, inputs.position_ids, inputs.token_type_ids)]
    word_ids = ids[0] if inputs.inputs_embeds is None else None
    y = source.new_empty(tokens, hidden)
    z = source.new_empty((tokens, hidden) if save else 0)
    mean = source.new_empty(tokens if save else 0, dtype=torch.float32)
    rstd = source.new_empty(tokens if save else 0, dtype=torch.float32)
    _C.cpu_embedding_fwd(
        DTYPE_CODES[source.dtype],
        tokens,
        hidden,
        _lookup(words, word_ids),
        _lookup(inputs.position, ids[1]),
        _lookup(inputs.segment, ids[2]),
        *vector(inputs.ln_weight),
        *vector(inputs.ln_bias),
        inputs.eps,
        *dropout(inputs.dropout_p, inputs.seed, inputs.offset),
        *(t.data_ptr() for t in (y, z, mean, rstd)),
        bits_of(words),
        0 if scale is None else scale.data_ptr(),
        torch.get_num_threads(),
    )
    return y, z, mean, rstd


def embedding_bwd(
    dy: Tensor, saved: EmbeddingSaved, need_dinputs_embeds: bool, need_dln: bool
) -> tuple[Tensor, ...]:
    z, ln_weight, mean, rstd, input_ids, position_ids, token_type_ids = saved[:7]
    word_rows, position_rows, segment_rows, padding_idx, dropout_p, seed, offset = saved[7:]
    tokens, hidden = dy.shape
    dy = dy.contiguous()
    ids = [_flat(t) for t in (input_ids, position_ids, token_type_ids)]
    sizes = (word_rows, position_rows, segment_rows)
    tables = [dy.new_empty((rows, hidden) if rows else 0) for rows in sizes]
    grads = [
        (grad.data_ptr(), rows, skip, t.data_ptr()) if rows else _NONE
        for grad, rows, skip, t in zip(tables, sizes, (padding_idx, -1, -1), ids, strict=True)
    ]
    dinputs_embeds = dy.new_empty((tokens, hidden) if need_dinputs_embeds else 0)
    dln_weight = mean.new_empty(hidden if need_dln else 0)
    dln_bias = mean.new_empty(hidden if need_dln else 0)
    _C.cpu_embedding_bwd(
        DTYPE_CODES[dy.dtype],
        tokens,
        hidden,
        dy.data_ptr(),
        z.data_ptr(),
        *vector(ln_weight),
        mean.data_ptr(),
        rstd.data_ptr(),
        *dropout(dropout_p, seed, offset),
        *grads,
        *(t.data_ptr() for t in (dinputs_embeds, dln_weight, dln_bias)),
        torch.get_num_threads(),
    )
    return *tables, dinputs_embeds, dln_weight, dln_bias
