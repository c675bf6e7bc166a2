"""Longformer's attention: a window per token, and global tokens, which see all tokens and are seen by all.

A token that is not global sees the keys of its window and those of the global tokens of its sequence, each
key once. One softmax is over both, so with the lse of the window's scores s

    [w_0, w_g] = softmax([lse, s_g])        g: the global tokens outside the window
    out = w_0 · attention in the window + Σ w_g v_g

A global token sees all tokens of its sequence, by query, key and value projections of its own. Work grows in
proportion to the number of tokens, times the window plus the number of global tokens.

The op's lse carries no gradient. dlse/dq = scale · P k and dlse/dk = scale · Pᵀ q, which are the gradients of
scale · q · (P k) for a constant P: a second call of the op with k in place of v.

Source: Beltagy, Peters, Cohan 2020, "Longformer: The Long-Document Transformer", sec. 3.1.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastbert.layers.asked import Asked
from fastbert.layers.batch import Globals, PackedBatch
from fastbert.layers.form import INNER_SITE, LayerForm, LayerNames, Parts
from fastbert.layers.linear import apply_linear, has_float_weight
from fastbert.layers.modules import part
from fastbert.layers.packing import positions_of
from fastbert.layers.parts import SelfAttention, both
from fastbert.layers.positions import window_bias
from fastbert.ops import attention as ops
from fastbert.ops import checks
from fastbert.ops.attention_grid import from_grid, to_grid
from fastbert.ops.dropout import philox_keep
from fastbert.ops.first_attention import first_attention, pays


def projections(names: LayerNames) -> tuple[str, str, str]:
    """Paths of the layers that make the query of a global token, and the keys and values that it sees."""
    return f"{names.query}_global", f"{names.key}_global", f"{names.value}_global"


def of(flags: Tensor | None, batch: PackedBatch) -> Globals | None:
    """The global tokens of a batch; None if there are none.

    Args:
        flags: (total,) bool, which tokens are global, or None.
        batch: where the sequences are.
    """
    if flags is None or torch.compiler.is_compiling():
        return None if flags is None else Globals(flags)
    rows = flags.nonzero().squeeze(1)
    if rows.shape[0] == 0:
        return None
    ends, count = batch.cu_seqlens, rows.shape[0]
    sequence, position = positions_of(ends, flags.shape[0])
    counts = sequence[rows].bincount(minlength=ends.shape[0] - 1)
    slot = torch.arange(int(counts.max()), device=rows.device)
    first = counts.cumsum(0) - counts
    numbers = torch.where(slot < counts[:, None], first[:, None] + slot, count)
    positions = _at(position[rows], numbers)
    some = counts.nonzero().squeeze(1)
    if some.shape[0] == counts.shape[0]:
        return Globals(flags, rows, numbers, positions, ends=ends)
    keys = (counts[sequence] > 0).nonzero().squeeze(1)
    lengths = ends.diff()[some].cumsum(0, dtype=torch.int32)
    return Globals(flags, rows, numbers, positions, some, keys, torch.nn.functional.pad(lengths, (1, 0)))


def attention(
    form: LayerForm,
    parts: Parts,
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    batch: PackedBatch,
    asked: Asked,
) -> Any:
    """The attention of a batch with global tokens, as the op `attention` returns it.

    Args:
        form, parts: the layer's.
        x: (total, hidden), the layer's input.
        qkv: query, key and value, each (total, nheads, head_dim).
        batch: has the global tokens. If it has columns, its bias has the window.
        asked: what is asked of the layer.

    Raises:
        ValueError: the call is causal, or taps look at the layer.
    """
    if batch.causal or asked.taps is not None:
        what = "causal: got True" if batch.causal else "model: is tapped"
        raise ValueError(f"{what}, but the call has global tokens, which see all tokens by other projections")
    if asked.probabilities or torch.compiler.is_compiling():
        return _dense(form, parts, x, qkv, batch, asked)
    found = _merged(form, parts, qkv, batch, asked)
    own = _of_global_tokens(form, parts, x, batch, asked).to(found.dtype)
    assert batch.globals is not None
    found = found.index_copy(0, batch.globals.rows, own)
    return found if asked.gate is None else found * asked.gate.to(found.dtype)[:, None]


def _merged(
    form: LayerForm, parts: Parts, qkv: tuple[Tensor, Tensor, Tensor], batch: PackedBatch, asked: Asked
) -> Tensor:
    """What tokens see that are not global, (total, nheads, head_dim)."""
    q, k, v = qkv
    known, rate, scale = batch.globals, parts.rates[0], form.softmax_scale
    assert known is not None
    assert form.window is not None
    ends, longest, total = batch.cu_seqlens, batch.max_seqlen, q.shape[0]
    window = form.window if batch.columns is None else None
    how: dict[str, Any] = dict(
        softmax_scale=scale, window=window, bias=batch.bias, places=batch.fitting_places()
    )
    out, lse = ops.attention(
        *(q, k, v, ends, longest),
        dropout_p=rate,
        seed=batch.seed,
        offset=asked.site,
        return_lse=True,
        **how,
    )
    lse = lse.t()
    with torch.autocast(q.device.type, enabled=False):
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
            mean: Any = ops.attention(q.detach(), k.detach(), k, ends, longest, **how)
            own = (q.to(lse.dtype) * mean.to(lse.dtype)).sum(-1) * scale
            lse = lse + own - own.detach()
        queries, lse = (to_grid(t.to(lse.dtype), ends, longest).transpose(1, 2) for t in (q, lse))
        slots = _at(known.rows, known.numbers, total)
        keys, values = (_at(t, slots).to(lse.dtype).transpose(1, 2) for t in (k, v))
        scores = queries * scale @ keys.transpose(2, 3)  # (batch, nheads, S, most)
        if batch.columns is None:
            columns, own = torch.arange(longest, device=q.device)[None], known.positions
        else:
            columns, own = batch.columns, batch.columns.gather(1, known.positions)
        distance = own[:, None, :] - columns[:, :, None]
        hidden = (distance >= -form.window[0]) & (distance <= form.window[1]) | (slots == total)[:, None]
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        weights = torch.cat((lse.unsqueeze(-1), scores), -1).softmax(-1)
        own, others = weights[..., :1], weights[..., 1:]
        if rate:
            # The bits of `_dense`, where the op draws them
            rows = ends[:-1, None] + torch.arange(longest, device=q.device)
            keep = _keep(batch, asked.site, form.nheads, rows, known.positions, rate)
            others = others * keep / (1.0 - rate)
        own, others = (from_grid(t.transpose(1, 2), ends, total) for t in (own, others @ values))
        return (own * out + others).to(out.dtype)


def _of_global_tokens(form: LayerForm, parts: Parts, x: Tensor, batch: PackedBatch, asked: Asked) -> Tensor:
    """What global tokens see, (count, nheads, head_dim)."""
    known, rate, scale = batch.globals, parts.rates[0], form.softmax_scale
    assert known is not None
    query, key, value = (part(parts.owner, path) for path in projections(form.names))
    shape, numbers, ends = (-1, form.nheads, form.head_dim), known.numbers, known.ends
    q = apply_linear(query, x.index_select(0, known.rows)).reshape(shape)
    if known.sequences is not None:
        numbers, x = numbers.index_select(0, known.sequences), x.index_select(0, known.keys)
    if (
        numbers.shape[1] == 1
        and not torch.is_grad_enabled()
        and rate == 0
        and has_float_weight(key)
        and has_float_weight(value)
        and checks.autocast_dtype(x) is None
        and pays(x, q.shape[0])
    ):
        weights = key.weight, value.weight, value.bias
        found = first_attention(x, q, *weights, ends, softmax_scale=scale, max_seqlen=batch.max_seqlen)
        return found.reshape(shape)
    k, v = (apply_linear(module, x).reshape(shape) for module in (key, value))
    wide = checks.compute_dtype(q)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (to_grid(t, ends, batch.max_seqlen).to(wide).transpose(1, 2) for t in (k, v))
        queries = _at(q, numbers).to(wide).transpose(1, 2)
        scores = queries * scale @ k.transpose(2, 3)  # (sequences, nheads, most, S)
        position = torch.arange(batch.max_seqlen, device=x.device)
        scores = scores.masked_fill((position >= ends.diff()[:, None])[:, None, None], -math.inf)
        probs = scores.softmax(-1)
        if rate:
            rows = _at(known.rows, numbers)
            keep = _keep(batch, asked.site + INNER_SITE, form.nheads, rows, position[None], rate)
            probs = probs * keep / (1.0 - rate)
        return (probs @ v).transpose(1, 2)[numbers < known.rows.shape[0]].to(q.dtype)


def _dense(
    form: LayerForm,
    parts: Parts,
    x: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    batch: PackedBatch,
    asked: Asked,
) -> Any:
    """As `attention`, by scores of all pairs of tokens; the host need not know how many tokens are global."""
    known = batch.globals
    assert known is not None
    assert form.window is not None
    flags = to_grid(known.flags, batch.cu_seqlens, batch.max_seqlen)
    bias: Any = batch.bias if batch.columns is not None else window_bias(batch, form.window)
    modules = (part(parts.owner, path) for path in projections(form.names))
    q, k, v = (apply_linear(m, x).reshape(-1, form.nheads, form.head_dim) for m in modules)
    how: dict[str, Any] = dict(
        softmax_scale=form.softmax_scale,
        gate=asked.gate,
        dropout_p=parts.rates[0],
        seed=batch.seed,
        return_probs=asked.probabilities,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        places=batch.fitting_places(),
    )
    bias = torch.where(flags[:, None, None, :], 0.0, bias)
    found: Any = ops.attention(*qkv, bias=bias, offset=asked.site, **how)
    own: Any = ops.attention(q, k, v, offset=asked.site + INNER_SITE, **how)
    rows = known.flags[:, None, None]
    if not asked.probabilities:
        return torch.where(rows, own, found)
    return torch.where(rows, own[0], found[0]), torch.where(flags[:, None, :, None], own[1], found[1])


def _at(x: Tensor, places: Tensor, missing: int = 0) -> Tensor:
    """`x[places]`, and `missing` where a place is the end of `x`."""
    return torch.cat((x, x.new_full((1, *x.shape[1:]), missing)))[places]


def _keep(batch: PackedBatch, site: int, nheads: int, rows: Tensor, positions: Tensor, rate: float) -> Tensor:
    """What dropout keeps, (batch, nheads, queries, keys) bool, drawn as the op `attention` draws it.

    Args:
        rows: (batch, queries), the packed rows of the queries.
        positions: (batch or 1, keys), where the keys are in their sequence.
    """
    assert batch.seed is not None
    heads = torch.arange(nheads, device=rows.device)[:, None, None]
    at = rows.long()[:, None, :, None], positions[:, None, None, :]
    return philox_keep(batch.seed, site, heads, *at, rate)


class GlobalAttention(SelfAttention):
    """Self-attention with a window and global tokens.

    Args:
        form, steps, norm: see `SelfAttention`.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        grid: PackedBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `SelfAttention`.

        Args:
            grid: has the global tokens.
        """
        assert grid is not None
        assert self.form.window is not None
        flags = None if grid.globals is None else grid.globals.flags
        seqlen = hidden_states.shape[1]
        bias = window_bias(replace(grid, max_seqlen=seqlen, bias=None, columns=None), self.form.window)
        if flags is not None:
            bias = torch.where(flags[:, None, None, :], 0.0, bias)

        def attended(end: str, mask: Tensor | None) -> tuple[Tensor, Tensor]:
            heads = (-1, self.attention_head_size)
            each = (self._modules[name + end](hidden_states).unflatten(-1, heads) for name in self.inputs)
            q, k, v = (t.transpose(1, 2) for t in each)
            return self.attended(q, k, v, hidden_states, mask, head_mask)

        found = attended("", bias == 0 if attention_mask is None else both(attention_mask, bias))
        if flags is None:
            return found
        own = attended("_global", attention_mask)
        context = torch.where(flags[:, :, None], own[0], found[0])
        return context, torch.where(flags[:, None, :, None], own[1], found[1])
