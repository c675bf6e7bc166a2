"""`embedding` by the `aten` backend; contract in fastbert/ops/embedding.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.backends.aten.layer_norm import layer_norm_bwd, layer_norm_fwd
from fastbert.ops.checks import FLOATS, compute_dtype
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import EmbeddingInputs, EmbeddingSaved
from fastbert.ops.layer_norm import LayerNormInputs, LayerNormNeeds, LayerNormSaved

DTYPES = FLOATS


def embedding_fwd(inputs: EmbeddingInputs, save: bool) -> tuple[Tensor, ...]:
    position_ids, position, token_type_ids, segment = inputs[3:7]
    ln_weight, ln_bias, _padding_idx, eps, dropout_p, seed, offset = inputs[7:14]
    dtype = inputs.source.dtype
    stats = torch.float64 if dtype == torch.float64 else torch.float32
    z = inputs.words(stats)
    if position is not None:
        z.add_(F.embedding(position_ids, position))
    if segment is not None:
        z.add_(F.embedding(token_type_ids, segment))
    y, _, mean, rstd = layer_norm_fwd(LayerNormInputs(z, ln_weight, ln_bias, eps=eps), save)
    if dropout_p > 0:
        y.mul_(
            keep_mask_2d(seed, offset, *y.shape, dropout_p=dropout_p).to(stats) * (1.0 / (1.0 - dropout_p))
        )
    return y.to(dtype), z.to(dtype) if save else z.new_empty(0, dtype=dtype), mean, rstd


def embedding_bwd(
    dy: Tensor, saved: EmbeddingSaved, need_dinputs_embeds: bool, need_dln: bool
) -> tuple[Tensor, ...]:
    z, ln_weight, mean, rstd, input_ids, position_ids, token_type_ids = saved[:7]
    word_rows, position_rows, segment_rows, padding_idx, dropout_p, seed, offset = saved[7:]
    dtype, stats = dy.dtype, compute_dtype(dy)
    if dropout_p > 0:
        dy = dy * (
            keep_mask_2d(seed, offset, *dy.shape, dropout_p=dropout_p).to(stats) * (1.0 / (1.0 - dropout_p))
        )
    need_dz = need_dinputs_embeds or word_rows + position_rows + segment_rows > 0
    dz, _, dln_weight, dln_bias, _ = layer_norm_bwd(
        dy.to(stats),
        LayerNormSaved(z.to(stats), ln_weight, mean, rstd),
        LayerNormNeeds(dx=need_dz, dweight=need_dln, dx_bias=False, dresidual=False),
    )

    def scatter(ids, rows, skip):
        # Each row in the order of its tokens: PyTorch sorts the ids on a GPU and shares out rows on a CPU.
        if rows == 0:
            return dy.new_empty(0, dtype=dtype)
        return torch.ops.aten.embedding_dense_backward(dz, ids, rows, skip, False).to(dtype)

    return (
        scatter(input_ids, word_rows, padding_idx),
        scatter(position_ids, position_rows, -1),
        scatter(token_type_ids, segment_rows, -1),
        dz.to(dtype) if need_dinputs_embeds else dy.new_empty(0, dtype=dtype),
        dln_weight,
        dln_bias,
    )
