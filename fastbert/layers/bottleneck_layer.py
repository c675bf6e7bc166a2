"""The module that is a layer with bottlenecks: MobileBERT's parameters and names, our mathematics.

The mathematics is in `bottleneck.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastbert.layers.bottleneck import (
    OUTPUT,
    Feed,
    NarrowAttention,
    Narrowing,
    NarrowOutput,
    NarrowSelfAttention,
    bottleneck_of,
    made_bottlenecks,
    norm_of,
    stock_of,
)
from fastbert.layers.encoder_layer import EncoderLayer, PackedLayer, linear
from fastbert.layers.form import LayerForm
from fastbert.layers.modules import attach, part
from fastbert.layers.parts import Activation, AsMade, Part, activation_of, two
from fastbert.layers.patterns import Heads


class BottleneckLayer(EncoderLayer):
    """One layer whose blocks compute in a narrower width, with several feed-forward blocks.

    Args:
        config: the model's `EncoderConfig`.
        heads, kept: see `EncoderLayer`.
    """

    def __init__(self, config: Any, heads: Heads | None = None, kept: tuple[int, ...] | None = None):
        PackedLayer.__init__(self)
        self.as_made: AsMade | None = None
        own, made, names = bottleneck_of(config), made_bottlenecks(config), config.family.layer
        hidden, width, size, eps = config.hidden_size, config.block_width, config.head_dim, config.norm_eps
        wide, stock = own.output is not None, stock_of(config, config.family.stock_layer)
        nheads = config.num_attention_heads if kept is None else len(kept)
        act = config.activation_name
        self.form = LayerForm(names, stock, nheads, size, act, heads, kept, bottleneck=own)

        inside = [path and path.rpartition(".")[2] for path in (own.keys, own.values, own.residual)]
        dropout = [] if wide else ["dropout"]
        attach(self, "attention", NarrowAttention("self"))
        attach(self, "attention.self", NarrowSelfAttention(self.form))
        attach(self, "attention.output", Part("dense", *dropout, norm="LayerNorm"))
        if own.feeds:
            self.ffn = nn.ModuleList(Feed() for _ in own.feeds)
        for feed in own.feeds:
            attach(self, f"{feed}.output", Part("dense", norm="LayerNorm"))
        attach(self, "output", NarrowOutput("dense", *dropout, norm="LayerNorm"))
        if wide:
            attach(self, "bottleneck", Narrowing(*inside))
            attach(self, OUTPUT, Part("dense", "dropout", norm="LayerNorm"))

        columns = size * (nheads if heads is None else len(heads.learned))
        narrow = width if own.keys is not None else hidden
        attach(self, names.query, linear(narrow, columns))
        attach(self, names.key, linear(narrow, columns))
        attach(self, names.value, linear(hidden if own.values is None else width, nheads * size))
        for path in made:
            attach(self, path, Part("dense", "LayerNorm"))
            attach(self, f"{path}.dense", linear(hidden, width))
            attach(self, f"{path}.LayerNorm", norm_of(config, width, eps))
        attach(self, names.attention_output, linear(nheads * size, width))
        attach(self, names.attention_norm, norm_of(config, width, eps))
        for above_feed in (*(f"{feed}." for feed in own.feeds), ""):
            attach(self, f"{above_feed}intermediate", Part("dense", "intermediate_act_fn"))
            attach(self, f"{above_feed}intermediate.dense", linear(width, config.intermediate_size))
            attach(self, f"{above_feed}intermediate.intermediate_act_fn", Activation(act))
            attach(self, f"{above_feed}output.dense", linear(config.intermediate_size, width))
            # As in transformers, the last norm of a block in the narrow width has PyTorch's eps
            given = (eps,) if above_feed else ()
            attach(self, f"{above_feed}output.LayerNorm", norm_of(config, width, *given))
        if wide:
            attach(self, f"{OUTPUT}.dense", linear(width, hidden))
            attach(self, f"{OUTPUT}.LayerNorm", norm_of(config, hidden, eps))
        rates = config.attention_probs_dropout_prob, config.hidden_dropout_prob, config.hidden_dropout_prob
        for path, rate in zip(stock.dropouts, rates, strict=True):
            if path is not None:
                attach(self, path, nn.Dropout(rate))

    def _gap(self) -> str | None:
        """See `EncoderLayer`."""
        reason, own = super()._gap(), self.form.bottleneck
        assert own is not None
        for feed in own.feeds if reason is None else ():
            if activation_of(part(self, f"{feed}.intermediate.intermediate_act_fn")) != self.form.activation:
                return f"{feed}.intermediate.intermediate_act_fn was replaced, or has hooks"
        return reason

    def by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See `EncoderLayer`."""
        narrow = self._modules.get("bottleneck")
        given = (hidden,) * 4 if narrow is None else narrow(hidden)
        attended, probs = two(self.attention(*given, *args, **kwargs))
        for path in self.form.bottleneck.feeds if self.form.bottleneck else ():
            attended = part(self, path)(attended)
        return self.output(self.intermediate(attended), attended, hidden), probs
