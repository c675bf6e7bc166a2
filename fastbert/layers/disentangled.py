"""DeBERTa's disentangled attention: scores of the distance between two tokens.

    score(i, j) = (q_i · k_j + q_i · Kr[c(i - j)] + k_j · Qr[c(i - j)]) / sqrt(3 · head_dim)

c maps a distance to a row of the table of distances: near distances to rows of their own, far distances to
logarithmic buckets. Kr and Qr are that table after the layer's key and query layers, or after layers of its
own. The factor counts the terms that there are.

Some models add a convolution of the layer's input to the output y of the first layer.

    y' = LayerNorm(y + act(dropout(conv(x))))

A convolution of three tokens is a product of each packed token and its neighbours; others unpack the batch.

Source: He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", sec. 3.1, eq. 4.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch, Relative
from fastbert.layers.dense_norm import dropped
from fastbert.layers.form import INNER_SITE, LayerForm, LayerNames, Parts
from fastbert.layers.linear import apply_linear, apply_norm, kind_of
from fastbert.layers.modules import calls_all, part, plain_dropout, watched
from fastbert.layers.packing import Packing, follows, with_neighbours
from fastbert.layers.parts import SelfAttention, masked
from fastbert.layers.quantized import QuantizedLinear
from fastbert.ops import checks
from fastbert.ops.activation import SPELLINGS, activate_eager
from fastbert.ops.attention_relative import (
    RelativeScores,
    ScoreTable,
    dense_scores,
    score_table_maker,
)
from fastbert.ops.linear import linear
from fastbert.runtime import prepared

# Most bytes of the scores of queries, and of keys, that are made at once
_MOST = 24 << 20


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


def relative_scores(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, batch: PackedBatch, asked: Asked
) -> RelativeScores | None:
    """The scores of distances, as `attention` takes them; None without terms.

    Args:
        form, parts: the layer's.
        q, k: (total, nheads, head_dim).
        batch: has the table of distances.
        asked: has the dropout's call site.
    """
    relative = form.relative
    assert relative is not None
    if not relative.terms:
        return None
    tables = _tables(form, parts, batch, asked.site + INNER_SITE, q)
    return scores(relative, tables, q, k, batch.max_seqlen, batch.columns)


def pieces(form: LayerForm, q: Tensor, batch: PackedBatch) -> list[PackedBatch]:
    """Neighbouring sequences whose scores take little memory, to attend piece by piece in inference on a CPU.

    Empty if all sequences attend at once. Fresh memory of more than 32 MiB comes page by page from the
    system, which takes longer than the products.
    """
    free = batch.bias is None and batch.columns is None and not torch.is_grad_enabled()
    if q.device.type != "cpu" or not free or torch.compiler.is_compiling():
        return []
    per_row = form.nheads * min(2 * batch.max_seqlen, 1024) * q.element_size()
    most, ends = _MOST // max(per_row, 1), batch.cu_seqlens.tolist()
    if ends[-1] <= most or ends[-1] < q.shape[0]:
        return []
    found, first = [], 0
    while first < len(ends) - 1:
        last = max(first + 1, bisect.bisect_right(ends, ends[first] + most) - 1)
        lengths = batch.cu_seqlens[first : last + 1] - ends[first]
        found.append(replace(batch, cu_seqlens=lengths, places=None))
        first = last
    return found


def attend(
    form: LayerForm,
    parts: Parts,
    qkv: tuple[Tensor, Tensor, Tensor],
    pieces: list[PackedBatch],
    asked: Asked,
    attention: Callable[..., Tensor],
) -> Tensor:
    """The output of attention, (total, nheads, head_dim), piece by piece; `attention` is that of a batch."""
    found, rows = [], [int(piece.cu_seqlens[-1]) for piece in pieces]
    for q, k, v, piece in zip(*(t.split(rows) for t in qkv), pieces, strict=True):
        scores = relative_scores(form, parts, q, k, piece, asked)
        how = None, asked.gate, form.softmax_scale
        found.append(attention(parts, q, k, v, piece, asked, *how, relative=scores))
    return torch.cat(found)


# Kr and Qr, scaled, or None: (2 · span, nheads, head_dim) in the dtype of the scores, or as backends keep it
Tables = tuple[Tensor | ScoreTable | None, ...]


def _tables(form: LayerForm, parts: Parts, batch: PackedBatch, site: int, q: Tensor) -> Tables:
    """The tables of one call."""
    distances = batch.distances
    assert distances is not None
    rate, rows = (0.0, *parts.rates[3:])[-1], distances.rows
    training = torch.is_grad_enabled() or torch.compiler.is_compiling() or rate
    found = None if training else kept_tables(form, parts, batch, q)
    if found is not None:
        return found
    if rate:
        rows = dropped(rows, rate, batch.seed, site)
    modules = _projections(form, parts)
    return tuple(None if m is None else scaled(form, apply_linear(m, rows), q) for m in modules)


def _projections(form: LayerForm, parts: Parts) -> list[Any]:
    shared = {form.names.key: parts.key, form.names.query: parts.query}
    paths = projections(form)
    return [None if p is None else shared[p] if p in shared else part(parts.owner, p) for p in paths]


def kept_tables(form: LayerForm, parts: Parts, batch: PackedBatch, x: Tensor) -> Tables | None:
    """The tables in inference, kept until a weight changes; None where nothing shows that one does.

    Args:
        form, parts: the layer's.
        batch: has the table of distances.
        x: has the dtype and the device of queries and keys.
    """
    distances, modules = batch.distances, _projections(form, parts)
    assert distances is not None
    there = [m for m in modules if m is not None]
    watched_one = calls_all() or any(kind_of(m) is None for m in there)
    if not distances.sources or watched_one or checks.autocast_dtype(x) is not None:
        return None
    maker = score_table_maker(x)

    def build_one(module: Any, path: str | None) -> Tensor | ScoreTable | None:
        if module is None:
            return None
        if parts.int8 and path in form.names.linears:
            module = QuantizedLinear.from_linear(module, f"{parts.label}.{path}")
        product = _by_copies if type(module) is nn.Linear else apply_linear
        table = scaled(form, product(module, distances.rows), x)
        return table if maker is None else maker(table.to(x.dtype))

    tables = [d for m in there for d in (m._parameters, m._buffers)]
    sources = *distances.sources, *(t for d in tables for t in d.values() if t is not None)
    name = "distances", x.dtype, maker
    paths = projections(form)
    # A tuple, which `prepared.update_in_place` can update
    return prepared.derived(parts.owner, name, sources, lambda: tuple(map(build_one, modules, paths)))


def _by_copies(module: nn.Linear, x: Tensor) -> Tensor:
    """module(x), whose parameters keep their marks; kernels may remove them (runtime/prepared.py)."""
    return linear(x, module.weight.clone(), None if module.bias is None else module.bias.clone())


def scaled(form: LayerForm, table: Tensor, q: Tensor) -> Tensor:
    """Kr or Qr (2 · span, nheads, head_dim) times the scale of the scores, in the dtype of their product.

    Rows are in rising order of the distance from query to key. Products that were scaled afterwards might
    overflow in half precision. A CPU multiplies fp16 slowly.
    """
    fast = q.dtype == torch.bfloat16 or (q.dtype == torch.float16 and q.device.type != "cpu")
    wide = table.flip(0).to(checks.compute_dtype(q)) * form.softmax_scale
    return wide.to(q.dtype if fast else wide.dtype).unflatten(1, (form.nheads, form.head_dim))


def scores(
    relative: Relative,
    tables: Sequence[Tensor | ScoreTable | None],
    q: Tensor,
    k: Tensor,
    seqlen: int,
    positions: Tensor | None = None,
) -> RelativeScores:
    """The scores of distances from both tables; at least one is given.

    Args:
        relative: the form's.
        tables: Kr and Qr as `scaled` returns them.
        q, k: (total, nheads, head_dim), or padded (batch, S, nheads, head_dim).
        seqlen: the longest length.
        positions: see `RelativeScores`.
    """
    if positions is not None or torch.compiler.is_compiling():
        reach = max(relative.farthest, relative.span)
        if positions is None:
            reach = max(reach, seqlen)
    else:
        reach = reach_of(seqlen)
    columns, first, last = columns_of(relative, reach, q.device)
    products = []
    for x, table in zip((q, k), tables, strict=True):
        if table is None:
            products.append(None)
            continue
        if isinstance(table, ScoreTable):
            products.append(table.scores(x, first, last - first))
            continue
        heads = x.to(table.dtype).flatten(0, -3).transpose(0, 1)  # (nheads, rows, head_dim)
        found = torch.bmm(heads, table[first:last].permute(1, 2, 0))
        products.append(found.transpose(0, 1).unflatten(0, x.shape[:-2]))
    return RelativeScores(columns, *products, positions=positions)


def reach_of(seqlen: int) -> int:
    """The largest distance for sequences of this length, in steps, so that few tables of columns are kept."""
    return (max(seqlen, 1) + 31) // 32 * 32 - 1


def columns_of(relative: Relative, reach: int, device: torch.device) -> tuple[Tensor, int, int]:
    """(columns of `RelativeScores`, first row of the tables that they need, and the row after the last)."""
    if torch.compiler.is_compiling():
        return _columns(relative, reach, device)
    # Autograd cannot save tensors that were made in inference mode
    with torch.inference_mode(False):
        return _kept_columns(relative, reach, device)


def _columns(relative: Relative, reach: int, device: torch.device) -> tuple[Tensor, int, int]:
    back = torch.arange(reach, -reach - 1, -1, device=device)  # query - key
    found = buckets(back, relative)
    rising, first, last = 2 * relative.span - 1 - found, 0, 2 * relative.span
    if not torch.compiler.is_compiling():
        first, last = int(rising[0]), int(rising[-1]) + 1
    return (rising - first).to(torch.int32), first, last


# All are kept: a graph that was recorded reads them
_kept_columns = functools.cache(_columns)


def unpacks(config: Any) -> bool:
    """Whether the convolution beside the first layer, if a config has one, reads the padded batch."""
    return config.get("conv_kernel_size", 0) not in (0, 3) or config.get("conv_groups", 1) != 1


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
        self.conv_act = config.conv_act

    def forward(self, hidden_states: Tensor, residual_states: Tensor, input_mask: Tensor) -> Tensor:
        """As `beside`, by modules on a padded batch (batch, seqlen, hidden), zeros at masked tokens."""
        kept = input_mask.bool().unsqueeze(2)
        found = _convolved(self, hidden_states).masked_fill(kept.logical_not(), 0)
        found = activate_eager(self.dropout(found), SPELLINGS[self.conv_act])
        return self.LayerNorm(residual_states + found) * kept


def conv_dropout(module: Any) -> float:
    """The probability of a convolution's dropout now; 0 if another module, which is called, replaces it."""
    dropout = module.dropout
    return dropout.p if plain_dropout(dropout) and dropout.training else 0.0


def beside(module: Any, packed: Packing, x: Tensor, seed: Tensor | None, y: Tensor) -> Tensor:
    """The output (rows, hidden) of the first layer with the convolution.

    Args:
        module: a `Convolution`, or transformers' `ConvLayer`.
        packed: the places of the rows.
        x: (rows, hidden), the input of the first layer.
        seed: of the dropout; its call site is `INNER_SITE`.
        y: (rows, hidden), the output of the first layer.
    """
    if calls_all() or any(map(watched, module.modules())) or not plain_dropout(module.dropout):
        grid, kept = packed.grid(x)
        mask = torch.ones(grid.shape[:2], device=x.device) if kept is None else kept.to(x.dtype)
        return packed.from_grid(module(grid, packed.grid(y)[0], mask))
    rate, conv = conv_dropout(module), module.conv
    if type(conv) is not nn.Conv1d or conv.kernel_size != (3,) or conv.groups != 1:
        found = packed.from_grid(_convolved(module, packed.grid(x)[0]))
    else:
        found = _product(module, with_neighbours(x, follows(packed, None, x)))
    if rate:
        found = dropped(found, rate, seed, INNER_SITE)
    return apply_norm(module.LayerNorm, y + activate_eager(found, SPELLINGS[module.conv_act]))


def _product(module: Any, near: Tensor) -> Tensor:
    """The convolution of (rows, 3 · hidden), tokens and neighbours as `with_neighbours` has them."""
    weight, bias = module.conv.weight, module.conv.bias

    def joined() -> Tensor:
        return weight.flip(2).transpose(1, 2).flatten(1)

    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return linear(near, joined(), bias)

    def build() -> nn.Linear:
        dense = nn.Linear(weight.shape[1], weight.shape[0], device="meta").eval()
        dense.weight = nn.Parameter(joined(), requires_grad=False)
        dense.bias = nn.Parameter(bias, requires_grad=False)
        return dense

    return apply_linear(prepared.derived(module, "product", (weight, bias), build), near)


def _convolved(module: Any, grid: Tensor) -> Tensor:
    return module.conv(grid.transpose(1, 2)).transpose(1, 2)


class DisentangledAttention(SelfAttention):
    """Self-attention that scores the distance between two tokens.

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
            grid: has the table of distances.
        """
        assert grid is not None
        assert grid.distances is not None
        heads = (-1, self.attention_head_size)
        q, k, v = (self._modules[name](hidden_states).unflatten(-1, heads) for name in self.inputs)
        rows = self._modules["pos_dropout"](grid.distances.rows)
        paths, own = projections(self.form), None
        if any(paths):
            relative = self.form.relative
            assert relative is not None
            modules = [None if p is None else self._modules[p.rpartition(".")[2]] for p in paths]
            tables = [None if m is None else scaled(self.form, m(rows), q) for m in modules]
            found = scores(relative, tables, q, k, q.shape[1])
            own = dense_scores(found, None, q.shape[1], q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = attention_mask if own is None else masked(own, attention_mask)
        return self.attended(q, k, v, hidden_states, mask, head_mask)
