"""`embedding` by the `reference` backend; contract in fastbert/ops/embedding.py."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.backends.reference.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved

DTYPES = FLOATS


def embedding_fwd(inputs: EmbeddingInputs, save: bool) -> tuple[Tensor, ...]:
    position_ids, position, token_type_ids, segment = inputs[3:7]
    ln_weight, ln_bias, _padding_idx, eps, dropout_p, seed, offset = inputs[7:14]
    source = inputs.source
    compute = compute_dtype(source)
    z = inputs.words(compute)
    if position is not None:
        z = z + position[position_ids].to(compute)
    if segment is not None:
        z = z + segment[token_type_ids].to(compute)
    y, _, mean, rstd = layer_norm_fwd(LayerNormInputs(z, ln_weight, ln_bias, eps=eps), save)
    if dropout_p > 0:
        y = y * keep_mask_2d(seed, offset, *y.shape, dropout_p=dropout_p) / (1.0 - dropout_p)
    return y.to(source.dtype), z.to(source.dtype) if save else source.new_empty(0), mean, rstd


def embedding_bwd(
    dy: Tensor, saved: EmbeddingSaved, need_dinputs_embeds: bool, need_dln: bool
) -> tuple[Tensor, ...]:
    z, ln_weight, mean, rstd, input_ids, position_ids, token_type_ids = saved[:7]
    word_rows, position_rows, segment_rows, padding_idx, dropout_p, seed, offset = saved[7:]
    dtype, compute = dy.dtype, compute_dtype(dy)
    dn = dy.to(compute)
    if dropout_p > 0:
        dn = dn * keep_mask_2d(seed, offset, *dy.shape, dropout_p=dropout_p) / (1.0 - dropout_p)
    need_dz = need_dinputs_embeds or word_rows + position_rows + segment_rows > 0
    dz, _, dln_weight, dln_bias, _ = layer_norm_bwd(
        dn,
        LayerNormSaved(z.to(compute), ln_weight, mean, rstd),
        LayerNormNeeds(dx=need_dz, dweight=need_dln, dx_bias=False, dresidual=False),
    )
    empty = dy.new_empty
    dword = _sum_by_id(dz, input_ids, word_rows).to(dtype) if word_rows else empty(0)
    if word_rows and padding_idx >= 0:
        dword[padding_idx] = 0
    return (
        dword,
        _sum_by_id(dz, position_ids, position_rows).to(dtype) if position_rows else empty(0),
        _sum_by_id(dz, token_type_ids, segment_rows).to(dtype) if segment_rows else empty(0),
        dz.to(dtype) if need_dinputs_embeds else empty(0),
        dln_weight,
        dln_bias,
    )


def _sum_by_id(dz, ids, rows):
    """(rows, hidden): row v is the sum of the rows of `dz` whose id is v, in their order."""
    if dz.shape[0] == 0:
        return dz.new_zeros(rows, dz.shape[1])
    lengths = torch.bincount(ids, minlength=rows)
    by_id = dz[torch.argsort(ids, stable=True)]
    return torch.segment_reduce(by_id, "sum", lengths=lengths, unsafe=True, initial=0)
