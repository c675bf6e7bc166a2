"""Self-attention of layers, and in calls, that need more than the op `attention` of query, key and value.

Layers without heads, with scores of distances, blocks, global tokens or fixed patterns (each has a file of
its own); calls that have taps, ask for probabilities, or let tokens leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fastbert.layers import block_sparse, disentangled, elimination, global_tokens
from fastbert.layers.asked import Asked
from fastbert.layers.bands import packed_bands
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.patterns import Rows
from fastbert.layers.positions import window_bias
from fastbert.layers.taps import Taps
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.attention_received import attention_received
from fastbert.ops.attention_relative import RelativeScores


def _without_heads(
    form: LayerForm, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """`attend` of a layer without heads."""
    context = x.new_empty(x.shape[0], 0, form.head_dim)
    if asked.kept is not None:  # all tokens receive as much: none
        return context, elimination.most_received(x.new_zeros(x.shape[0]), batch, asked.kept)
    none = x.new_empty(batch.cu_seqlens.shape[0] - 1, 0, batch.max_seqlen, batch.max_seqlen)
    return context, none if asked.probabilities else None


def attend_by_case(
    form: LayerForm,
    parts: Parts,
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor] | None,
    batch: PackedBatch,
    asked: Asked,
) -> tuple[Tensor, Tensor | None]:
    """`attention.attend` of a layer's input x, from its query, key and value; None without heads."""
    if qkv is None:
        return _without_heads(form, x, batch, asked)
    if asked.kept is not None:
        return _with_kept(form, parts, *qkv, batch, asked)
    if asked.taps is None and not asked.probabilities:
        distances = form.relative is not None and form.heads is None
        if distances and (pieces := disentangled.pieces(form, qkv[0], batch)):
            return disentangled.attend(form, parts, qkv, pieces, asked, attended), None
        if batch.lengths and batch.bias is None and not batch.causal:
            return block_sparse.attend(form, parts, *qkv, batch, asked), None
    return _with_all(form, parts, x, qkv, batch, asked)


def _with_kept(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor]:
    """The output of attention, and the rows of the tokens that receive most of it."""
    assert asked.kept is not None
    context, lse = attended(parts, q, k, v, batch, asked, None, asked.gate, form.softmax_scale)
    how = batch.cu_seqlens, batch.max_seqlen, lse
    received = attention_received(q.detach(), k.detach(), *how, softmax_scale=form.softmax_scale)
    return context, elimination.most_received(received, batch, asked.kept)


def _with_all(
    form: LayerForm,
    parts: Parts,
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    batch: PackedBatch,
    asked: Asked,
) -> tuple[Tensor, Tensor | None]:
    """`attend` with all that a layer may have: biases, taps, heads with fixed patterns, global tokens."""
    heads, taps, gate, scale = form.heads, asked.taps, asked.gate, form.softmax_scale
    q, k, v = qkv
    seen, window, relative = scored(form, parts, q, k, batch, asked)
    bias = seen.bias
    if batch.lengths is not None:
        parts = parts._replace(rates=(0.0, *parts.rates[1:]))
    if heads is not None and taps is not None and type(taps).qkv is not Taps.qkv:
        raise ValueError(
            "model: has heads with fixed patterns (config fixed_heads), which have no queries and keys to "
            "look at"
        )
    if heads is None and taps is not None:
        k, v = form.for_each_head(k, 1), form.for_each_head(v, 1)
        if form.relative is not None:
            q, scale = q * (scale * form.head_dim**0.5), form.head_dim**-0.5
        q, k, v, bias = taps.qkv(asked.number, q, k, v, seen)
    values = v
    if heads is not None:
        v, bias, gate = heads.of_learned(v, 1), heads.of_learned(bias, 1), heads.of_learned(gate, 0)
    if batch.globals is not None:
        assert v is not None
        found = global_tokens.attention(form, parts, x, (q, k, v), seen, asked)
    else:
        found = attended(parts, q, k, v, batch, asked, bias, gate, scale, window, relative)
    context, probs = found if asked.probabilities else (found, None)
    if probs is not None and form.global_tokens:
        probs = packed_bands(form, probs, batch, x.shape[0])
    if heads is not None:
        rows = Rows.of(batch.cu_seqlens, x.shape[0], batch.max_seqlen)
        context = heads.joined(context, values, rows, asked.gate)
        probs = None if probs is None else heads.all_probabilities(probs, rows)
    if taps is not None:
        context = taps.context(asked.number, context, batch)
    return context, probs


def scored(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[PackedBatch, tuple[int, int] | None, RelativeScores | None]:
    """What is added to scores and hides keys: (the batch with its bias, the window, scores of distances).

    Taps see all of it as one bias. Heads with fixed patterns have scores of distances in their bias.
    """
    window, relative = form.window, batch.relative
    if window is not None and (asked.taps is not None or batch.columns is not None):
        batch, window = replace(batch, bias=window_bias(batch, window)), None
    if form.relative is not None:
        relative = disentangled.relative_scores(form, parts, q, k, batch, asked)
    if relative is not None and (asked.taps is not None or form.heads is not None):
        batch, relative = replace(batch, relative=relative).dense(), None
    if batch.lengths is not None:
        draws = block_sparse.training(form, parts)
        batch = replace(batch, bias=block_sparse.bias(form, draws, batch, checks.compute_dtype(q)))
    return batch, window, relative


def attended(parts, q, k, v, batch, asked, bias, gate, scale, window=None, relative=None) -> Any:
    """The output of the op `attention`, or (output, lse or probabilities) if `asked` needs them."""
    return attention(
        q,
        k,
        v,
        batch.cu_seqlens,
        batch.max_seqlen,
        softmax_scale=scale,
        causal=batch.causal,
        window=window,
        bias=bias,
        relative=relative,
        gate=gate,
        dropout_p=parts.rates[0],
        seed=batch.seed,
        offset=asked.site,
        return_lse=asked.kept is not None,
        return_probs=asked.probabilities,
        places=batch.fitting_places(),
    )
