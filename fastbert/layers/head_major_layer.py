"""The module that is NeoBERT's layer: parameters without modules between, our mathematics (pre_norm.py).

Query, key and value are one linear layer, whose outputs are (nheads, 3, head_dim), and are read in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastbert.layers.batch import PackedBatch
from fastbert.layers.encoder_layer import EncoderLayer, PackedLayer, linear
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import attach, part
from fastbert.layers.parts import Activation, AsMade, GatedPart, probabilities
from fastbert.layers.positions import rotated


def inner_size(intermediate_size: int) -> int:
    """Columns of a gated block: two thirds of the config's number, rounded up to a multiple of 8."""
    return -(-int(2 * intermediate_size / 3) // 8) * 8


class HeadMajorLayer(EncoderLayer):
    """One layer with norms before its blocks, interleaved rotary positions and a gated feed-forward block.

    Args:
        config: the model's `EncoderConfig`.
        number: the layer's number.
        kept: see `EncoderLayer`.
        inner: columns of the feed-forward block; None for `inner_size` of the config's number.
    """

    def __init__(
        self, config: Any, number: int, kept: tuple[int, ...] | None = None, inner: int | None = None
    ):
        PackedLayer.__init__(self)
        self.as_made: AsMade | None = None
        family, hidden, size = config.family, config.hidden_size, config.head_dim
        names, stock, bias = family.layer, family.stock_layer, config.has_bias
        nheads = config.num_attention_heads if kept is None else len(kept)
        wide = inner_size(config.intermediate_size) if inner is None else inner
        self.form = LayerForm(
            *(names, stock, nheads, size, config.activation_name, None, kept),
            pre_norm=True,
            packed=True,
            head_major=True,
            gated="first",
            rotary=config.rotary(number),
            interleaved=True,
        )
        leaves = (path.rpartition(".")[2] for path in (names.intermediate, stock.activation, names.output))
        attach(self, names.attention_norm, config.norm(hidden))
        attach(self, names.query, linear(hidden, 3 * nheads * size, bias(names.query)))
        attach(self, names.attention_output, linear(nheads * size, hidden, bias(names.attention_output)))
        attach(self, names.output_norm, config.norm(hidden))
        attach(self, stock.containers[-1], GatedPart(*leaves))
        attach(self, names.intermediate, linear(hidden, 2 * wide, bias(names.intermediate)))
        attach(self, stock.activation, Activation(config.activation_name))
        attach(self, names.output, linear(wide, hidden, bias(names.output)))

    def attend_by_modules(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        grid: PackedBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `PackedLayer`; no module around the linear layers is called."""
        assert grid is not None
        names = self.form.names
        norm, qkv, out = (part(self, p) for p in (names.attention_norm, names.query, names.attention_output))
        each = rotated(self.form, qkv(norm(hidden)).flatten(0, 1), grid)
        q, k, v = (t.unflatten(0, hidden.shape[:2]).transpose(1, 2) for t in each)
        probs = probabilities(q, k, self.form.softmax_scale, attention_mask)
        context = probs @ v
        if head_mask is not None:
            context = context * head_mask[:, None, None]
        return hidden + out(context.transpose(1, 2).flatten(2)), probs
