"""Cases of `attention_received`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.attention import attention_ref
from fastbert.ops.attention_received import attention_received_ref
from fastbert.testing.error_rule import Case, Outputs, draws, ends_of


@dataclass(frozen=True, repr=False)
class AttentionReceivedCase(Case):
    """Sequences of `lengths`, and `tail` rows of NaN behind them.

    `kv_heads`: heads of k; 0 means `nheads`. `packed_qkv`: q and k are views of one tensor. `blind`: the last
    query of each head sees nothing. `sharpness`: a factor of q.
    """

    lengths: tuple[int, ...]
    nheads: int = 3
    headdim: int = 16
    kv_heads: int = 0
    packed_qkv: bool = False
    blind: bool = False
    tail: int = 0
    sharpness: float = 1.0

    op = "attention_received"
    marks = "kv_heads=kv{} packed_qkv blind tail=tail{} sharpness=sharp{:g}"
    options = ("max_seqlen", "softmax_scale")

    @property
    def shape(self) -> str:
        numbers = len(self.lengths), self.max_seqlen, self.nheads, self.headdim
        return f"{'x'.join(map(str, numbers))}-total{sum(self.lengths)}"

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def softmax_scale(self) -> float:
        return self.headdim**-0.5

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        total, kv_heads = sum(self.lengths), self.kv_heads or self.nheads
        if self.packed_qkv:
            q, k, _ = randn(total + self.tail, 3, self.nheads, self.headdim).unbind(1)
        else:
            q, k = (randn(total + self.tail, heads, self.headdim) for heads in (self.nheads, kv_heads))
        q *= self.sharpness
        q[total:], k[total:] = torch.nan, torch.nan
        ends, compute = ends_of(self.lengths, device), torch.promote_types(dtype, torch.float32)
        keys = k.double().repeat_interleave(self.nheads // k.shape[1], 1)
        whole = q.double().nan_to_num(), keys.nan_to_num(), keys.nan_to_num()
        lse = attention_ref(*whole, ends, self.max_seqlen, self.softmax_scale)[1].to(compute)
        if self.blind:
            lse[:, total - 1] = -torch.inf
        return {"q": q, "k": k, "cu_seqlens": ends, "lse": lse}

    def eager(self, q: Tensor, k: Tensor, cu_seqlens: Tensor, lse: Tensor) -> Outputs:
        """The softmax of all scores of each sequence, summed."""
        found = [torch.zeros(0, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)]
        q, k, sees = (t[: sum(self.lengths)] for t in (q, k, ~lse.isneginf().t()))
        k = k.repeat_interleave(self.nheads // k.shape[1], 1)
        parts = (t.split(self.lengths) for t in (q, k, sees))
        for queries, keys, seeing in zip(*parts, strict=True):
            scores = torch.einsum("ihd,jhd->hij", queries, keys) * self.softmax_scale
            probs = torch.softmax(scores, -1) * seeing.t().unsqueeze(-1)
            found.append(probs.sum((0, 1)).to(found[0].dtype))
        return torch.cat([*found, found[0].new_zeros(self.tail)])

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """4 eps (1 + max‖q‖ ‖k‖ scale) max of what a token receives, as of `attention`."""
        total = sum(self.lengths)
        if not total:
            return 0.0
        q, k = (inputs[name][:total].double() for name in "qk")
        norms = q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
        lse = inputs["lse"][:, :total].double()
        most = attention_received_ref(
            q, k, inputs["cu_seqlens"], self.max_seqlen, lse, self.softmax_scale
        ).max()
        return 4 * torch.finfo(inputs["q"].dtype).eps * (1 + norms * self.softmax_scale) * most.item()

    def flops(self) -> int:
        return 2 * sum(n * n for n in self.lengths) * self.nheads * (self.headdim + 1)

    def bytes(self, dtype: torch.dtype) -> int:
        total, heads = sum(self.lengths), self.nheads + (self.kv_heads or self.nheads)
        return total * (heads * self.headdim * dtype.itemsize + 4 * (self.nheads + 1))


SMALL = [
    AttentionReceivedCase((9, 0, 33)),
    AttentionReceivedCase((70, 2), nheads=4, kv_heads=2, tail=3, blind=True),
]
ON_GPU = [  # every height of tiles, in heads of base
    AttentionReceivedCase((512, 131), nheads=12, headdim=64, packed_qkv=True),
    AttentionReceivedCase((128,) * 16, nheads=12, headdim=64, packed_qkv=True),
    AttentionReceivedCase((130, 64) * 20, nheads=12, headdim=64, packed_qkv=True),
]
CASES = [
    *SMALL,
    AttentionReceivedCase((40, 3, 0, 17, 1, 128, 0), packed_qkv=True),
    AttentionReceivedCase((24, 25, 64, 65), headdim=20),
    AttentionReceivedCase((130, 48), nheads=2, headdim=64, sharpness=20.0),
    AttentionReceivedCase((1,), tail=1),
    AttentionReceivedCase((0, 0)),
    AttentionReceivedCase((256, 131), nheads=12, headdim=64, packed_qkv=True),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [AttentionReceivedCase(lengths, nheads=12, headdim=64, packed_qkv=True)]
