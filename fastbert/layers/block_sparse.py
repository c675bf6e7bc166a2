"""BigBird's attention by blocks: the time of a text is proportional to its length.

A text of n tokens has ceil(n / size) blocks, the last of which may be shorter. Queries of the first and the
last block see all keys. Queries of another block see the keys of the first block, of their own block and its
two neighbours, of some random blocks, and of the last block. A key counts once per time that its block is
listed among the first, the last and the random blocks, or in the window of three.

In training the random blocks are drawn as transformers draws them, with the layer's number as the seed. Out
of training each of them is block 0, as in transformers, so the keys of block 0 count 1 + `random` times. No
probability is dropped. A text of at most `Blocks.full` tokens has BERT's attention.

Each text is divided by its own length. So the rest of a batch changes nothing.

Where a caller asks for probabilities or taps, passes a bias or a causal mask, or compiles the model, the
blocks are an additive bias of full attention (`bias`).

Source: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", sec. 2 and app. D.
"""

from __future__ import annotations

import functools
import math
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.layers.asked import Asked
from fastbert.layers.batch import Blocks, PackedBatch
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.modules import part
from fastbert.layers.parts import Part, SelfAttention, masked, probabilities
from fastbert.ops import checks
from fastbert.ops.attention import attention

# Lengths in tokens whose random blocks transformers draws in the way of the paper's own code
_OLD_LENGTHS = (1024, 3072, 4096)
# Tokens up to which these lengths draw random blocks
_OLD_REACH = 1024


def lengths_of(batch: PackedBatch, blocks: Blocks) -> tuple[int, ...] | None:
    """See `PackedBatch.lengths`."""
    if batch.max_seqlen <= blocks.full:
        return None
    if torch.compiler.is_compiling():
        return ()
    lengths = tuple(batch.cu_seqlens.diff().tolist())
    return lengths if max(lengths, default=0) > blocks.full else None


@functools.lru_cache(maxsize=1024)
def random_blocks(blocks: Blocks, count: int) -> Tensor:
    """The random blocks of a text in training, (heads, count - 2, random) int64, for blocks 1 to count - 2.

    Args:
        blocks: the layer's.
        count: the number of the text's blocks.

    Raises:
        ValueError: there are too few blocks to draw from.
    """
    draw = np.random.RandomState(blocks.seed)
    rows = _old_rows(blocks, draw) if count * blocks.size in _OLD_LENGTHS else _rows(blocks, draw, count)
    if any(len(row) < blocks.random for row in rows):
        raise ValueError(
            f"config num_random_blocks: expected less than {blocks.random} with block_size {blocks.size}"
        )
    found = np.array([row[: blocks.random] for row in rows], np.int64)
    found = found.reshape(len(rows) // blocks.heads, blocks.heads, blocks.random).transpose(1, 0, 2)
    return torch.from_numpy(found[:, : count - 2].copy())


def _rows(blocks: Blocks, draw: np.random.RandomState, count: int) -> list[np.ndarray]:
    """Blocks to choose from, in drawn order, of each block from 1 on and each head."""
    reach = 5 + 2 * blocks.random
    rows = []
    for block in range(1, count):
        barred = {block - 1, block, block + 1, 0, reach - 1}
        barred |= {reach - 2} if block == 1 else set()
        barred |= {1} if block == reach - 2 else set()
        for _ in range(blocks.heads):
            drawn = draw.permutation(np.arange(reach, dtype=np.int32))
            rows.append(drawn[~np.isin(drawn, list(barred))])
    return rows


def _old_rows(blocks: Blocks, draw: np.random.RandomState) -> list[np.ndarray]:
    """As `_rows`, for `_OLD_LENGTHS`, which may choose the last block or a block of the window."""
    every = -(-blocks.positions // blocks.size)
    last = every - 1
    if 2 * blocks.size < _OLD_REACH:
        last = _OLD_REACH // blocks.size - 1
    middle = np.arange(1, every - 1, dtype=np.int32)
    rows = []
    for _ in range(blocks.heads):
        for block in range(1, every - 1):
            before, after = middle[: max(block - 2, 0)], middle[block + 1 : last]
            if block >= every - 3 or block - 2 > last:
                before, after = middle[:last], after[:0]
            rows.append(draw.permutation(np.concatenate((before, after))))
    return [rows[head * (every - 2) + i] for i in range(every - 2) for head in range(blocks.heads)]


def attend(
    form: LayerForm, parts: Parts, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The output of self-attention, (total, nheads, head_dim), where nothing else is asked for.

    Args:
        form, parts: the layer's.
        q, k, v: (total, nheads, head_dim).
        batch: has the lengths, and neither a bias nor a causal mask.
        asked: has the gate and the dropout's call site.
    """
    blocks, lengths = form.blocks, batch.lengths
    assert blocks is not None
    assert lengths
    q, k, v = (cast(Tensor, t) for t in checks.under_autocast(q, k, v))
    pieces = [t.split(lengths) for t in (q, k, v)]
    found: list[Tensor] = [q] * len(lengths)
    short = [i for i, n in enumerate(lengths) if n <= blocks.full]
    if short:
        sizes = [lengths[i] for i in short]
        ends = torch.tensor([0, *sizes], device=q.device).cumsum(0, dtype=torch.int32)
        rows = [torch.cat([own[i] for i in short]) for own in pieces]
        context = attention(
            *(rows[0], rows[1], rows[2], ends, max(sizes)),
            softmax_scale=form.softmax_scale,
            dropout_p=parts.rates[0],
            seed=batch.seed,
            offset=asked.site,
        )
        for i, own in zip(short, cast(Tensor, context).split(sizes), strict=True):
            found[i] = own
    for i, n in enumerate(lengths):
        if n > blocks.full:
            q, k, v = (own[i] for own in pieces)
            with torch.autocast(q.device.type, enabled=False):
                found[i] = _attended(form, training(form, parts), q, k, v)
    context = torch.cat(found)
    return context if asked.gate is None else context * asked.gate.to(context.dtype)[:, None]


def training(form: LayerForm, parts: Parts) -> bool:
    """Whether the layer's attention is in training mode, so that random blocks are drawn."""
    return part(parts.owner, form.names.query.rpartition(".")[0]).training


def _attended(form: LayerForm, training: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output for one text, (n, nheads, head_dim) like `q`, `k` and `v`."""
    blocks, scale = form.blocks, form.softmax_scale
    assert blocks is not None
    size, (n, heads, width) = blocks.size, q.shape
    count = -(-n // size)
    inner = slice(size, (count - 1) * size)
    # The last block gets the keys that it lacks, which no query sees
    k, v = (F.pad(t, (0, 0, 0, 0, 0, count * size - n)).transpose(0, 1).contiguous() for t in (k, v))
    ends = torch.cat((q[: inner.start], q[inner.stop :])).transpose(0, 1)
    ends = F.scaled_dot_product_attention(ends[None], k[None, :, :n], v[None, :, :n], scale=scale)
    ends = ends[0].transpose(0, 1)
    seen, bias = _seen(form, training, n, q)
    seen = seen + count * torch.arange(heads, device=q.device)[:, None, None]
    bias = bias[:, :, None].expand(heads, -1, size, -1)
    k, v = (t.reshape(heads * count, size * width) for t in (k, v))
    own = q[inner].reshape(count - 2, size, heads, width).permute(2, 0, 1, 3)
    found = []
    # On a CPU the keys and values of two heads fit in a cache
    group = heads if q.is_cuda or torch.is_grad_enabled() else 2
    for rows, at, more in zip(own.split(group), seen.split(group), bias.split(group), strict=True):
        # (heads of the group, count - 2, seen blocks · size, head_dim)
        keys, values = (t.index_select(0, at.flatten()).view(*at.shape[:2], -1, width) for t in (k, v))
        found.append(F.scaled_dot_product_attention(rows, keys, values, more, scale=scale))
    own = torch.cat(found).permute(1, 2, 0, 3).flatten(0, 1)
    return torch.cat((ends[:size], own, ends[size:]))


def _seen(form: LayerForm, training: bool, n: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of keys that blocks 1 to count - 2 of a text of `n` tokens see.

    Returns:
        Their numbers, (nheads or 1, count - 2, seen blocks) int64, and what is added to the scores of their
        keys, (nheads or 1, count - 2, seen blocks · size).
    """
    blocks, device = form.blocks, q.device
    assert blocks is not None
    count, dtype = -(-n // blocks.size), _bias_dtype(q)
    middle = torch.arange(1, count - 1, device=device)
    first, last = torch.zeros_like(middle), torch.full_like(middle, count - 1)
    seen = torch.stack((first, last, middle - 1, middle, middle + 1), 1)[None]
    bias = torch.zeros(seen.shape, dtype=dtype, device=device)
    # The first and the last block are in the window of their neighbours, and count once
    bias[:, 0, 2] = bias[:, -1, 4] = -math.inf
    if training:
        drawn = form.of_own_heads(random_blocks(blocks, count).to(device), 0)
    elif dtype == checks.compute_dtype(q):
        bias[:, :, 0] = math.log(1 + blocks.random)
        drawn = seen[:, :, :0]
    else:
        # Rounding would change the logarithm
        drawn = seen[:, :, :1].expand(-1, -1, blocks.random)
    seen = torch.cat((seen.expand(drawn.shape[0], -1, -1), drawn), 2)
    bias = torch.cat((bias.expand(drawn.shape[0], -1, -1), torch.zeros_like(drawn, dtype=dtype)), 2)
    bias = bias.repeat_interleave(blocks.size, 2)
    token = seen[..., None] * blocks.size + torch.arange(blocks.size, device=device)
    return seen, bias.masked_fill(token.flatten(2) >= n, -math.inf)


def _bias_dtype(q: Tensor) -> torch.dtype:
    """The dtype of a bias that PyTorch's attention takes; on a GPU it is that of `q`."""
    return checks.compute_dtype(q) if q.device.type == "cpu" else q.dtype


def bias(form: LayerForm, training: bool, batch: PackedBatch, dtype: torch.dtype) -> Tensor:
    """The batch's bias with the logarithm of how many times a query sees a key.

    Args:
        form: the layer's form.
        training: whether random blocks are drawn.
        batch: without `columns` each sequence is counted from its own start.
        dtype: of the result.

    Returns:
        (batch, nheads or 1, S, S).

    Raises:
        ValueError: random blocks must be drawn under `torch.compile`.
    """
    blocks, columns = form.blocks, batch.columns
    assert blocks is not None
    lengths = batch.cu_seqlens.diff().long()
    if columns is None:
        columns = torch.arange(batch.max_seqlen, device=lengths.device).expand(lengths.shape[0], -1)
    number, count = columns // blocks.size, -(-lengths // blocks.size)[:, None, None]
    i, j, last = number[:, :, None], number[:, None, :], count - 1
    full = (lengths <= blocks.full)[:, None, None] | (i == 0) | (i >= last)
    times = (full | ((i - j).abs() <= 1) | (j == 0) | (j == last)).to(dtype)[:, None]
    if training and blocks.random:
        if not batch.lengths:
            raise ValueError(
                f"model: training with random blocks is not compiled; expected at most {blocks.full} tokens, "
                "config num_random_blocks = 0, or a call without torch.compile"
            )
        most = int(number.max()) + 1
        more = times.new_zeros(len(batch.lengths), form.nheads, most, most)
        for own, n in zip(more, batch.lengths, strict=True):
            if n > blocks.full:
                drawn = form.of_own_heads(random_blocks(blocks, -(-n // blocks.size)).to(own.device), 0)
                for choice in drawn.unbind(2):
                    rows = own[:, 1 : 1 + choice.shape[1]]
                    rows.scatter_add_(2, choice[..., None], torch.ones_like(rows[..., :1]))
        text, head = (torch.arange(size, device=more.device) for size in more.shape[:2])
        times = times + more[text[:, None, None, None], head[:, None, None], i[:, None], j[:, None]]
    else:
        times = torch.where(~full & (j == 0), 1.0 + blocks.random, times[:, 0])[:, None]
    own = times.log()
    return own if batch.bias is None else own + batch.bias


class BlockSparseAttention(SelfAttention):
    """Self-attention on a padded batch that divides a long text into blocks.

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
            grid: has the lengths, and the place of each token among the kept tokens of its text.
        """
        assert grid is not None
        if grid.lengths is None:
            return super().forward(hidden_states, attention_mask, head_mask)
        heads = (-1, self.attention_head_size)
        q, k, v = (self._modules[name](hidden_states).unflatten(-1, heads) for name in self.inputs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = masked(bias(self.form, self.training, grid, checks.compute_dtype(q)), attention_mask)
        probs = probabilities(q, k, self.scaling, seen.to(q.dtype))
        context = probs @ v
        if head_mask is not None:
            context = context * head_mask[:, None, None]
        return Part.forward(self, context.transpose(1, 2).flatten(2), hidden_states), probs
