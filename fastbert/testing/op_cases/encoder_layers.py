"""Cases of `encoder_layers`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fastbert.ops.activation import activate_eager
from fastbert.ops.attention import attention
from fastbert.ops.encoder_layers import LayerStack, LayerWeights, first_rows
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.testing.error_rule import Case, Outputs, draws, ends_of

_NAMES = LayerWeights._fields[5:]


@dataclass(frozen=True, repr=False)
class LayersCase(Case):
    """Layers of `nheads` heads; with `states` all outputs; with `bias` a bias of that many heads."""

    lengths: tuple[int, ...]
    nheads: int
    headdim: int
    inner: int
    hidden: int = 0
    layers: int = 2
    activation: str = "gelu"
    eps: float = 1e-12
    last_eps: float = 1e-12
    causal: bool = False
    first_only: bool = False
    states: bool = False
    bias: int = 0

    op = "encoder_layers"
    shape = "{0.layers}x{0.total}x{0.nheads}x{0.headdim}x{0.inner}"
    marks = (
        "hidden=hidden{} activation={} eps=eps{:g} last_eps=last_eps{:g} causal first_only states bias=bias{}"
    )
    options = ("causal", "first_only", "states", "max_seqlen")
    parts = ("linear", "attention", "layer_norm")
    counts_host = True

    @property
    def total(self) -> int:
        """How many tokens there are."""
        return sum(self.lengths)

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of a layer's matrices."""
        width = self.nheads * self.headdim
        hidden = self.hidden or width
        return (3 * width, hidden), (hidden, width), (self.inner, hidden), (hidden, self.inner)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(f"y{i}" for i in range(self.layers)) if self.states else ("y",)

    def inputs(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> dict[str, Any]:
        _, randn = draws(seed, dtype, device)
        hidden = self.shapes[1][0]
        found = {"x": randn(self.total, hidden), "cu_seqlens": ends_of(self.lengths, device)}
        bias = randn(1, self.bias, self.max_seqlen, self.max_seqlen) if self.bias else None
        for i in range(self.layers):
            made = [
                t
                for rows, columns in self.shapes
                for t in (randn(rows, columns, scale=columns**-0.5), randn(rows, scale=0.5))
            ]
            for at in (4, 10):
                made[at:at] = 1 + randn(hidden, scale=0.1), randn(hidden, scale=0.1)
            found |= {f"{name}_{i}": t for name, t in zip(_NAMES, made, strict=True)}
        return found | {"bias": bias}

    def _stack(self, given) -> LayerStack:
        how = self.nheads, self.headdim, self.activation, self.eps, self.last_eps
        each = ([given[f"{name}_{i}"] for name in _NAMES] for i in range(self.layers))
        return LayerStack([LayerWeights(*how, *tensors) for tensors in each])

    def call(self, x: Tensor, cu_seqlens: Tensor, bias: Tensor | None, **given: Any) -> Outputs:
        return tuple(super().call(x=x, stack=self._stack(given), cu_seqlens=cu_seqlens, bias=bias))

    def oracle(self, x: Tensor, cu_seqlens: Tensor, bias: Tensor | None, **given: Any) -> Outputs:
        return tuple(super().oracle(x=x, stack=self._stack(given), cu_seqlens=cu_seqlens, bias=bias))

    def eager(self, x: Tensor, cu_seqlens: Tensor, bias: Tensor | None, **given: Any) -> Outputs:
        def attend(q, k, v):
            return torch.cat([self._attention(*part) for part in self._parts(q, k, v, bias)])

        def norm(z, x_bias, residual, weight, bias, eps):
            return F.layer_norm(z + x_bias + residual, (x.shape[1],), weight, bias, eps)

        def product(x, weight, bias, activation=None):
            return activate_eager(F.linear(x, weight, bias), activation)

        return self._one_by_one(x, cu_seqlens, given, product, attend, norm)

    def in_parts(self, x: Tensor, cu_seqlens: Tensor, bias: Tensor | None, **given: Any) -> Outputs:
        def attend(q, k, v):
            return attention(q, k, v, cu_seqlens, self.max_seqlen, causal=self.causal, bias=bias)

        def norm(z, x_bias, residual, weight, bias, eps):
            return layer_norm(z, weight, bias, residual=residual, x_bias=x_bias, eps=eps)

        return self._one_by_one(x, cu_seqlens, given, linear, attend, norm)

    def _parts(self, q, k, v, bias):
        """q, k, v and bias of each sequence."""
        for one_q, one_k, one_v in zip(*(t.split(self.lengths) for t in (q, k, v)), strict=True):
            n = len(one_q)
            yield one_q, one_k, one_v, None if bias is None else bias[..., :n, :n]

    def _attention(self, q, k, v, bias):
        """PyTorch's, of one sequence (length, nheads, headdim)."""
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        if self.causal and bias is not None:
            hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
            bias = bias.masked_fill(hidden, float("-inf"))
        causal = self.causal and bias is None
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal)[0].transpose(0, 1)

    def _one_by_one(self, x, cu_seqlens, given, product, attend, norm):
        found = []
        for i, w in enumerate(self._stack(given).layers):
            qkv = product(x, w.qkv_weight, w.qkv_bias).view(-1, 3, self.nheads, self.headdim)
            context = attend(*qkv.unbind(1)).flatten(1)
            if self.first_only and i == self.layers - 1:
                x, context = first_rows(x, cu_seqlens), first_rows(context, cu_seqlens)
            z = product(context, w.out_weight, None)
            a = norm(z, w.out_bias, x, w.norm_weight, w.norm_bias, w.eps)
            inner = product(a, w.up_weight, w.up_bias, self.activation)
            z = product(inner, w.down_weight, None)
            x = norm(z, w.down_bias, a, w.last_weight, w.last_bias, w.last_eps)
            found.append(x)
        return tuple(found if self.states else found[-1:])

    def floor(self, inputs: dict[str, Any], name: str) -> float:
        """A few roundings of each of the sums, whose terms are as large as LayerNorm makes them."""
        eps = torch.finfo(inputs["x"].dtype).eps
        return 64 * self.layers * eps * (1 + inputs["x"].abs().max().item())

    def flops(self) -> int:
        products = 2 * self.total * sum(map(math.prod, self.shapes))
        return self.layers * (products + 4 * self.nheads * self.headdim * sum(n * n for n in self.lengths))

    def bytes(self, dtype: torch.dtype) -> int:
        weights = self.layers * sum(map(math.prod, self.shapes))
        return (weights + 2 * self.total * self.shapes[1][0]) * dtype.itemsize


SMALL = [
    LayersCase((5, 9), 2, 32, 96),
    LayersCase((3, 0, 6), 1, 64, 72, hidden=40, eps=1e-5, last_eps=0.3, first_only=True),
]
# These run the kernels for compute capability 9.0, tiles of all rows, and the pass of an activation.
ON_GPU = [
    LayersCase((128,), 12, 64, 3072),
    LayersCase((20,), 12, 32, 1536, first_only=True),
    LayersCase((512, 300, 444, 201), 12, 64, 3072, states=True),
    LayersCase((200, 150, 250), 12, 64, 3072, activation="relu", bias=12),
]
CASES = [
    *SMALL,
    LayersCase((1,), 1, 32, 8, layers=1),
    LayersCase((7, 4, 21), 2, 32, 64, layers=3, states=True, activation="gelu_tanh"),
    LayersCase((6, 11), 3, 32, 80, causal=True, activation="silu"),
    LayersCase((9, 5), 2, 64, 136, hidden=96, bias=2, activation="relu"),
    LayersCase((12, 3), 1, 128, 64, bias=1, causal=True, first_only=True, activation="tanh"),
    LayersCase((0, 8, 0), 2, 64, 64, first_only=True, states=True),
]


def bench(lengths: tuple[int, ...]) -> list[Case]:
    return [LayersCase(lengths, 12, 64, 3072)]
