"""The module that is a pre-norm layer: ModernBERT's parameters and names, our mathematics (pre_norm.py)."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastbert.layers.encoder_layer import EncoderLayer, PackedLayer, linear
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import attach
from fastbert.layers.parts import Activation, AsMade, GatedPart, RotaryAttention


class PreNormLayer(EncoderLayer):
    """One layer with norms before its blocks, rotary positions, a window and a gated feed-forward block.

    Args:
        config: the model's `EncoderConfig`.
        number: the layer's number. Layer 0 has no norm before attention, as the embeddings end in one.
        kept, inner: see `EncoderLayer`.
    """

    def __init__(
        self, config: Any, number: int, kept: tuple[int, ...] | None = None, inner: int | None = None
    ):
        PackedLayer.__init__(self)
        self.as_made: AsMade | None = None
        family, hidden, size = config.family, config.hidden_size, config.head_dim
        names, stock, bias = family.layer, family.stock_layer, config.has_bias
        nheads = config.num_attention_heads if kept is None else len(kept)
        wide: int = config.intermediate_size if inner is None else inner
        self.form = LayerForm(
            *(names, stock, nheads, size, config.activation_name, None, kept),
            pre_norm=True,
            packed=True,
            gated="first",
            window=config.window(number),
            rotary=config.rotary(number),
        )
        attention, feed = stock.containers
        leaf = {path: path.rpartition(".")[2] for path in (*names.linears, *stock.dropouts, stock.activation)}
        steps = leaf[names.attention_output], leaf[stock.dropouts[1]]
        attach(self, names.attention_norm, config.norm(hidden) if number else nn.Identity())
        attach(self, attention, RotaryAttention(self.form, *steps))
        attach(self, names.query, linear(hidden, 3 * nheads * size, bias(names.query)))
        attach(self, names.attention_output, linear(nheads * size, hidden, bias(names.attention_output)))
        attach(self, names.output_norm, config.norm(hidden))
        after = leaf[stock.dropouts[2]], leaf[names.output]
        attach(self, feed, GatedPart(leaf[names.intermediate], leaf[stock.activation], *after))
        attach(self, names.intermediate, linear(hidden, 2 * wide, bias(names.intermediate)))
        attach(self, stock.activation, Activation(config.activation_name))
        attach(self, names.output, linear(wide, hidden, bias(names.output)))
        dropped = config.attention_probs_dropout_prob
        for path, rate in zip(stock.dropouts, (dropped, dropped, config.mlp_dropout), strict=True):
            attach(self, path, nn.Dropout(rate))
