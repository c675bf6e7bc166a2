"""A pre-norm layer's mathematics, as calls to ops: its norms come before the blocks.

    q, k, v = rotated heads of norm(x) Wqkvᵀ
    z = x + dropout(attention(q, k, v) Woᵀ)
    y = z + dropout(act(a) · b) Wdᵀ,    [a, b] = norm(z) Wuᵀ

`attend` (attention.py) computes attention for both kinds of layer, so that taps, gates and probabilities are
the same there; this file has the rest. The sum z and its norm are one pass. The layer's own sum y is not
normed here: the next layer does that, or the model's last norm.

Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture"; Shazeer 2020, "GLU
Variants Improve Transformer"; Warner et al. 2024, "Smarter, Better, Faster, Longer" (ModernBERT).
"""

from __future__ import annotations

from torch import Tensor

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.dense_norm import add_norm, dropped, gated_inner, product_and_bias
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import apply_linear, apply_norm, common_kind, kind_of, norm_op


def rest_of_pre_norm(
    form: LayerForm, parts: Parts, x: Tensor, context: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The layer's output from its input (rows, hidden) and what attention has computed.

    Args:
        context: (rows, nheads, headdim) or (rows, nheads · headdim).
    """
    dense, how = parts.attention_output, (parts.rates[1], batch.seed, asked.site + 1)
    op = norm_op(parts.output_norm, parts.kind is not None) if parts.fuses_norm else None
    product = product_and_bias(dense, context.flatten(1), parts.kind or kind_of(dense))
    y, z = add_norm(op, parts.output_norm, *product, x, *how, returns_sum=True)
    return _feed_forward_sum(form, parts, y, z, batch, asked)


def feed_forward(form: LayerForm, parts: Parts, z: Tensor, batch: PackedBatch, asked: Asked) -> Tensor:
    """The layer's output from the sum z (rows, hidden) after attention."""
    norm = parts.output_norm
    y = apply_norm(norm, z, parts.kind is not None) if parts.fuses_norm else norm(z)
    return _feed_forward_sum(form, parts, y, z, batch, asked)


def _feed_forward_sum(
    form: LayerForm, parts: Parts, y: Tensor, z: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """`feed_forward` with y, the norm of z."""
    if parts.feed is not None:
        return parts.feed(z)
    rate, up, down = parts.rates[2], parts.intermediate, parts.output
    joins = parts.gate is None and rate == 0.0 and asked.taps is None
    both = (parts.kind or common_kind(up, down)) if joins else None
    if both is not None and (fed := both.feed(y, up, down, form.activation, form.gated)) is not None:
        return z + (fed if down.bias is None else fed + down.bias)
    inner = gated_inner(form, parts, y, batch, asked)
    if rate > 0.0:
        inner = dropped(inner, rate, batch.seed, asked.site + 2)
    kind = parts.kind or kind_of(down)
    found = None if kind is None else kind.add(inner, down, z)
    return z + apply_linear(down, inner, kind=kind) if found is None else found
