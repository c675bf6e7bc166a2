"""The module that is a layer with rotary positions, and with norms and dropouts outside its two blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.layers.encoder_layer import EncoderLayer
from fastbert.layers.modules import part
from fastbert.layers.parts import GatedPart, Part, RotaryAttention


class RotaryLayer(EncoderLayer):
    """One layer that rotates queries and keys; its feed-forward block may be gated.

    Args:
        config: the model's `EncoderConfig`.
        number: the layer's number.
        kept, inner: see `EncoderLayer`.
    """

    def __init__(
        self, config: Any, number: int, kept: tuple[int, ...] | None = None, inner: int | None = None
    ):
        gated = None if config.family.layer.gate is None else "first"
        super().__init__(config, None, kept, inner, gated=gated, rotary=config.rotary(number))

    def _container(self, path: str) -> Part:
        """See `EncoderLayer`: the containers are the attention block and the feed-forward block."""
        names, stock = self.form.names, self.form.stock
        after = names.intermediate, stock.activation, *stock.dropouts[3:], names.output
        attend, *feed = (p.rpartition(".")[2] for p in (names.attention_output, *after))
        if path == stock.containers[0]:
            return RotaryAttention(self.form, attend)
        if names.gate is None:
            return Part(*feed)
        return GatedPart(*feed, gate=names.gate.rpartition(".")[2])

    def attend_by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See `PackedLayer`."""
        attended, probs = part(self, self.form.stock.containers[0])(hidden, *args, **kwargs)
        return part(self, self.form.names.attention_norm)(hidden + self._dropped(1, attended)), probs

    def feed_by_modules(self, hidden: Tensor) -> Tensor:
        """See `PackedLayer`."""
        fed = part(self, self.form.stock.containers[1])(hidden)
        return part(self, self.form.names.output_norm)(hidden + self._dropped(2, fed))

    def _dropped(self, site: int, x: Tensor) -> Tensor:
        path = self.form.stock.dropouts[site]
        return x if path is None else part(self, path)(x)
