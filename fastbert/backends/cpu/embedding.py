"""`embedding` by the `cpu` backend: csrc/cpu/embedding; contract in fastbert/ops/embedding.py."""

from __future__ import annotations

import torch

from fastbert.backends.extension import DTYPE_CODES, STORED, dropout, vector
from fastbert.runtime.native import address
from fastbert.runtime.native import extension as _C

DTYPES = STORED

_NONE = (0, 0, 0, 0)


def _flat(ids):
    """The ids side by side: broadcast ones may all be one element."""
    return None if ids is None else ids.contiguous()


def _lookup(table, ids):
    if table is None:
        return _NONE
    return address(table), table.stride(0), table.shape[0], 0 if ids is None else ids.data_ptr()


def embedding_fwd(
    input_ids, inputs_embeds, word, position_ids, position, token_type_ids, segment, ln_weight, ln_bias,
    eps, dropout_p, seed, offset, save,
):  # fmt: skip
    source = word if inputs_embeds is None else inputs_embeds
    tokens = input_ids.shape[0] if inputs_embeds is None else inputs_embeds.shape[0]
    hidden = source.shape[1]
    input_ids, position_ids, token_type_ids = map(_flat, (input_ids, position_ids, token_type_ids))
    y = source.new_empty(tokens, hidden)
    z = source.new_empty((tokens, hidden) if save else 0)
    mean = source.new_empty(tokens if save else 0, dtype=torch.float32)
    rstd = source.new_empty(tokens if save else 0, dtype=torch.float32)
    _C.cpu_embedding_fwd(
        DTYPE_CODES[source.dtype], tokens, hidden,
        _lookup(source, input_ids if inputs_embeds is None else None),
        _lookup(position, position_ids), _lookup(segment, token_type_ids),
        *vector(ln_weight), *vector(ln_bias), eps, *dropout(dropout_p, seed, offset),
        y.data_ptr(), z.data_ptr(), mean.data_ptr(), rstd.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return y, z, mean, rstd


def embedding_bwd(
    dy, z, ln_weight, mean, rstd, input_ids, position_ids, token_type_ids, word_rows, position_rows,
    segment_rows, padding_idx, dropout_p, seed, offset, need_dinputs_embeds, need_dln,
):  # fmt: skip
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
        DTYPE_CODES[dy.dtype], tokens, hidden, dy.data_ptr(), z.data_ptr(), *vector(ln_weight),
        mean.data_ptr(), rstd.data_ptr(), *dropout(dropout_p, seed, offset), *grads,
        dinputs_embeds.data_ptr(), dln_weight.data_ptr(), dln_bias.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return *tables, dinputs_embeds, dln_weight, dln_bias
