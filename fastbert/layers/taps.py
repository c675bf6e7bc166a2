"""Access to what a layer computes inside; analysis, pruning and distillation use it."""

from __future__ import annotations

from torch import Tensor

from fastbert.layers.batch import PackedBatch


class Taps:
    """Sees, and may replace, tensors inside the layers of a call; a subclass overrides the methods it needs.

    Each method takes the layer's number (from 0, in execution order; a shared layer has one number per use)
    and the packed batch. What a method returns takes the tensor's place, so gradients flow through it. Under
    taps the layers run op by op.
    """

    def qkv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sequences: PackedBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query, key and value, each (total, nheads, headdim), before attention.

        The scores are q kᵀ / sqrt(headdim) + bias.

        Returns:
            Query, key and value, and the additive bias of attention as in `PackedBatch.bias`.
        """
        return q, k, v, sequences.bias

    def context(self, layer: int, context: Tensor, sequences: PackedBatch) -> Tensor:
        """The output of attention, (total, nheads, headdim), after gate and dropout."""
        return context

    def attended(self, layer: int, attended: Tensor, sequences: PackedBatch) -> Tensor:
        """The attention block's output after residual sum and norm, (total, hidden).

        Layers whose norms come before the blocks, and those with bottlenecks, do not show it.
        """
        return attended

    def inner(self, layer: int, inner: Tensor, sequences: PackedBatch) -> Tensor:
        """The feed-forward block between its two products, (total, intermediate), after the activation."""
        return inner
