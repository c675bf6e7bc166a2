"""The module that is a layer with rotary positions, and with norms and dropouts outside its two blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.modules import part
from fastbert.layers.parts import GatedPart, Part, RotaryAttention


class RotaryLayer(EncoderLayer):
    """One layer that rotates queries and keys; its feed-forward block may be gated, and its norms first.

    Args:
        config: the model's `EncoderConfig`.
        number: the layer's number.
        kept, inner: see `EncoderLayer`.
    """

    def __init__(
        self, config: Any, number: int, kept: tuple[int, ...] | None = None, inner: int | None = None
    ):
        gated = None if config.family.layer.gate is None else "first"
        kind = {"gated": gated, "kv_heads": config.kv_heads, "pre_norm": config.family.pre_norm}
        super().__init__(config, None, kept, inner, rotary=config.rotary(number), **kind)

    def _container(self, path: str) -> Part:
        """See `EncoderLayer`: the containers are the attention block and the feed-forward block."""
        names, stock = self.form.names, self.form.stock
        after = names.intermediate, stock.activation, *filter(None, stock.dropouts[3:]), names.output
        attend, *feed = (p.rpartition(".")[2] for p in (names.attention_output, *after))
        if path == stock.containers[0]:
            return RotaryAttention(self.form, attend)
        if names.gate is None:
            return Part(*feed)
        return GatedPart(*feed, gate=names.gate.rpartition(".")[2])

    def attend_by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See `PackedLayer`."""
        norm, attention = self.form.names.attention_norm, part(self, self.form.stock.containers[0])
        if self.form.pre_norm:
            attended, probs = attention(part(self, norm)(hidden), *args, **kwargs)
            return hidden + attended, probs
        attended, probs = attention(hidden, *args, **kwargs)
        return part(self, norm)(hidden + self._dropped(1, attended)), probs

    def feed_by_modules(self, hidden: Tensor) -> Tensor:
        """See `PackedLayer`."""
        norm, feed = part(self, self.form.names.output_norm), part(self, self.form.stock.containers[1])
        if self.form.pre_norm:
            return hidden + feed(norm(hidden))
        return norm(hidden + self._dropped(2, feed(hidden)))

    def _dropped(self, site: int, x: Tensor) -> Tensor:
        path = self.form.stock.dropouts[site]
        return x if path is None else part(self, path)(x)
