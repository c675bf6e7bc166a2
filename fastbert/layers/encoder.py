"""One encoder layer's mathematics, as calls to ops: in training and inference, whatever its parts are.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    a = LayerNorm(x + dropout(attention(q, k, v) Woᵀ + bo))
    y = LayerNorm(a + dropout(act(a Wiᵀ + bi) Wfᵀ + bf))

A layer whose norms come before the blocks has the rest of its mathematics in `pre_norm.py`, a layer with
bottlenecks in `bottleneck.py`.

`layer` is the whole of it, a function of a form (form.py, plain data), of parts (modules that hold the
parameters) and of packed tokens (batch.py). A part that is no longer plain (LoRA, parametrized, hooked) is
called itself, and the rest stays fused (linear.py). Attention's width, heads times their size, need not be
the hidden size. A layer without heads adds the bias bo alone; a layer without inner columns adds bf alone.

Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastbert.layers import (
    block_sparse,
    bottleneck,
    disentangled,
    elimination,
    global_tokens,
    packing,
    pre_norm,
)
from fastbert.layers.asked import NOTHING_MORE, Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import INNER_SITE, LayerForm, Parts
from fastbert.layers.linear import (
    apply_joined,
    apply_linear,
    apply_norm,
    dense_norm,
    dropped,
    feed_forward_norm,
    has_float_weight,
    split,
    takes_rounded,
)
from fastbert.layers.patterns import Rows
from fastbert.layers.positions import rotate, rotated, window_bias
from fastbert.layers.taps import Taps
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.attention_received import attention_received
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.first_attention import first_attention, pays


def layer(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
) -> tuple[Tensor, Tensor | None]:
    """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None).

    Those of a layer that may have global tokens are (total, nheads, width); see `global_tokens.bands`.
    With `asked.kept` it returns ((kept, hidden), the rows of the kept tokens).
    With `asked.first_only` it returns ((batch, hidden), None).
    """
    parts = parts.as_multiplied(form.names)
    if not asked.first_only:
        context, more = attend(form, parts, x, batch, asked)
        if asked.kept is not None and more is not None:
            x, context = x.index_select(0, more), context.index_select(0, more)
            batch = elimination.smaller(batch, asked.kept, more)
        return after_attention(form, parts, x, context, batch, asked), more
    starts = packing.starts(batch.cu_seqlens, x.shape[0])
    plain = not (form.rotary or form.relative or form.window or form.packed or form.bottleneck)
    plain = plain and batch.lengths is None
    if form.heads is None and form.nheads and plain:
        context = first_context(form, parts, x, starts, batch, asked)
    else:
        context = attend(form, parts, x, batch, asked)[0].index_select(0, starts)
    return after_attention(form, parts, x.index_select(0, starts), context, batch, asked), None


def attend(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """The output of self-attention, (total, nheads, headdim), and its probabilities or None.

    With `asked.kept` the rows of the tokens to keep are in place of probabilities.
    """
    heads, taps, gate, scale = form.heads, asked.taps, asked.gate, form.softmax_scale
    if form.nheads == 0:
        longest, context = batch.max_seqlen, x.new_empty(x.shape[0], 0, form.head_dim)
        if asked.kept is not None:  # all tokens receive as much: none
            return context, elimination.most_received(x.new_zeros(x.shape[0]), batch, asked.kept)
        none = x.new_empty(batch.cu_seqlens.shape[0] - 1, 0, longest, longest)
        return context, none if asked.probabilities else None
    q, k, v = projected(form, parts, x if asked.rounded is None else asked.rounded, batch)
    if asked.kept is not None:
        context, lse = _attention(parts, q, k, v, batch, asked, None, gate, scale)
        where = batch.cu_seqlens, batch.max_seqlen
        received = attention_received(q.detach(), k.detach(), *where, lse, softmax_scale=scale)
        return context, elimination.most_received(received, batch, asked.kept)
    if taps is None and not asked.probabilities:
        pieces = disentangled.pieces(form, q, batch) if form.relative is not None and heads is None else []
        if pieces:
            return disentangled.attend(form, parts, (q, k, v), pieces, asked, _attention), None
        if batch.lengths and batch.bias is None and not batch.causal:
            return block_sparse.attend(form, parts, q, k, v, batch, asked), None
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


def after_attention(
    form: LayerForm, parts: Parts, x: Tensor, context: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
) -> Tensor:
    """The layer's output from what attention has computed.

    Args:
        x: (rows, hidden), the layer's input.
        context: (rows, nheads, headdim) or (rows, nheads · headdim), the output of attention.
    """
    parts = parts.as_multiplied(form.names)
    if form.pre_norm:
        return pre_norm.after_attention(form, parts, x, context, batch, asked)
    if form.bottleneck is not None:
        return bottleneck.after_attention(form, parts, x, context, batch, asked)
    rounds = [] if parts.feed is None and takes_rounded(parts.intermediate, x) else None
    how = parts.rates[1], batch.seed, asked.site + 1, parts.fuses_norm, asked.arrivals, rounds
    x = dense_norm(parts.attention_output, parts.attention_norm, context.flatten(1), x, *how)
    if asked.taps is not None:
        x, rounds = asked.taps.attended(asked.number, x, batch), None
    return feed_forward(form, parts, x, batch, asked, rounds[0] if rounds else None)


def feed_forward(
    form: LayerForm,
    parts: Parts,
    x: Tensor,
    batch: PackedBatch,
    asked: Asked = NOTHING_MORE,
    rounded: Tensor | None = None,
) -> Tensor:
    """The feed-forward block with its residual sum and norm: (rows, hidden) -> (rows, hidden).

    Args:
        rounded: `x` in the dtype of its products, if the caller has it already.
    """
    if parts.feed is not None:
        return pre_norm.feed_by_stock(parts.feed, x, asked)
    if form.pre_norm:
        parts = parts.as_multiplied(form.names)
        norm = parts.output_norm
        y = apply_norm(norm, x) if parts.fuses_norm else norm(x)
        return pre_norm.feed_forward_sum(form, parts, y, x, batch, asked)
    if form.gated is not None:
        inner = pre_norm.gated_inner(form, parts, x if rounded is None else rounded, batch, asked)
        if any(parts.rates[3:]):
            inner = dropped(inner, parts.rates[3], batch.seed, asked.site + INNER_SITE)
        how = parts.rates[2], batch.seed, asked.site + 2, parts.fuses_norm, asked.arrivals, asked.rounds
        return dense_norm(parts.output, parts.output_norm, inner, x, *how)
    parts, tap = parts.as_multiplied(form.names), None
    if asked.taps is not None:
        tap = functools.partial(asked.taps.inner, asked.number, sequences=batch)
    how = batch.seed, asked.site + 2, parts.fuses_norm, asked.arrivals, asked.rounds, rounded, tap
    modules = parts.intermediate, parts.output, parts.output_norm
    return feed_forward_norm(*modules, x, form.activation, parts.rates[2], *how)
