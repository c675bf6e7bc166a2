"""Self-attention of a layer, from its input to the heads' outputs, as calls to ops.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    context = attention(q, k, v)

Scores of distances, global tokens, blocks and fixed patterns have files of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastbert.layers import block_sparse, bottleneck, disentangled, elimination, global_tokens
from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import apply_joined, apply_linear, apply_norm, has_float_weight, split
from fastbert.layers.patterns import Rows
from fastbert.layers.positions import rotate, rotated, window_bias
from fastbert.layers.taps import Taps
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.attention_received import attention_received
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.first_attention import first_attention, pays


def attend(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """The output of self-attention, (total, nheads, headdim), and its probabilities or None.

    With `asked.kept` the rows of the tokens to keep are in place of probabilities.
    """
    if form.nheads == 0:
        return _without_heads(form, x, batch, asked)
    qkv = projected(form, parts, x if asked.rounded is None else asked.rounded, batch)
    if asked.kept is not None:
        return _with_kept(form, parts, *qkv, batch, asked)
    if asked.taps is None and not asked.probabilities:
        distances = form.relative is not None and form.heads is None
        if distances and (pieces := disentangled.pieces(form, qkv[0], batch)):
            return disentangled.attend(form, parts, qkv, pieces, asked, _attention), None
        if batch.lengths and batch.bias is None and not batch.causal:
            return block_sparse.attend(form, parts, *qkv, batch, asked), None
    return _with_all(form, parts, x, qkv, batch, asked)


def _without_heads(
    form: LayerForm, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """`attend` of a layer without heads."""
    context = x.new_empty(x.shape[0], 0, form.head_dim)
    if asked.kept is not None:  # all tokens receive as much: none
        return context, elimination.most_received(x.new_zeros(x.shape[0]), batch, asked.kept)
    none = x.new_empty(batch.cu_seqlens.shape[0] - 1, 0, batch.max_seqlen, batch.max_seqlen)
    return context, none if asked.probabilities else None


def _with_kept(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor]:
    """The output of attention, and the rows of the tokens that receive most of it."""
    assert asked.kept is not None
    context, lse = _attention(parts, q, k, v, batch, asked, None, asked.gate, form.softmax_scale)
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
        found = _attention(parts, q, k, v, batch, asked, bias, gate, scale, window, relative)
    context, probs = found if asked.probabilities else (found, None)
    if probs is not None and form.global_tokens:
        probs = global_tokens.packed_bands(form, probs, batch, x.shape[0])
    if heads is not None:
        rows = Rows.of(batch.cu_seqlens, x.shape[0], batch.max_seqlen)
        context = heads.joined(context, values, rows, asked.gate)
        probs = None if probs is None else heads.all_probabilities(probs, rows)
    if taps is not None:
        context = taps.context(asked.number, context, batch)
    return context, probs


def projected(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (total, heads, head_dim), of the layer's input; rotated if it rotates."""
    if form.pre_norm:
        norm = parts.attention_norm
        x = apply_norm(norm, x) if parts.fuses_norm else norm(x)
    if form.packed:
        return rotated(form, apply_linear(parts.query, x), batch)
    given = (x, x) if form.bottleneck is None else bottleneck.inputs(parts, x)
    q, k, v = queries_keys_values(form, parts, *given)
    if form.rotary is None:
        return q, k, v
    return rotate(form, q, batch), rotate(form, k, batch), v


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


def _attention(parts, q, k, v, batch, asked, bias, gate, scale, window=None, relative=None) -> Any:
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


def queries_keys_values(
    form: LayerForm, parts: Parts, x: Tensor, source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (total, nheads, head_dim); a head with a fixed pattern has a value alone.

    It is one product with [Wq; Wk; Wv] if that is cheaper than three. Values are made from `source` if it is
    given, all else from `x`.
    """
    source = x if source is None else source
    modules = [parts.query, parts.key, parts.value]
    nheads, size = form.nheads, form.head_dim
    learned = nheads if form.heads is None else len(form.heads.learned)
    shared = form.kv_heads
    columns = [learned * size, (shared or learned) * size, (shared or nheads) * size]
    joined = apply_joined(parts.owner, modules, x) if source is x else None
    wanted = f"{columns[0]}, {columns[1]} and {columns[2]} outputs, {nheads} heads of {size}"
    given = zip(modules, (x, x, source), strict=True)
    each = [joined] if joined is not None else [apply_linear(m, t) for m, t in given]
    if sum(t.shape[1] for t in each) != sum(columns):
        raise ValueError(
            f"query, key, value: expected {wanted}, got {', '.join(str(m.out_features) for m in modules)}; "
            "after pruning by hand set num_attention_heads of the attention module"
        )
    if joined is not None and learned == nheads and shared is None:
        return split(joined.reshape(x.shape[0], 3, nheads, size))
    q, k, v = joined.split(columns, 1) if joined is not None else each
    q, k, v = (t.reshape(x.shape[0], t.shape[1] // size, size) for t in (q, k, v))
    return q, k, v


def first_context(
    form: LayerForm, parts: Parts, x: Tensor, starts: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The attention's output at the rows `starts` alone: (total, hidden) -> (batch, nheads · head_dim)."""
    key, value, shape = parts.key, parts.value, (-1, form.nheads, form.head_dim)
    q, scale = apply_linear(parts.query, x.index_select(0, starts)).reshape(shape), form.softmax_scale
    if (
        not torch.is_grad_enabled()
        and parts.rates[0] == 0.0
        and has_float_weight(key)
        and has_float_weight(value)
        and checks.autocast_dtype(x) is None
        and not torch.compiler.is_compiling()
        and not batch.causal
        and pays(x, starts.shape[0])
    ):
        weights = key.weight, value.weight, value.bias
        more = {"bias": batch.first_bias(), "gate": asked.gate, "max_seqlen": batch.max_seqlen}
        return first_attention(x, q, *weights, batch.cu_seqlens, softmax_scale=scale, **more)
    k, v = (apply_linear(module, x).reshape(shape) for module in (key, value))
    # Rows other than `starts` get a query of zeros, and their results are dropped. For an empty sequence
    # `starts` repeats a row of another sequence, whose query and gradient must not change.
    filled = batch.cu_seqlens.diff().gt(0)[:, None, None]
    q = torch.zeros_like(k).index_add(0, starts, torch.where(filled, q, 0))
    bias, relative = batch.bias, batch.relative
    context = _attention(parts, q, k, v, batch, asked, bias, asked.gate, scale, relative=relative)
    return context.index_select(0, starts).flatten(1)
