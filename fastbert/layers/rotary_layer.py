"""The module that is a layer with rotary positions, and with norms and dropouts outside its two blocks."""

from __future__ import annotations

from typing import Any

from fastbert.layers.encoder_layer import EncoderLayer
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
