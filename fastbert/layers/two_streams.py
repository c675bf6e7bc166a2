"""XLNet's layer: scores of distances by sinusoids, and a second stream of the tokens to predict.

    score(i, j) = ((q_i + b_w) · k_j + (q_i + b_r) · R[i - j] + (q_i + b_s) · s[t_i ≠ t_j]) / sqrt(head_dim)
    a = LayerNorm(x + dropout(attention Woᵀ)),  y = LayerNorm(a + dropout(W2 dropout(act(W1 a))))

R is the layer's product with [sin | cos] of the distance; t are token types, and s has one vector for pairs
of one type and one for pairs of two. A softmax does not change if the first vector is added to all scores of
a query, so the difference of the two alone is scored. All of it but q · k is an additive bias.

The content stream h is what other encoders have. The query stream g begins with one trained vector at each
token to predict, and has its own queries, but the keys and values of h. A mask of pairs says what it sees.

Where a backend multiplies tables (`ops.attention_relative`), inference derives R once, and makes one query
q' = q + b_w for all terms: (q_i + b_r) · R = q'_i · R + (b_r - b_w) · R, whose last product is a bias by
distance, and the same with b_s and s.

`StreamLayer.forward` computes the content stream of packed tokens, by the op `attention`. Rows of a query
stream may be among them, with a mask. `StreamLayer.streams` computes both streams of a padded batch, and
memories: the layer's inputs in previous calls, as further keys and values.

Source: Yang et al. 2019, "XLNet: Generalized Autoregressive Pretraining for Language Understanding", sec. 2;
Dai et al. 2019, "Transformer-XL", sec. 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fastbert.layers.asked import NOTHING_MORE, Asked
from fastbert.layers.batch import PackedBatch, Sinusoids
from fastbert.layers.dense_norm import dropped, feed_forward_norm
from fastbert.layers.form import INNER_SITE
from fastbert.layers.linear import apply_linear
from fastbert.layers.modules import OwnMatrices, calls_all, is_plain
from fastbert.layers.sinusoids import KeptTable, grid, shifted
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.attention_relative import RelativeScores, score_table_maker
from fastbert.ops.layer_norm import layer_norm
from fastbert.runtime import prepared

# Dropout call site of the encoder's output
LAST_SITE = (1 << 32) - 1


def rate(module: Any) -> float:
    """The probability of a dropout module now; 0 of another module in its place."""
    return module.p if isinstance(module, nn.Dropout) and module.training else 0.0


class RelativeAttention(nn.Module, OwnMatrices):
    """XLNet's attention block: its parameters, with transformers' names and shapes.

    Args:
        config: the model's `EncoderConfig`.

    Attributes:
        fuses_norm: whether our op computes LayerNorm, with the residual sum before it.
    """

    fuses_norm = True

    def __init__(self, config: Any):
        super().__init__()
        heads = config.num_attention_heads, config.head_dim
        matrices = (nn.Parameter(torch.empty(config.hidden_size, *heads)) for _ in "qkvor")
        self.q, self.k, self.v, self.o, self.r = matrices
        self.r_r_bias, self.r_s_bias, self.r_w_bias = (nn.Parameter(torch.empty(heads)) for _ in "rsw")
        self.seg_embed = nn.Parameter(torch.empty(2, *heads))
        self.layer_norm = config.norm(config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.heads, self.scale = heads, config.head_dim**-0.5

    def draw_own_(self, std: float) -> None:
        """See `OwnMatrices`."""
        for parameter in self.parameters(recurse=False):
            parameter.normal_(0.0, std)

    def product(self, names: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(rows, hidden) times the matrices of these names, side by side: (rows, all their heads · head_dim).

        The matrix "o" is multiplied from the other side: (rows, heads · head_dim) -> (rows, hidden).

        Args:
            bias: (nheads, head_dim), added to the first product, in inference alone; None for none.
        """
        own = tuple(cast(Tensor, self._parameters[name]).flatten(1) for name in names)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            # Backward would have to split the gradient of a joined matrix
            return torch.cat([x @ (m.T if names == "o" else m) for m in own], -1)

        def build() -> nn.Linear:
            weight = own[0] if names == "o" else torch.cat([m.T for m in own])
            linear = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta").eval()
            linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
            if bias is not None:
                rest = bias.new_zeros(weight.shape[0] - bias.numel())
                linear.bias = nn.Parameter(torch.cat([bias.flatten(), rest]), requires_grad=False)
            return linear

        sources = tuple(cast(Tensor, self._parameters[name]) for name in names)
        sources += () if bias is None else (bias,)
        return apply_linear(prepared.derived(self, ("product", names, bias is None), sources, build), x)

    def of_distances(self, given: Sinusoids, keeps: bool) -> Tensor:
        """R of the distances within reach: (2 · reach, nheads, head_dim).

        Args:
            given: the table of sinusoids.
            keeps: whether the table depends on its number of rows alone, so that R may be kept.
        """
        table, middle = given.table, given.table.shape[0] // 2

        def build() -> Tensor:
            return self.product("r", table.to(self.r.dtype))

        if not keeps or torch.is_grad_enabled() or torch.compiler.is_compiling():
            r = build()
        else:
            name = "distances", table.shape[0], checks.autocast_dtype(table)
            r = prepared.derived(self, name, (self.r,), build)
        return r[middle - given.reach : middle + given.reach].unflatten(1, self.heads)

    def scores(
        self, q: Tensor, r: Tensor, keys: int, index: Tensor | None, segments: Tensor | None
    ) -> Tensor:
        """The scores of distances and segments, (batch, nheads, S, keys), in the compute dtype of `q`.

        Args:
            q: (batch, S, nheads, head_dim).
            r: (rows, nheads, head_dim), or one per sequence, (batch, rows, nheads, head_dim).
            keys: the number of keys.
            index: see `Sinusoids`.
            segments: see `Sinusoids`.
        """
        compute, near, apart = checks.compute_dtype(q), q + self.r_r_bias.to(q.dtype), None
        if segments is not None:
            # One more column of the same product
            apart = self.seg_embed[1] - self.seg_embed[0]
            r = torch.cat([r, apart.to(r.dtype).expand(*r.shape[:-3], 1, -1, -1)], -3)
        # Scaled before the product, which might overflow in half precision
        r = (r * self.scale).to(q.dtype)
        if r.dim() == 4:
            every = torch.einsum("bind,blnd->bnil", near, r)
        else:
            # One product per head, of the rows of all sequences
            every = near.permute(2, 0, 1, 3).flatten(1, 2) @ r.permute(1, 2, 0)
            every = every.unflatten(1, q.shape[:2]).transpose(0, 1)
        if index is None:
            found = shifted(every.transpose(0, 1), keys).transpose(0, 1).to(compute)
        else:
            found = every.gather(-1, index[:, None].expand(-1, every.shape[1], -1, -1)).to(compute)
        if segments is None or apart is None:
            return found
        constant = ((self.r_s_bias - self.r_r_bias) * apart).sum(-1) * self.scale
        more = every[..., -1:].to(compute) + constant.to(compute)[:, None, None]
        return torch.addcmul(found, more, segments.to(compute))

    def kept_table(self, given: Sinusoids, x: Tensor) -> KeptTable | None:
        """What inference keeps, where the serving backend multiplies tables; else None.

        Args:
            given: the table of sinusoids, which depends on its number of rows alone.
            x: (total, hidden), the layer's input.
        """
        maker = score_table_maker(x)
        if maker is None or checks.autocast_dtype(x) is not None or self.r.dtype != x.dtype:
            return None

        def build() -> KeptTable:
            compute = checks.compute_dtype(x)
            r = self.product("r", given.table.to(x.dtype)).unflatten(1, self.heads).to(compute)
            apart = (self.seg_embed[1] - self.seg_embed[0]).to(compute)
            # Row 0 has a distance that no pair has
            r, apart = r * self.scale, apart * self.scale
            r[0] = apart
            w, own, types = (b.to(compute) for b in (self.r_w_bias, self.r_r_bias, self.r_s_bias))
            bias = torch.einsum("nd,rnd->nr", own - w, r)
            return KeptTable(maker(r.to(x.dtype)), bias, ((types - w) * apart).sum(-1))

        sources = self.r, self.seg_embed, self.r_w_bias, self.r_r_bias, self.r_s_bias
        return prepared.derived(self, ("table", given.table.shape[0], x.dtype, maker), sources, build)

    def by_table(
        self, kept: KeptTable, q: Tensor, given: Sinusoids, batch: PackedBatch
    ) -> tuple[RelativeScores, Tensor | None]:
        """(the scores of distances, the scores of token types or None), as `relative` and `of_types`.

        Args:
            kept: what `kept_table` returns.
            q: (total, nheads, head_dim), with b_w.
            given: see `forward`.
            batch: where the sequences are.
        """
        first, count = given.table.shape[0] // 2 - given.reach + 1, 2 * given.reach - 1
        # One product if the row of types is next to the rows of distances
        start = 0 if first == 1 and given.segments is not None else first
        found = kept.table.scores(q, start, first + count - start)
        columns = torch.arange(count, dtype=torch.int32, device=q.device)
        bias = kept.bias[:, first : first + count]
        relative, of_types = RelativeScores(columns, found[..., first - start :], bias=bias), None
        if given.segments is not None:
            own = found if start == 0 else kept.table.scores(q, 0, 1)
            of_types = grid(own[..., 0].float() + kept.of_types, batch).transpose(1, 2)[..., None]
        return relative, of_types

    def relative(self, q: Tensor, r: Tensor) -> RelativeScores:
        """The scores of distances alone, of packed tokens.

        Args:
            q: (total, nheads, head_dim).
            r: (2 · reach, nheads, head_dim); row reach + d has the distance d from the query to the key.
        """
        near = (q + self.r_r_bias.to(q.dtype)).transpose(0, 1)
        scaled = (r * self.scale).to(q.dtype).permute(1, 2, 0)
        columns = torch.arange(1, r.shape[0], dtype=torch.int32, device=q.device)
        return RelativeScores(columns, query=torch.bmm(near, scaled).transpose(0, 1))

    def of_types(self, q: Tensor, batch: PackedBatch) -> Tensor:
        """Each query's score of a key of another token type: (batch, nheads, S, 1), in the compute dtype.

        Args:
            q: (total, nheads, head_dim).
            batch: where the sequences are.
        """
        compute = checks.compute_dtype(q)
        apart = (self.seg_embed[1] - self.seg_embed[0]).to(compute) * self.scale
        own = ((q.to(compute) + self.r_s_bias.to(compute)) * apart).sum(-1)
        return grid(own, batch).transpose(1, 2)[..., None]

    def forward(
        self, x: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
    ) -> tuple[Tensor, Tensor | None]:
        """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None)."""
        given, kept = batch.sinusoids, None
        assert given is not None
        simple = given.index is None and asked.taps is None
        if simple and batch.seed is None and not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
            kept = self.kept_table(given, x)
        added = None if kept is None else self.r_w_bias
        q, k, v = self.product("qkv", x, added).unflatten(1, (3, *self.heads)).unbind(1)
        relative, of_types, bias = None, None, batch.bias
        if kept is not None:
            relative, of_types = self.by_table(kept, q, given, batch)
        else:
            r = self.of_distances(given, batch.seed is None)
            if simple:
                relative = self.relative(q, r)
                of_types = None if given.segments is None else self.of_types(q, batch)
            else:
                scores = self.scores(grid(q, batch), r, batch.max_seqlen, given.index, given.segments)
                bias = scores if bias is None else scores + bias
            q = q + self.r_w_bias.to(q.dtype)
        if of_types is not None and given.segments is not None:
            of_types = of_types * given.segments
            bias = of_types if bias is None else of_types + bias
        if asked.taps is not None:
            q, k, v, bias = asked.taps.qkv(asked.number, q, k, v, replace(batch, bias=bias))
        found: Any = attention(
            q,
            k,
            v,
            batch.cu_seqlens,
            batch.max_seqlen,
            softmax_scale=self.scale,
            causal=batch.causal,
            bias=bias,
            relative=relative,
            gate=asked.gate,
            dropout_p=rate(self.dropout),
            seed=batch.seed,
            offset=asked.site,
            return_probs=asked.probabilities,
            places=batch.fitting_places(),
        )
        context, probs = found if asked.probabilities else (found, None)
        if asked.taps is not None:
            context = asked.taps.context(asked.number, context, batch)
        return self.after(x, context, batch.seed, asked.site + 1), probs

    def after(self, x: Tensor, context: Tensor, seed: Tensor | None, site: int) -> Tensor:
        """The block's output: the output layer, dropout, the residual sum and the norm.

        Args:
            x: (rows, hidden), the block's input.
            context: (rows, nheads, head_dim).
            seed: of the dropout, None for none; its call site is `site`.
        """
        y, norm = self.product("o", context.flatten(1)), self.layer_norm
        p = 0.0 if seed is None else rate(self.dropout)
        if self.fuses_norm and is_plain(norm, nn.LayerNorm) and not calls_all():
            drops = {"dropout_p": p, "seed": seed, "offset": site}
            return cast(Tensor, layer_norm(y, norm.weight, norm.bias, residual=x, eps=norm.eps, **drops))
        return norm(x + (dropped(y, p, seed, site) if p else y))

    def stream(
        self, x: Tensor, k: Tensor, v: Tensor, r: Tensor, given: Pairs, hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """One stream of a padded batch: (context (batch, S, nheads, head_dim), probabilities).

        Args:
            x: (batch, S, nheads, head_dim), the queries.
            k, v: (batch, keys, nheads, head_dim).
            r: see `scores`.
            given: see `Pairs`.
            hidden: (batch or 1, 1, S, keys) bool, the keys that each query does not see; None for none. A
                query that sees no key gets zeros.
        """
        compute = checks.compute_dtype(x)
        q = (x.to(compute) + self.r_w_bias.to(compute)) * self.scale
        found = torch.einsum("bind,bjnd->bnij", q, k.to(compute))
        found = found + self.scores(x, r, k.shape[1], None, given.segments)
        if hidden is not None:
            found = found.masked_fill(hidden, torch.finfo(compute).min)
        probs = found.softmax(-1)
        if hidden is not None:
            probs = probs.masked_fill(hidden, 0.0)
        kept = self.dropout(probs)
        return torch.einsum("bnij,bjnd->bind", kept, v.to(compute)).to(v.dtype), probs.to(v.dtype)


class Pairs(NamedTuple):
    """What both streams of a padded batch need.

    Attributes:
        table: (batch or 1, rows, hidden), the sinusoids of the distances from `keys` to 1 - S.
        segments: see `Sinusoids`; (batch, 1, S, keys).
        hidden: (batch or 1, 1, S, keys) bool, what the content stream does not see, and the same of the query
            stream; None for nothing.
        places: (batch, predictions, S), which token each row of the query stream predicts, or None.
    """

    table: Tensor
    segments: Tensor | None
    hidden: tuple[Tensor | None, Tensor | None]
    places: Tensor | None


class FeedForward(nn.Module):
    """XLNet's feed-forward block.

    Args:
        config: the model's `EncoderConfig`.

    Attributes:
        fuses_norm: see `RelativeAttention`.
    """

    fuses_norm = True

    def __init__(self, config: Any):
        super().__init__()
        self.layer_norm = config.norm(config.hidden_size)
        self.layer_1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.layer_2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.activation = config.activation_name

    def forward(self, x: Tensor, seed: Tensor | None = None, asked: Asked = NOTHING_MORE, batch: Any = None):
        """(rows, hidden) -> (rows, hidden).

        Args:
            seed: of the dropouts; None for none.
            asked: has their call site, and the taps.
            batch: the packed batch, for the taps.
        """
        p = 0.0 if seed is None else rate(self.dropout)

        def tap(inner: Tensor) -> Tensor:
            if asked.taps is not None:
                inner = asked.taps.inner(asked.number, inner, batch)
            return dropped(inner, p, seed, asked.site + INNER_SITE) if p else inner

        parts, looks = (self.layer_1, self.layer_2, self.layer_norm), p or asked.taps is not None
        how = self.activation, p, seed, asked.site + 2, self.fuses_norm
        return feed_forward_norm(*parts, x, *how, tap=tap if looks else None)


class StreamLayer(nn.Module):
    """One layer of XLNet.

    Args:
        config: the model's `EncoderConfig`.
    """

    def __init__(self, config: Any):
        super().__init__()
        self.rel_attn = RelativeAttention(config)
        self.ff = FeedForward(config)

    def forward(
        self, hidden: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE
    ) -> tuple[Tensor, Tensor | None]:
        """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None)."""
        x, probs = self.rel_attn(hidden, batch, asked)
        return self.ff(x, batch.seed, asked, batch), probs

    def streams(
        self,
        h: Tensor,
        g: Tensor | None,
        memory: Tensor | None,
        given: Pairs,
        asked: Asked,
        seeds: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Both streams of a padded batch.

        Args:
            h: (batch, S, hidden).
            g: (batch, predictions, hidden), or None.
            memory: (batch, M, hidden), or None.
            given: see `Pairs`.
            asked: has the first of the layer's dropout call sites.
            seeds: of the dropouts of both streams; None for none.

        Returns:
            The new `h` and `g`, and the probabilities of each stream, (batch, nheads, S, M + S).
        """
        attn = self.rel_attn
        seen = h if memory is None else torch.cat([memory.to(h.dtype), h], 1)
        k, v, r = (_times(x, m) for x, m in ((seen, attn.k), (seen, attn.v), (given.table, attn.r)))
        r = r if r.shape[0] > 1 else r[0]
        found, probs = [], []
        for x, hides, seed in zip((h, g), given.hidden, seeds, strict=True):
            if x is None:
                found.append(None)
                continue
            q, places = _times(x, attn.q), given.places if x is g else None
            if places is not None:
                q = torch.einsum("bpnd,bps->bsnd", q, places)
            context, seen_by = attn.stream(q, k, v, r, given, hides)
            if places is not None:
                context = torch.einsum("bsnd,bps->bpnd", context, places)
            y = attn.after(x.flatten(0, 1), context.flatten(0, 1), seed, asked.site + 1)
            found.append(self.ff(y, seed, asked).view_as(x))
            probs.append(seen_by)
        return found[0], found[1], tuple(probs)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """(batch, S, hidden) times (hidden, nheads, head_dim): (batch, S, nheads, head_dim)."""
    return (x.to(matrix.dtype) @ matrix.flatten(1)).unflatten(-1, matrix.shape[1:])
