"""Self-attention of a layer, from its input to the heads' outputs, as calls to ops.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    context = attention(q, k, v)

What a layer or a call may need besides is in `attention_cases.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastbert.layers import attention_cases, bottleneck
from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import apply_joined, apply_linear, apply_norm
from fastbert.layers.positions import rotate, rotated
from fastbert.ops.attention import attention


def attend(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor | None]:
    """The output of self-attention, (total, nheads, headdim), and its probabilities or None.

    With `asked.kept` the rows of the tokens to keep are in place of probabilities.
    """
    source = x if asked.rounded is None else asked.rounded
    qkv = projected(form, parts, source, batch) if form.nheads else None
    if (
        qkv is None
        or asked.kept is not None
        or asked.taps is not None
        or asked.probabilities
        or form.heads is not None
        or form.relative is not None
        or batch.lengths is not None
        or batch.globals is not None
        or (batch.columns is not None and form.window is not None)
    ):
        return attention_cases.attend_by_case(form, parts, x, qkv, batch, asked)
    context: Any = attention(
        *qkv,
        batch.cu_seqlens,
        batch.max_seqlen,
        softmax_scale=form.softmax_scale,
        causal=batch.causal,
        window=form.window,
        bias=batch.bias,
        relative=batch.relative,
        gate=asked.gate,
        dropout_p=parts.rates[0],
        seed=batch.seed,
        offset=asked.site,
        places=batch.fitting_places(),
    )
    return context, None


def projected(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (total, heads, head_dim), of the layer's input; rotated if it rotates."""
    if form.pre_norm:
        norm = parts.attention_norm
        x = apply_norm(norm, x, parts.kind is not None) if parts.fuses_norm else norm(x)
    if form.packed:
        x = apply_linear(parts.query, x, kind=parts.kind)
        return rotated(form, x, batch)
    given = (x, x) if form.bottleneck is None else bottleneck.inputs(parts, x)
    q, k, v = queries_keys_values(form, parts, *given)
    if form.rotary is None:
        return q, k, v
    return rotate(form, q, batch), rotate(form, k, batch), v


def queries_keys_values(
    form: LayerForm, parts: Parts, x: Tensor, source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (total, nheads, head_dim); a head with a fixed pattern has a value alone.

    It is one product with [Wq; Wk; Wv] if that is cheaper than three. Values are made from `source` if it is
    given, all else from `x`.
    """
    modules, rows, kind = [parts.query, parts.key, parts.value], x.shape[0], parts.kind
    nheads, size, shared = form.nheads, form.head_dim, form.kv_heads
    learned = nheads if form.heads is None else len(form.heads.learned)
    columns = [learned * size, (shared or learned) * size, (shared or nheads) * size]
    joined = apply_joined(parts.owner, modules, x, kind) if source is None or source is x else None
    if joined is not None:
        fits = joined.shape[1] == sum(columns)
    else:
        q, k = apply_linear(parts.query, x, kind=kind), apply_linear(parts.key, x, kind=kind)
        v = apply_linear(parts.value, x if source is None else source, kind=kind)
        fits = [q.shape[1], k.shape[1], v.shape[1]] == columns
    if not fits:
        wanted = f"{columns[0]}, {columns[1]} and {columns[2]} outputs, {nheads} heads of {size}"
        raise ValueError(
            f"query, key, value: expected {wanted}, got {', '.join(str(m.out_features) for m in modules)}; "
            "after pruning by hand set num_attention_heads of the attention module"
        )
    if joined is not None:
        if learned == nheads and shared is None:
            return split(joined.reshape(rows, 3, nheads, size))
        q, k, v = joined.split(columns, 1)
    own = shared or learned, shared or nheads
    return q.reshape(rows, learned, size), k.reshape(rows, own[0], size), v.reshape(rows, own[1], size)


class _Split(torch.autograd.Function):
    """`unbind(1)` whose gradients are not copied where attention's backward has written them side by side."""

    @staticmethod
    def forward(ctx, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        whole = grads[0]._base
        if (
            whole is None
            or torch.is_grad_enabled()
            or any(g._base is not whole for g in grads)
            or whole.shape != (grads[0].shape[0], 3, *grads[0].shape[1:])
            or any(
                g.data_ptr() != own.data_ptr() or g.stride() != own.stride()
                for g, own in zip(grads, whole.unbind(1), strict=True)
            )
        ):
            return torch.stack(grads, 1)
        return whole


def split(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(total, 3, nheads, head_dim) -> query, key and value, views of it."""
    trains = qkv.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    q, k, v = _Split.apply(qkv) if trains else qkv.unbind(1)
    return q, k, v
