"""Cases of `first_attention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.testing.error_rule import Case, Outputs, draws, ends_of


@dataclass(frozen=True, repr=False)
class FirstAttentionCase(Case):
    """Packed sequences of `lengths` tokens, and `tail` rows of NaN behind them.

    `bias` is "" (none), "shared", "sequence" (one per sequence) or "full" (and per head). `cancelling`: the
    tokens have a large part that both weights take to nearly nothing.
    """

    lengths: tuple[int, ...]
    nheads: int = 3
    head_dim: int = 16
    bias: str = ""
    gate: bool = False
    value_bias: bool = True
    tail: int = 0
    cancelling: bool = False

    op = "first_attention"
    marks = "bias=bias_{} gate value_bias=no_value_bias tail=tail{} cancelling"
    options = ("softmax_scale", "max_seqlen")

    @property
    def shape(self) -> str:
        numbers = len(self.lengths), self.max_seqlen, self.nheads, self.head_dim
        return f"{'x'.join(map(str, numbers))}-total{sum(self.lengths)}"

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        g, randn = draws(seed, dtype, device)
        width, batch = self.nheads * self.head_dim, len(self.lengths)
        x = randn(sum(self.lengths) + self.tail, width)
        weights = [randn(width, width, scale=width**-0.5) for _ in range(2)]
        if self.cancelling:
            # of norm 1, times 128 or -128
            large = F.normalize(torch.randn(width, generator=g), dim=0).to(device)
            signs = torch.where(torch.rand(len(x), 1, generator=g) < 0.5, -128, 128).to(device)
            x = (x.float() + signs * large).to(dtype)
            weights = [(w.float() - torch.outer(w.float() @ large, large)).to(dtype) for w in weights]
        x[sum(self.lengths) :] = torch.nan
        bias = None
        if self.bias:
            rows = {"shared": (1, self.nheads), "sequence": (batch, 1), "full": (batch, self.nheads)}
            bias = randn(*rows[self.bias], 1, self.max_seqlen)
            hidden = torch.rand(bias.shape, generator=g) < 0.3
            hidden[-1, 0] = True  # a query that sees nothing
            bias = bias.masked_fill(hidden.to(device), float("-inf"))
        return {
            "x": x,
            "q": randn(batch, self.nheads, self.head_dim),
            "key_weight": weights[0],
            "value_weight": weights[1],
            "value_bias": randn(width) if self.value_bias else None,
            "cu_seqlens": ends_of(self.lengths, device),
            "bias": bias,
            "gate": 1 + randn(self.nheads) if self.gate else None,
        }

    def eager(
        self,
        x: Tensor,
        q: Tensor,
        key_weight: Tensor,
        value_weight: Tensor,
        value_bias: Tensor | None,
        cu_seqlens: Tensor,
        bias: Tensor | None,
        gate: Tensor | None,
    ) -> Outputs:
        """Keys and values of all tokens, softmax, product."""
        x, shape = x[: sum(self.lengths)], (-1, self.nheads, self.head_dim)
        all_keys = F.linear(x, key_weight).reshape(shape).split(self.lengths)
        all_values = F.linear(x, value_weight, value_bias).reshape(shape).split(self.lengths)
        rows = []
        for i, (keys, values) in enumerate(zip(all_keys, all_values, strict=True)):
            scores = torch.einsum("hd,thd->ht", q[i], keys) * self.softmax_scale
            if bias is not None:
                scores = scores + bias[i if bias.shape[0] > 1 else 0, :, 0, : len(keys)]
            probs = torch.softmax(scores, -1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)
            out = torch.einsum("ht,thd->hd", probs, values)
            rows.append((out if gate is None else out * gate[:, None]).flatten())
        return torch.stack(rows)

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """4 eps (1 + max‖q‖ ‖k‖ scale) max‖v‖, as of `attention`."""
        x = inputs["x"][: sum(self.lengths)].double()
        if not len(x):
            return 0.0
        keys = F.linear(x, inputs["key_weight"].double()).norm(dim=-1).max().item()
        bias = None if inputs["value_bias"] is None else inputs["value_bias"].double()
        values = F.linear(x, inputs["value_weight"].double(), bias).norm(dim=-1).max().item()
        q = inputs["q"].double().norm(dim=-1).max().item()
        return 4 * torch.finfo(inputs["x"].dtype).eps * (1 + q * keys * self.softmax_scale) * values

    def flops(self) -> int:
        """By the definition, with a key and a value per token."""
        width = self.nheads * self.head_dim
        return 4 * sum(self.lengths) * width * (width + 1)

    def bytes(self, dtype: torch.dtype) -> int:
        width, batch = self.nheads * self.head_dim, len(self.lengths)
        elements = width * (sum(self.lengths) + 2 * batch + 2 * width + self.value_bias)
        return elements * dtype.itemsize + 4 * (batch + 1)


SMALL = [FirstAttentionCase((9, 0, 5)), FirstAttentionCase((7, 7, 2), bias="full", gate=True)]
ON_GPU = [  # the blocks of base and large, several tiles per part, and parts without tokens
    FirstAttentionCase((512, 300, 0, 257, 1), nheads=12, head_dim=64),
    FirstAttentionCase((512, 300, 0, 257), nheads=16, head_dim=64, bias="full", gate=True, tail=9),
    FirstAttentionCase((128,), nheads=12, head_dim=64, bias="sequence", cancelling=True),
]
CASES = [
    *SMALL,
    FirstAttentionCase((40, 3, 0, 17, 17, 1, 128, 0)),
    FirstAttentionCase((33, 33, 33, 5), value_bias=False, tail=3),
    FirstAttentionCase((9, 64, 64, 0, 2), bias="shared"),
    FirstAttentionCase((9, 64, 64, 0, 2), bias="sequence", gate=True),
    FirstAttentionCase((1,), gate=True),
    FirstAttentionCase((0, 0)),
    FirstAttentionCase((130, 64, 1), nheads=12, head_dim=64),  # BERT-base's heads
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [FirstAttentionCase(lengths, nheads=12, head_dim=64)]
