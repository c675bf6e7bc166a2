"""DeBERTa's disentangled attention: scores of the distance between two tokens, as an additive bias.

    score(i, j) = (q_i · k_j + q_i · Kr[c(i - j)] + k_j · Qr[c(i - j)]) / sqrt(3 · head_dim)

c maps a distance to a row of the table of distances: near distances to rows of their own, far distances to
logarithmic buckets. Kr and Qr are that table after the layer's key and query layers, or after layers of its
own. The factor counts the terms that there are.

Some models add a convolution of the layer's input to the output y of the first layer.

    y' = LayerNorm(y + act(dropout(conv(x))))

Source: He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", sec. 3.1, eq. 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.asked import Asked
from fastbert.layers.batch import Distances, PackedBatch, Relative
from fastbert.layers.form import INNER_SITE, LayerForm, LayerNames, Parts
from fastbert.layers.linear import apply_linear, apply_norm, dropped, has_float_weight
from fastbert.layers.modules import calls_all, part, plain_dropout, watched
from fastbert.layers.packing import Packing
from fastbert.layers.parts import SelfAttention
from fastbert.ops import checks
from fastbert.ops.activation import SPELLINGS, activate_eager
from fastbert.ops.attention_grid import to_grid
from fastbert.runtime import prepared

# Most elements of the scores by row of the table that are in memory at once
_MOST = 1 << 24


def buckets(distance: Tensor, relative: Relative) -> Tensor:
    """Rows of the table of distances, of the shape of `distance` (int64, query - key)."""
    bucket, middle = distance, relative.buckets // 2
    if middle:
        # In float32, as transformers computes it
        size = distance.abs()
        far = torch.log(size.clamp_min(middle).float() / middle)
        far = far / torch.log(torch.tensor((relative.farthest - 1) / middle, device="cpu"))
        far = torch.ceil(far * (middle - 1)) + middle
        bucket = torch.where(size <= middle, distance, (far * distance.sign()).long())
    return (bucket + relative.span).clamp(0, 2 * relative.span - 1)


def projections(form: LayerForm) -> tuple[str | None, str | None]:
    """Paths of the layers that make Kr and Qr from the table of distances; None for a missing term."""
    assert form.relative is not None
    names, (above, _, _) = form.names, form.names.query.rpartition(".")
    key, query = f"{above}.pos_key_proj", f"{above}.pos_query_proj"
    if form.relative.shared:
        key, query = names.key, names.query
    terms = form.relative.terms
    return key if "c2p" in terms else None, query if "p2c" in terms else None


def dropout(names: LayerNames) -> str:
    """Path of the dropout of the table of distances."""
    return f"{names.query.rpartition('.')[0]}.pos_dropout"


def bias(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor | None:
    """The batch's bias with the scores of distances.

    Args:
        form, parts: the layer's.
        q, k: (total, nheads, head_dim).
        batch: has the table of distances.
        asked: has the dropout's call site.

    Returns:
        (batch, nheads, S, S) in float32, float64 for float64 `q`; None if there is neither bias nor term.
    """
    distances = batch.distances
    assert distances is not None
    tables = _tables(form, parts, distances, batch.seed, asked.site + INNER_SITE, q)
    q, k = (to_grid(t, batch.cu_seqlens, batch.max_seqlen) for t in (q, k))
    own = scores(form, tables, q, k, batch.columns)
    if own is None or batch.bias is None:
        return batch.bias if own is None else own
    return own + batch.bias


def _tables(
    form: LayerForm, parts: Parts, distances: Distances, seed: Tensor | None, site: int, q: Tensor
) -> list[Tensor | None]:
    """Kr and Qr, each (2 · span, nheads · head_dim) in the dtype of the scores, or None."""
    rate, rows = (0.0, *parts.rates[3:])[-1], distances.rows
    if rate:
        rows = dropped(rows, rate, seed, site)
    shared = {form.names.key: parts.key, form.names.query: parts.query}
    modules: list[Any] = [
        None if p is None else shared[p] if p in shared else part(parts.owner, p) for p in projections(form)
    ]

    def build() -> list[Tensor | None]:
        return [None if m is None else apply_linear(m, rows).to(checks.compute_dtype(q)) for m in modules]

    there = [m for m in modules if m is not None]
    if (
        torch.is_grad_enabled()
        or rate
        or not distances.sources
        or torch.compiler.is_compiling()
        or checks.autocast_dtype(q) is not None
        or not all(map(has_float_weight, there))
    ):
        return build()
    sources = *distances.sources, *(p for m in there for p in m.parameters())
    return prepared.derived(parts.owner, ("distances", q.dtype), sources, build)


def scores(
    form: LayerForm, tables: list[Tensor | None], q: Tensor, k: Tensor, columns: Tensor | None = None
) -> Tensor | None:
    """The scores of distances, (batch, nheads, S, S) in the dtype of `tables`; None without tables.

    Args:
        form: the layer's form.
        tables: Kr and Qr, see `bias`.
        q, k: (batch, S, nheads, head_dim).
        columns: see `PackedBatch`.
    """
    relative, (size, seqlen) = form.relative, q.shape[:2]
    assert relative is not None
    if not relative.terms:
        return None
    first, last = 0, 2 * relative.span
    if columns is None:
        columns = torch.arange(seqlen, device=q.device)[None]
        if not torch.compiler.is_compiling():
            reach = _reach(seqlen, relative)
            first, last = max(relative.span - reach, 0), min(relative.span + reach + 1, last)
    index = buckets(columns[:, :, None] - columns[:, None, :], relative) - first
    kept = [None if t is None else t[first:last].unflatten(1, (form.nheads, form.head_dim)) for t in tables]
    per_chunk = max(size, 1)
    if not torch.compiler.is_compiling():
        per_chunk = max(1, _MOST // max(form.nheads * seqlen * (last - first), 1))
    chunks = zip(
        q.split(per_chunk), k.split(per_chunk), index.expand(size, -1, -1).split(per_chunk), strict=True
    )
    found = [_scores(*chunk, kept, form.softmax_scale) for chunk in chunks]
    return found[0] if len(found) == 1 else torch.cat(found)


def _reach(seqlen: int, relative: Relative) -> int:
    """At least the bucket of the largest distance among `seqlen` tokens."""
    far, middle = max(seqlen - 1, 0), relative.buckets // 2
    if not middle or far <= middle:
        return min(far, relative.span)
    grown = math.log(far / middle) / math.log((relative.farthest - 1) / middle) * (middle - 1)
    return min(math.ceil(grown) + middle + 1, relative.span)


def _scores(q: Tensor, k: Tensor, index: Tensor, tables: list[Tensor | None], scale: float) -> Tensor:
    """As `scores`, of the rows `index` (batch, S, S) of the tables, each (rows, nheads, head_dim)."""
    keys, queries = tables
    # Scaled before the product, which might overflow in half precision
    terms = []
    for x, table, at in ((q, keys, index), (k, queries, index.transpose(1, 2))):
        if table is not None:
            x = (x.to(table.dtype) * scale).transpose(1, 2)  # (batch, nheads, S, head_dim)
            every = x @ table.permute(1, 2, 0)  # (batch, nheads, S, rows)
            terms.append(every.gather(-1, at[:, None].expand(-1, every.shape[1], -1, -1)))
    if queries is not None:
        terms[-1] = terms[-1].transpose(2, 3)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


class Convolution(nn.Module):
    """The convolution beside the first layer.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        super().__init__()
        width, size = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(width, width, size, padding=size // 2, groups=config.conv_groups)
        self.LayerNorm = config.norm(width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.act = SPELLINGS[config.conv_act]

    def dropout_rate(self) -> float:
        """The probability of the dropout module now; 0 if another module, which is called, replaces it."""
        module = self.dropout
        return module.p if plain_dropout(module) and module.training else 0.0

    def beside(self, packed: Packing, x: Tensor, seed: Tensor | None, y: Tensor) -> Tensor:
        """The output (rows, hidden) of the first layer with the convolution.

        Args:
            packed: the places of the rows.
            x: (rows, hidden), the input of the first layer.
            seed: of the dropout; its call site is `INNER_SITE`.
            y: (rows, hidden), the output of the first layer.
        """
        grid, kept = packed.grid(x)
        if calls_all() or any(map(watched, self.modules())) or not plain_dropout(self.dropout):
            mask = torch.ones(grid.shape[:2], device=x.device) if kept is None else kept
            return packed.from_grid(self(grid, packed.grid(y)[0], mask))
        found, rate = packed.from_grid(self._convolved(grid)), self.dropout_rate()
        if rate:
            found = dropped(found, rate, seed, INNER_SITE)
        return apply_norm(self.LayerNorm, y + activate_eager(found, self.act))

    def _convolved(self, grid: Tensor) -> Tensor:
        return self.conv(grid.transpose(1, 2)).transpose(1, 2)

    def forward(self, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        """As `beside`, by modules on a padded batch (batch, seqlen, hidden), zeros at masked tokens."""
        kept = input_mask.bool().unsqueeze(2)
        found = self._convolved(hidden_states).masked_fill(kept.logical_not(), 0)
        found = activate_eager(self.dropout(found), self.act)
        return self.LayerNorm(residual_states + found) * kept


class DisentangledAttention(SelfAttention):
    """Self-attention that scores the distance between two tokens.

    Args:
        form, steps, norm: see `SelfAttention`.
    """

    def __init__(self, form: LayerForm, *steps: str, norm: str | None = None):
        super().__init__(form, *steps, norm=norm)
        self.form = form

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        grid: PackedBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `SelfAttention`.

        Args:
            grid: has the table of distances.
        """
        assert grid is not None
        assert grid.distances is not None
        heads = (-1, self.attention_head_size)
        q, k, v = (self._modules[name](hidden_states).unflatten(-1, heads) for name in self.inputs)
        rows = self._modules["pos_dropout"](grid.distances.rows)
        paths = projections(self.form)
        tables = [None if p is None else self._modules[p.rpartition(".")[2]](rows) for p in paths]
        own = scores(self.form, tables, q, k)
        if own is not None and attention_mask is not None and attention_mask.dtype == torch.bool:
            own = own.masked_fill(attention_mask.logical_not(), torch.finfo(own.dtype).min)
        elif own is not None and attention_mask is not None:
            own = own + attention_mask
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.attended(q, k, v, hidden_states, attention_mask if own is None else own, head_mask)
