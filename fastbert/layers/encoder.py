"""One encoder layer's mathematics, as calls to ops: in training and inference, whatever its parts are.

    q, k, v = x Wqᵀ + bq, x Wkᵀ + bk, x Wvᵀ + bv
    a = LayerNorm(x + dropout(attention(q, k, v) Woᵀ + bo))
    y = LayerNorm(a + dropout(act(a Wiᵀ + bi) Wfᵀ + bf))

`attention.py` has the first line and attention itself, `dense_norm.py` what follows. A layer whose norms come
before the blocks has the rest of its mathematics in `pre_norm.py`, a layer with bottlenecks in
`bottleneck.py`. `first_token.py` has the last layer of a call that asks for first tokens alone.

`layer` is the whole of it, a function of a form (form.py, plain data), of parts (modules that hold the
parameters) and of packed tokens (batch.py). A part that is no longer plain (LoRA, parametrized, hooked) is
called itself, and the rest stays fused (linear.py). Attention's width, heads times their size, need not be
the hidden size. A layer without heads adds the bias bo alone; a layer without inner columns adds bf alone.

Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
"""

from __future__ import annotations

from torch import Tensor

from fastbert.layers import bottleneck, pre_norm
from fastbert.layers.asked import NOTHING_MORE, Asked
from fastbert.layers.attention import attend
from fastbert.layers.batch import PackedBatch
from fastbert.layers.dense_norm import dense_norm, feed_forward
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.linear import kind_of


def layer(
    form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
) -> tuple[Tensor, Tensor | None]:
    """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None).

    Those of a layer that may have global tokens are (total, nheads, width); see `bands.py`.
    With `asked.kept` it returns ((kept, hidden), the rows of the kept tokens). `first_token.layer` takes
    `asked.first_only`.
    """
    assert not asked.first_only
    if parts.int8:
        parts = parts.as_multiplied(form.names)
    context, more = attend(form, parts, x, batch, asked)
    if asked.kept is not None and more is not None:
        x, context = x.index_select(0, more), context.index_select(0, more)
    return after_attention(form, parts, x, context, batch, asked), more


def after_attention(
    form: LayerForm, parts: Parts, x: Tensor, context: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
) -> Tensor:
    """The layer's output from what attention has computed.

    Args:
        x: (rows, hidden), the layer's input.
        context: (rows, nheads, headdim) or (rows, nheads · headdim), the output of attention.
    """
    if form.pre_norm:
        return pre_norm.rest_of_pre_norm(form, parts, x, context, batch, asked)
    if form.bottleneck is not None:
        return bottleneck.rest_in_bottleneck(form, parts, x, context, batch, asked)
    kind = parts.kind
    up = (kind or kind_of(parts.intermediate)) if asked.half and parts.feed is None else None
    rounds = [] if up is not None and up.float_weight else None
    how = parts.rates[1], batch.seed, asked.site + 1, parts.fuses_norm, asked.arrivals, rounds, kind
    x = dense_norm(parts.attention_output, parts.attention_norm, context.flatten(1), x, *how)
    if asked.taps is not None:
        x, rounds = asked.taps.attended(asked.number, x, batch), None
    return feed_forward(form, parts, x, batch, asked, rounds[0] if rounds else None)
