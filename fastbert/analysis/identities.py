"""Statistics of attention probabilities by the attention op itself, without a map in memory.

P = softmax(S), S = scale · q kᵀ + bias, per sequence and head; lse is what the op returns. With values x in
place of v the op returns Σ_j P_ij x_j, and with other queries and keys it returns their lse. So, for row i,

    entropy            H_i = lse_i - scale · q_i · Σ_j P_ij k_j               (without a bias)
    mass on groups     Σ_j P_ij G_jc, with G_jc = 1 where key j is in group c
    received           Σ_i R_ic P_ij: the gradient of the values for dout = R
    collision          Σ_j P_ij² = exp(lse_i(2 scale, 2 bias) - 2 lse_i)
    overlap            Σ_j P_ij P'_ij = exp(lse_i([q, q'], [k, k']) - lse_i - lse'_i)
    divergence         KL(P ‖ P')_i = scale (q_i · Σ_j P_ij k_j - q'_i · Σ_j P_ij k'_j) - lse_i + lse'_i
    offset             P_i,i+δ = exp(S_i,i+δ - lse_i)

Under a bias, entropy is computed from the maps of a few sequences at a time.

Source: entropy of attention as in Ghader and Monz 2017; the identities follow from the definition of softmax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fastbert.layers.batch import PackedBatch
from fastbert.layers.packing import positions_of
from fastbert.layers.taps import Taps
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.attention_autograd import attention_bwd
from fastbert.ops.attention_inputs import CAUSAL, EVERYWHERE

MAX_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Probabilities:
    """The attention probabilities of one layer, represented by queries and keys.

    Attributes:
        q, k: (total, nheads, headdim), in float32 or float64.
        cu_seqlens, max_seqlen: as in `PackedBatch`.
        scale: scale of the scores.
        bias: see `PackedBatch.bias`.
        causal: see `PackedBatch.causal`.
        max_bytes: most memory of maps, if a statistic needs them.
    """

    q: Tensor
    k: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    scale: float
    bias: Tensor | None = None
    causal: bool = False
    max_bytes: int = MAX_BYTES

    @classmethod
    def of(cls, q: Tensor, k: Tensor, sequences: PackedBatch, max_bytes: int = MAX_BYTES) -> Probabilities:
        """The probabilities of a layer, from the arguments of `Taps.qkv`. Half precision becomes float32."""
        compute = checks.compute_dtype(q)
        bias = sequences.bias
        return cls(
            q.detach().to(compute).contiguous(),
            k.detach().to(compute).contiguous(),
            sequences.cu_seqlens,
            sequences.max_seqlen,
            q.shape[-1] ** -0.5,
            None if bias is None else bias.detach().to(compute),
            sequences.causal,
            max_bytes,
        )

    @functools.cached_property
    def _keys_and_lse(self) -> tuple[Tensor, Tensor]:
        """(Σ_j P_ij k_j, lse), (total, nheads, headdim) and (total, nheads)."""
        out, lse = self._attend(self.k)
        return out, lse

    @property
    def keys(self) -> Tensor:
        """Σ_j P_ij k_j, (total, nheads, headdim)."""
        return self._keys_and_lse[0]

    @property
    def lse(self) -> Tensor:
        """(total, nheads), natural logarithm."""
        return self._keys_and_lse[1]

    def _attend(self, values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(
            self.q,
            self.k,
            values,
            self.cu_seqlens,
            self.max_seqlen,
            softmax_scale=self.scale,
            causal=self.causal,
            bias=self.bias,
            return_lse=True,
        )
        return out, lse.t().contiguous()

    def of_values(self, values: Tensor) -> Tensor:
        """Σ_j P_ij x_j.

        Args:
            values: x, (total, columns), or (total, nheads, columns) with a value per head.

        Returns:
            (total, nheads, columns).
        """
        if values.dim() == 2:
            values = values[:, None].expand(-1, self.q.shape[1], -1)
        width = self.q.shape[-1]
        found = []
        for part in values.to(self.q.dtype).split(width, -1):
            room = torch.nn.functional.pad(part, (0, width - part.shape[-1]))
            found.append(self._attend(room)[0][..., : part.shape[-1]])
        return torch.cat(found, -1) if found else values.to(self.q.dtype)

    def received(self, weights: Tensor) -> Tensor:
        """Σ_i R_ic P_ij: the weighted attention that each key receives.

        Args:
            weights: R, (total, columns), or (total, nheads, columns) with weights per head.

        Returns:
            (total, nheads, columns), per key.
        """
        heads, width = self.q.shape[1:]
        lse = self.lse.t().contiguous()
        if weights.dim() == 2:
            weights = weights[:, None].expand(-1, heads, -1)
        found = []
        for part in weights.to(self.q.dtype).split(width, -1):
            dout = torch.nn.functional.pad(part, (0, width - part.shape[-1])).contiguous()
            # only gradients that are not computed here would read `out`, so `k` fills its place
            dv = attention_bwd(
                *(dout, self.q, self.k, self.k, self.cu_seqlens, self.max_seqlen, self.scale),
                *(CAUSAL if self.causal else EVERYWHERE, self._grid_bias(), None, 0.0, None, 0),
                *(self.k, lse, None, False, False, True, False, False, None),
            )[2]
            found.append(dv[..., : part.shape[-1]])
        return torch.cat(found, -1)

    def _grid_bias(self) -> Tensor | None:
        """The bias with four dimensions, as the op's backward takes it."""
        return self.bias if self.bias is None or self.bias.dim() == 4 else self.bias[None]

    def entropy(self) -> Tensor:
        """(total, nheads), in nats, never below 0. The rounding error is about 4 eps · lse."""
        if self.bias is None:
            keys, lse = self._keys_and_lse
            return (lse - self.scale * (self.q * keys).sum(-1)).clamp_min(0.0)
        lengths, found = self.cu_seqlens.diff(), []
        for first, last, maps in self.maps():
            rows = torch.special.entr(maps).sum(-1).transpose(1, 2)  # (sequences, S, nheads)
            place = torch.arange(rows.shape[1], device=rows.device)
            found.append(rows[place < lengths[first:last, None]])
        return torch.cat(found)

    def maps(self) -> Iterator[tuple[int, int, Tensor]]:
        """The probabilities themselves, for as many sequences at a time as fit `max_bytes`.

        Yields:
            (first, last, P): P is (last - first, nheads, S, S), of the sequences first to last - 1 of the
            batch, where S is the length of the longest; 0 outside each sequence.

        Raises:
            ValueError: the maps of one sequence exceed `max_bytes`.
        """
        lengths = self.cu_seqlens.diff().tolist()
        cell = self.q.shape[1] * self.q.element_size()
        check_bytes(self.max_bytes, max(lengths, default=0), cell)
        first = 0
        while first < len(lengths):
            last, longest = first + 1, lengths[first]
            while last < len(lengths):
                longer = max(longest, lengths[last])
                if (last + 1 - first) * longer**2 * cell > self.max_bytes:
                    break
                last, longest = last + 1, longer
            yield first, last, self._maps(first, last, longest)
            first = last

    def _maps(self, first: int, last: int, longest: int) -> Tensor:
        """(last - first, nheads, longest, longest): the maps of these sequences."""
        ends = self.cu_seqlens[first : last + 1]
        start, end = (int(each) for each in ends[[0, -1]])
        bias = self._grid_bias()
        if bias is not None:
            bias = bias[first:last] if bias.shape[0] > 1 else bias
            bias = bias[..., :longest] if bias.shape[-1] > 1 else bias
            bias = bias[..., :longest, :] if bias.shape[-2] > 1 else bias
        return attention(
            self.q[start:end],
            self.k[start:end],
            self.k[start:end],
            ends - start,
            longest,
            softmax_scale=self.scale,
            causal=self.causal,
            bias=bias,
            return_probs=True,
        )[1]

    def collision(self) -> Tensor:
        """Σ_j P_ij², (total, nheads); its inverse is the number of keys that a row looks at."""
        twice = replace(self, scale=2 * self.scale, bias=None if self.bias is None else 2 * self.bias)
        return (twice.lse - 2 * self.lse).exp()

    def overlap(self, other: Probabilities) -> Tensor:
        """Σ_j P_ij P'_ij of two models or heads, (total, nheads). Their head widths add up to 128 at most."""
        bias = self.bias
        if other.bias is not None:
            bias = other.bias if bias is None else bias + other.bias
        # both have one scale, so each own scale is multiplied into the queries
        both = replace(
            self,
            q=torch.cat([self.q * self.scale, other.q * other.scale], -1),
            k=torch.cat([self.k, other.k], -1),
            scale=1.0,
            bias=bias,
        )
        return (both.lse - self.lse - other.lse).exp()

    def divergence(self, other: Probabilities) -> Tensor:
        """KL(P ‖ P') of each row, (total, nheads), in nats.

        Raises:
            ValueError: there is an attention bias.
        """
        if self.bias is not None or other.bias is not None:
            raise ValueError("bias: the divergence of attention under a bias is not computed")
        own, lse = self._keys_and_lse
        others = self.of_values(other.k)
        found = self.scale * (self.q * own).sum(-1) - lse
        return (found - other.scale * (other.q * others).sum(-1) + other.lse).clamp_min(0.0)

    def at_offset(self, offset: int) -> Tensor:
        """P_i,i+offset of each row, (total, nheads); 0 if there is no such key."""
        total, heads = self.q.shape[:2]
        found = self.q.new_zeros(total, heads)
        if abs(offset) >= total or (self.causal and offset > 0):
            return found
        rows = slice(max(-offset, 0), total - max(offset, 0))
        keys = slice(rows.start + offset, rows.stop + offset)
        sequence, position = self._places
        scores = self.scale * (self.q[rows] * self.k[keys]).sum(-1)
        if (bias := self._grid_bias()) is not None:
            scores = scores + _bias_at(bias, sequence[rows], position[rows], position[rows] + offset)
        alike = (sequence[rows] == sequence[keys])[:, None]
        found[rows] = torch.where(alike, (scores - self.lse[rows]).exp(), 0.0)
        return found

    def between(self, rows: Tensor, keys: Tensor) -> Tensor:
        """P of some pairs of tokens, (pairs, nheads).

        Args:
            rows, keys: (pairs,) int64, rows of the packed batch; both rows of a pair are of one sequence.
        """
        scores = self.scale * self.q[rows].mul(self.k[keys]).sum(-1)
        if (bias := self._grid_bias()) is not None:
            sequence, position = self._places
            scores = scores + _bias_at(bias, sequence[rows], position[rows], position[keys])
        found = (scores - self.lse[rows]).exp()
        return torch.where((keys > rows)[:, None], 0.0, found) if self.causal else found

    @functools.cached_property
    def _places(self) -> tuple[Tensor, Tensor]:
        """(sequence, position within it) of each row, both (total,)."""
        return positions_of(self.cu_seqlens, self.q.shape[0])


def _bias_at(bias: Tensor, sequence: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """(total, nheads or 1): the bias of some cells. The caller drops cells whose column is outside."""
    batch, _, rows, columns = bias.shape
    sequence = sequence if batch > 1 else torch.zeros_like(sequence)
    row = row if rows > 1 else torch.zeros_like(row)
    column = column.clamp(0, columns - 1)
    return bias[sequence, :, row, column]


class Observer(Taps):
    """Passes each layer's probabilities to `seen` of a subclass, and changes nothing."""

    max_bytes = MAX_BYTES

    def seen(self, layer: int, probabilities: Probabilities) -> None:
        """Called with the probabilities of each layer; a subclass overrides it."""
        raise NotImplementedError

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Taps`."""
        self.seen(layer, Probabilities.of(q, k, sequences, self.max_bytes))
        return q, k, v, sequences.bias


def check_bytes(max_bytes: int, length: int, cell: int) -> None:
    """Raise a ValueError if the maps of `length` tokens, `cell` bytes per pair, exceed `max_bytes`."""
    if length**2 * cell > max_bytes:
        raise ValueError(
            f"max_bytes: {max_bytes:,} are too few for the attention maps of {length} tokens, "
            f"{length**2 * cell:,} bytes"
        )


def uniform(q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch) -> Tensor:
    """The context of heads that look at all their keys alike: (total, nheads, headdim).

    Any bias but -inf is left out: such heads know no positions.
    """
    bias = sequences.bias
    if bias is not None:
        bias = torch.where(bias == -math.inf, bias, 0.0)
    out = attention(
        torch.zeros_like(q),
        k,
        v,
        sequences.cu_seqlens,
        sequences.max_seqlen,
        causal=sequences.causal,
        bias=bias,
        places=sequences.fitting_places(),
    )
    return cast(Tensor, out)  # alone, as neither lse nor probabilities are returned
