"""A pre-norm layer's mathematics, as calls to ops: its norms come before the blocks.

    q, k, v = rotated heads of norm(x) Wqkvᵀ
    z = x + dropout(attention(q, k, v) Woᵀ)
    y = z + dropout(act(a) · b) Wdᵀ,    [a, b] = norm(z) Wuᵀ

`attend` (encoder.py) computes attention for both kinds of layer, so that taps, gates and probabilities are
the same there; this file has the rest. The sum z and its norm are one pass. The layer's own sum y is not
normed here: the next layer does that, or the model's last norm.

Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture"; Shazeer 2020, "GLU
Variants Improve Transformer"; Warner et al. 2024, "Smarter, Better, Faster, Longer" (ModernBERT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, cast

from torch import Tensor, nn

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import (
    apply_linear,
    dropped,
    is_empty,
    joins_products,
    norm_op,
    product_and_bias,
    weight_panels,
)
from fastbert.layers.modules import calls_all, is_plain
from fastbert.ops.feed_forward import feed_forward
from fastbert.ops.linear import linear


def after_attention(
    form: LayerForm, parts: Parts, x: Tensor, context: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The layer's output from its input (rows, hidden) and what attention has computed.

    Args:
        context: (rows, nheads, headdim) or (rows, nheads · headdim).
    """
    how = parts.rates[1], batch.seed, asked.site + 1, parts.fuses_norm
    y, z = dense_sum_norm(parts.attention_output, parts.output_norm, context.flatten(1), x, *how)
    return feed_forward_sum(form, parts, y, z, batch, asked)


def feed_forward_sum(
    form: LayerForm, parts: Parts, y: Tensor, z: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The layer's output from the sum z (rows, hidden) after attention, and y, its norm."""
    if parts.feed is not None:
        return feed_by_stock(parts.feed, z, asked)
    rate, up, down = parts.rates[2], parts.intermediate, parts.output
    joins = parts.gate is None and rate == 0.0 and asked.taps is None
    if joins and joins_products(up, down, y, form.activation):
        y = feed_forward(y, up.weight, up.bias, down.weight, cast(str, form.activation), form.gated)
        return z + (y if down.bias is None else y + down.bias)
    inner = gated_inner(form, parts, y, batch, asked)
    if rate > 0.0:
        inner = dropped(inner, rate, batch.seed, asked.site + 2)
    return dense_sum(parts.output, inner, z)


def feed_by_stock(feed: Callable[[Tensor], Tensor], x: Tensor, asked: Asked) -> Tensor:
    """The stock feed-forward block's output for (rows, hidden).

    Raises:
        ValueError: there are taps.
    """
    if asked.taps is not None:
        raise ValueError("taps: the stock feed-forward block runs, and does not show what is inside it")
    return feed(x)


def gated_inner(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked) -> Tensor:
    """The product of a gated block's halves, or what taps make of it: (rows, hidden) -> (rows, inner)."""
    if parts.gate is None:
        inner = apply_linear(parts.intermediate, x, form.activation, form.gated)
    else:
        inner = apply_linear(parts.gate, x, form.activation) * apply_linear(parts.intermediate, x)
    return inner if asked.taps is None else asked.taps.inner(asked.number, inner, batch)


def dense_sum_norm(
    dense: nn.Module,
    norm: nn.Module,
    x: Tensor,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
) -> tuple[Tensor, Tensor]:
    """(norm(z), z) with z = residual + dropout(dense(x)); one pass after the product, as in `dense_norm`."""
    x, x_bias = product_and_bias(dense, x)
    if fuse and (op := norm_op(norm)) is not None:
        how: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed, "offset": offset, "return_sum": True}
        return op(x, residual=residual, x_bias=x_bias, **how)
    if x_bias is not None:
        x = x + x_bias
    if dropout_p > 0:
        x = dropped(x, dropout_p, seed, offset)
    z = residual + x
    return norm(z), z


def dense_sum(dense: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """residual + dense(x); one op on a CPU. On a GPU the fastest product takes no residual."""
    if _is_read(dense) and not x.is_cuda and dense.weight.dtype == x.dtype == residual.dtype:
        return linear(x, dense.weight, dense.bias, residual=residual, panels=weight_panels(dense, x))
    return residual + apply_linear(dense, x)


def _is_read(dense: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether our op may read the weights of a linear layer."""
    return is_plain(dense, nn.Linear) and not is_empty(dense) and not calls_all()
