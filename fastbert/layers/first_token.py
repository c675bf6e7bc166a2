"""The attention of each sequence's first token alone, whose row is all that is asked of the last layer."""

from __future__ import annotations

import torch
from torch import Tensor

from fastbert.layers import attention, encoder, packing
from fastbert.layers.asked import Asked
from fastbert.layers.attention_cases import attended
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import apply_linear, kind_of
from fastbert.ops import checks
from fastbert.ops.first_attention import first_attention, pays


def layer(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked) -> tuple[Tensor, None]:
    """`encoder.layer` with `asked.first_only`: (total, hidden) -> ((batch, hidden), None)."""
    if parts.int8:
        parts = parts.as_multiplied(form.names)
    first, context = _attend(form, parts, x, batch, asked)
    return encoder.after_attention(form, parts, first, context, batch, asked), None


def _attend(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked
) -> tuple[Tensor, Tensor]:
    """x and attention's output at the rows `packing.starts`: (batch, hidden), (batch, nheads · head_dim)."""
    starts = packing.starts(batch.cu_seqlens, x.shape[0])
    first = x.index_select(0, starts)
    if form.kinds - {"gated"} or form.nheads == 0 or batch.lengths is not None:
        return first, attention.attend(form, parts, x, batch, asked)[0].index_select(0, starts).flatten(1)
    key, value, kind = parts.key, parts.value, parts.kind
    shape, scale = (-1, form.nheads, form.head_dim), form.softmax_scale
    q = apply_linear(parts.query, first, kind=kind).reshape(shape)
    kinds = [kind or kind_of(key), kind or kind_of(value)]
    if (
        not torch.is_grad_enabled()
        and parts.rates[0] == 0.0
        and all(each is not None and each.float_weight for each in kinds)
        and checks.autocast_dtype(x) is None
        and not torch.compiler.is_compiling()
        and not batch.causal
        and pays(x, starts.shape[0])
    ):
        weights = key.weight, value.weight, value.bias
        more = {"bias": batch.first_bias(), "gate": asked.gate, "max_seqlen": batch.max_seqlen}
        return first, first_attention(x, q, *weights, batch.cu_seqlens, softmax_scale=scale, **more)
    k, v = (apply_linear(module, x, kind=kind).reshape(shape) for module in (key, value))
    # Rows other than `starts` get a query of zeros, and their results are dropped. For an empty sequence
    # `starts` repeats a row of another sequence, whose query and gradient must not change.
    filled = batch.cu_seqlens.diff().gt(0)[:, None, None]
    q = torch.zeros_like(k).index_add(0, starts, torch.where(filled, q, 0))
    bias, relative = batch.bias, batch.relative
    context = attended(parts, q, k, v, batch, asked, bias, asked.gate, scale, relative=relative)
    return first, context.index_select(0, starts).flatten(1)
