"""A linear layer with what follows it in a block: dropout, the residual sum and the norm.

    norm(x + dropout(down(act(up(x)))))

Source: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers", sec. 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.form import INNER_SITE, LayerForm, Parts
from fastbert.layers.linear import LinearKind, apply_linear, common_kind, kind_of, norm_op
from fastbert.layers.modules import is_no_norm
from fastbert.ops.dropout import keep_mask_2d


def dense_norm(
    dense: Any,
    norm: Any,
    x: Tensor,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
    arrivals: list[Tensor] | None = None,
    rounds: list[Tensor] | None = None,
    kind: LinearKind | None = None,
) -> Tensor:
    """norm(residual + dropout(dense(x))).

    If `fuse` is set and our op computes the norm, its pass also adds the linear layer's bias, drops, and adds
    the residual; in inference it is one op with the product where that pays (`LinearKind.normed`). `arrivals`
    keeps the counters of that op from call to call, in the order in which the device runs the calls. Under
    autocast `rounds`, if given, gets the result once more, for a product that reads it rounded. Before a
    NoNorm the product adds the bias, as it does where no residual follows. `kind` is that of a layer whose
    linear layers and norms are all plain.
    """
    op = norm_op(norm, kind is not None) if fuse else None
    kind = kind or kind_of(dense)
    asks = kind if op is not None and dropout_p == 0.0 else None
    if asks is not None and (y := asks.normed(x, dense, residual, norm, arrivals)) is not None:
        return y
    adds = type(norm) is not nn.LayerNorm and is_no_norm(norm)
    product = product_and_bias(dense, x, kind, adds)
    return add_norm(op, norm, *product, residual, dropout_p, seed, offset, rounds)


def feed_forward_norm(
    up: Any,
    down: Any,
    norm: nn.Module,
    x: Tensor,
    activation: str | None,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
    arrivals: list[Tensor] | None = None,
    rounds: list[Tensor] | None = None,
    rounded: Tensor | None = None,
    tap: Callable[[Tensor], Tensor] | None = None,
    kind: LinearKind | None = None,
) -> Tensor:
    """norm(x + dropout(down(act(up(x))))), as `dense_norm` does it.

    The two products are one where that pays (`LinearKind.feed`). `rounded`, if given, is multiplied in place
    of `x`. `tap`, if given, replaces the tensor between the products.
    """
    rounded = x if rounded is None else rounded
    both = (kind or common_kind(up, down)) if tap is None else None
    y = None if both is None else both.feed(rounded, up, down, activation, None)
    if y is not None:
        op = norm_op(norm, kind is not None) if fuse else None
        return add_norm(op, norm, y, down.bias, x, dropout_p, seed, offset, rounds)
    inner = apply_linear(up, rounded, activation, kind=kind)
    if tap is not None:
        inner = tap(inner)
    return dense_norm(down, norm, inner, x, dropout_p, seed, offset, fuse, arrivals, rounds, kind)


def feed_forward(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked, rounded: Tensor | None = None
) -> Tensor:
    """The feed-forward block with its residual sum and norm: (rows, hidden) -> (rows, hidden).

    Args:
        rounded: `x` in the dtype of its products, if the caller has it already.
    """
    if parts.feed is not None:
        return parts.feed(x)
    how = asked.site + 2, parts.fuses_norm, asked.arrivals, asked.rounds
    if form.gated is not None:
        inner = gated_inner(form, parts, x if rounded is None else rounded, batch, asked)
        if any(parts.rates[3:]):
            inner = dropped(inner, parts.rates[3], batch.seed, asked.site + INNER_SITE)
        modules = parts.output, parts.output_norm
        return dense_norm(*modules, inner, x, parts.rates[2], batch.seed, *how, parts.kind)
    tap = None
    if asked.taps is not None:
        tap = functools.partial(asked.taps.inner, asked.number, sequences=batch)
    modules, more = (parts.intermediate, parts.output, parts.output_norm), (rounded, tap, parts.kind)
    return feed_forward_norm(*modules, x, form.activation, parts.rates[2], batch.seed, *how, *more)


def gated_inner(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked) -> Tensor:
    """The product of a gated block's halves, or what taps make of it: (rows, hidden) -> (rows, inner)."""
    up, kind = parts.intermediate, parts.kind
    if parts.gate is None:
        inner = apply_linear(up, x, form.activation, form.gated, kind)
    else:
        inner = apply_linear(parts.gate, x, form.activation, kind=kind) * apply_linear(up, x, kind=kind)
    return inner if asked.taps is None else asked.taps.inner(asked.number, inner, batch)


def product_and_bias(
    dense: Any, x: Tensor, kind: LinearKind | None, adds: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(product, bias) whose sum is dense(x); the bias is None if there is none, or `adds` adds it at once.

    Without a `kind` the module is called.
    """
    if kind is None:
        return dense(x), None
    return kind.product(x, dense, [dense], with_bias=adds), None if adds else dense.bias


def dropped(x: Tensor, dropout_p: float, seed: Tensor | None, offset: int) -> Tensor:
    """Dropout of (rows, columns), its bits as in the ops."""
    keep = keep_mask_2d(cast(Tensor, seed), offset, x.shape[0], x.shape[1], dropout_p)
    return x * (keep.to(x.dtype) * (1.0 / (1.0 - dropout_p)))


def add_norm(
    op: Callable[..., Any] | None,
    norm: nn.Module,
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    rounds: list[Tensor] | None = None,
    returns_sum: bool = False,
) -> Any:
    """norm(z) with z = residual + dropout(x + x_bias), by the norm's `op` if there is one.

    `rounds` gets the same for products, see `layer_norm`. With `returns_sum` it returns (norm(z), z).
    """
    if op is not None:
        how: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed, "offset": offset}
        how |= {"return_sum": True} if returns_sum else {"rounded": rounds is not None}
        found = op(x, residual=residual, x_bias=x_bias, **how)
        if rounds is None:
            return found
        rounds.append(found[1])
        return found[0]
    if x_bias is not None:
        x = x + x_bias
    if dropout_p > 0:
        x = dropped(x, dropout_p, seed, offset)
    z = x + residual
    y = norm(z)
    if rounds is not None:
        rounds.append(y)
    return (y, z) if returns_sum else y
