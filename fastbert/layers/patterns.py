"""Fixed attention patterns, which depend on positions alone, computed without an attention map.

A pattern replaces a head's attention probabilities P. For row i of a sequence of n tokens, counted from 0 and
with the special tokens:

    current         P_ii = 1
    previous        P_i,i-1 = 1
    next            P_i,i+1 = 1
    left context    P_ij ∝ (j + 1)³ for j <= i - 2
    right context   its mirror image: P_ij ∝ (n - j)³ for j >= i + 2
    end             P_ij ∝ (j + 1)³ for all j
    start           its mirror image: P_ij ∝ (n - j)³ for all j
    first token     P_i0 = 1
    separators      all separators of the sequence alike

A row without a key, such as row 0 of `previous`, looks at itself. That rule and the last two patterns are
this package's own. The first seven are Raganato et al.'s, who train models with all seven in each layer.

No map is made. With values v, P v is a shift or a running mean

    m_i = Σ_{j <= i} (j + 1)³ v_j / Σ_{j <= i} (j + 1)³,    Σ_{j <= i} (j + 1)³ = ((i + 1)(i + 2) / 2)²

read at i - 2 (left context) or at n - 1 (end), of the sequence or of its mirror image: O(n · d) per head.

Source: Raganato, Scherrer and Tiedemann 2020, "Fixed Encoder Self-Attention Patterns in Transformer-Based
Machine Translation", sec. 3.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

# What a head does: it attends as it has learned, or by a pattern
NAMES = (
    "learned",
    "current",
    "previous",
    "next",
    "left context",
    "right context",
    "end",
    "start",
    "first token",
    "separators",
)
LEARNED, CURRENT, PREVIOUS, NEXT, LEFT_CONTEXT, RIGHT_CONTEXT, END, START, FIRST_TOKEN, SEPARATORS = range(10)

# Patterns that look at no later token, which a causal model can have
BACKWARD = (LEARNED, CURRENT, PREVIOUS, LEFT_CONTEXT, FIRST_TOKEN)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a packed batch are.

    There may be rows after the last sequence (`fastbert.layers.packing`). Each of them is a sequence.

    Attributes:
        number: (total,) int64, 0 to total - 1.
        sequence, position: (total,) int64, each row's sequence and its position there.
        first, last: (total,) int64, the rows at which the row's own sequence begins and ends.
        inside: (total,) bool, False for rows after the last sequence.
        batch, longest: the number of sequences, and at least the length of the longest sequence.
    """

    number: Tensor
    sequence: Tensor
    position: Tensor
    first: Tensor
    last: Tensor
    inside: Tensor
    batch: int
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int, longest: int) -> Rows:
        """The rows of `total` packed tokens. The host does not wait for a device.

        Args:
            cu_seqlens: (batch + 1,), where the sequences are.
            total: how many rows there are.
            longest: at least the length of the longest sequence.
        """
        batch, ends = len(cu_seqlens) - 1, cu_seqlens.long()
        number = torch.arange(total, device=ends.device)
        inside = number < ends[-1]
        sequence = torch.searchsorted(ends[1:], number, right=True).clamp_max(max(batch - 1, 0))
        first = torch.where(inside, ends[sequence], number)
        last = torch.where(inside, ends[sequence + (1 if batch else 0)] - 1, number)
        return cls(number, sequence, number - first, first, last, inside, batch, longest)

    def cell(self, position: Tensor) -> Tensor:
        """(total,) int64: the flat place in (batch, longest) of a position of each row's sequence.

        A row after the last sequence has the place behind the end, batch · longest.
        """
        behind = self.batch * self.longest
        return torch.where(self.inside, self.sequence * self.longest + position, behind)


def attend(pattern: int, v: Tensor, rows: Rows, separators: Tensor | None = None) -> Tensor:
    """P v of one pattern, for packed sequences; gradients flow to the values.

    Args:
        pattern: an index into `NAMES`, not LEARNED.
        v: (total, …), the values.
        rows: where the sequences are.
        separators: (total,) bool, which tokens are separators; read for SEPARATORS alone.

    Returns:
        (total, …) in the dtype of `v`. Means are computed in float64, since the weights grow as n³.
    """
    if v.shape[0] == 0 or pattern == CURRENT:
        return v
    if pattern == PREVIOUS:
        return v.index_select(0, torch.maximum(rows.number - 1, rows.first))
    if pattern == NEXT:
        return v.index_select(0, torch.minimum(rows.number + 1, rows.last))
    if pattern == FIRST_TOKEN:
        return v.index_select(0, rows.first)
    if pattern == SEPARATORS:
        return _of_separators(v, rows, separators)
    mirror = None
    if pattern in (RIGHT_CONTEXT, START):
        mirror = rows.first + rows.last - rows.number
        v = v.index_select(0, mirror)
    means = _running_means(v, rows)
    if pattern in (END, START):
        # The same for all rows of a sequence, so it needs no mirroring back
        return means.index_select(0, rows.cell(rows.last - rows.first)).to(v.dtype)
    before = means.index_select(0, rows.cell((rows.position - 2).clamp_min(0))).to(v.dtype)
    found = torch.where(_column(rows.position >= 2, v), before, v)
    return found if mirror is None else found.index_select(0, mirror)


def _column(values: Tensor, like: Tensor) -> Tensor:
    """(total,) -> (total, 1, …), which broadcasts to (total, …)."""
    return values.view(-1, *(1,) * (like.dim() - 1))


def _running_means(v: Tensor, rows: Rows) -> Tensor:
    """m of this module's docstring in float64, at `Rows.cell`. Each sequence has a sum of its own.

    Returns:
        (batch · longest + 1, …), the last row zeros.
    """
    cells = rows.batch * rows.longest
    grid = v.new_zeros(cells + 1, *v.shape[1:], dtype=torch.float64)
    grid = grid.index_copy(0, rows.cell(rows.position), v.double())
    place = torch.arange(1, rows.longest + 1, device=v.device, dtype=torch.float64)
    weighted = grid[:cells].view(rows.batch, rows.longest, *v.shape[1:]) * _column(place**3, v)
    sums = weighted.cumsum(1) / _column((place * (place + 1) / 2).square(), v)
    return torch.cat([sums.flatten(0, 1), torch.zeros_like(grid[:1])])


def _of_separators(v: Tensor, rows: Rows, separators: Tensor | None) -> Tensor:
    if separators is None:
        raise ValueError("separators: expected (total,) bool for the pattern 'separators', got None")
    at = separators.nonzero().squeeze(1)
    owner = rows.sequence[at]
    flat = v.index_select(0, at).double()
    sums = flat.new_zeros(rows.batch, *v.shape[1:]).index_add(0, owner, flat)
    count = torch.bincount(owner, minlength=rows.batch)
    means = (sums / _column(count.clamp_min(1), v)).to(v.dtype)
    return torch.where(_column(count[rows.sequence] > 0, v), means[rows.sequence], v)


@dataclass(frozen=True)
class Heads:
    """The heads of a layer in which some heads attend by patterns.

    Attributes:
        patterns: (nheads,) indices into `NAMES`; at least one is LEARNED, none is SEPARATORS.
    """

    patterns: tuple[int, ...]

    @functools.cached_property
    def learned(self) -> list[int]:
        """The heads that have queries and keys, ascending."""
        return [head for head, pattern in enumerate(self.patterns) if pattern == LEARNED]

    @functools.cached_property
    def fixed(self) -> dict[int, list[int]]:
        """pattern -> its heads."""
        found: dict[int, list[int]] = {}
        for head, pattern in enumerate(self.patterns):
            if pattern != LEARNED:
                found.setdefault(pattern, []).append(head)
        return found

    def of_learned(self, t: Tensor | None, dim: int) -> Tensor | None:
        """The learned heads of `t`, whose dimension `dim` has all heads, or size 1."""
        if t is None or t.shape[dim] == 1 < len(self.patterns):
            return t
        return torch.stack([t.select(dim, head) for head in self.learned], dim)

    def joined(self, context: Tensor, v: Tensor, rows: Rows, gate: Tensor | None) -> Tensor:
        """The output of all heads, (total, nheads, headdim).

        Args:
            context: (total, learned heads, headdim), the output of the learned heads.
            v: (total, nheads, headdim).
            rows: where the sequences are.
            gate: (nheads,) factor of each head's output, or None; it is in `context` already.
        """
        found = dict(zip(self.learned, context.unbind(1), strict=True))
        for pattern, heads in self.fixed.items():
            values = attend(pattern, torch.stack([v[:, head] for head in heads], 1), rows)
            for head, value in zip(heads, values.unbind(1), strict=True):
                scaled = value if gate is None else value * gate[head]
                found[head] = scaled.to(context.dtype)
        return torch.stack([found[head] for head in range(len(self.patterns))], 1)

    def all_probabilities(self, probs: Tensor, rows: Rows) -> Tensor:
        """(batch, learned heads, S, S) -> (batch, nheads, S, S) with the maps of the patterns."""
        longest = rows.longest
        found = dict(zip(self.learned, probs.unbind(1), strict=True))
        places = torch.arange(longest, device=probs.device)
        one_hot = (rows.position[:, None] == places).to(probs.dtype)
        for pattern, heads in self.fixed.items():
            grid = probs.new_zeros(rows.batch * longest + 1, longest)
            grid = grid.index_copy(0, rows.cell(rows.position), attend(pattern, one_hot, rows))
            for head in heads:
                found[head] = grid[:-1].view(rows.batch, longest, longest)
        return torch.stack([found[head] for head in range(len(self.patterns))], 1)
