"""The module that is a layer with bottlenecks: MobileBERT's parameters and names, our mathematics.

The mathematics is in `bottleneck.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fastbert.layers.bottleneck import (
    Feed,
    NarrowAttention,
    Narrowing,
    NarrowOutput,
    NarrowSelfAttention,
    NoNorm,
    Steps,
    norm_of,
)
from fastbert.layers.encoder_layer import EncoderLayer, PackedLayer, linear
from fastbert.layers.form import Bottleneck, LayerForm, Parts
from fastbert.layers.linear import all_plain
from fastbert.layers.modules import attach, changed, part
from fastbert.layers.parts import Activation, AsMade, Part, activation_of, two
from fastbert.layers.patterns import Heads

_INPUT, _SHARED, _OUTPUT = "bottleneck.input", "bottleneck.attention", "output.bottleneck"


def bottleneck_of(config: Any) -> Bottleneck:
    """Which bottlenecks and feed-forward blocks the layers of a config have."""
    feeds = tuple(f"ffn.{i}" for i in range(config.num_feedforward_networks - 1))
    if not config.use_bottleneck:
        return Bottleneck(None, None, None, None, feeds)
    shared = _SHARED if config.key_query_shared_bottleneck else None
    keys, values = (_INPUT, _INPUT) if config.use_bottleneck_attention else (shared, None)
    return Bottleneck(keys, values, _INPUT, _OUTPUT, feeds)


class BottleneckLayer(EncoderLayer):
    """One layer whose blocks compute in a narrower width, with several feed-forward blocks.

    Args:
        config: the model's `EncoderConfig`.
        heads, kept: see `EncoderLayer`.
    """

    def __init__(self, config: Any, heads: Heads | None = None, kept: tuple[int, ...] | None = None):
        PackedLayer.__init__(self)
        self.as_made: AsMade | None = None
        own, names, stock = bottleneck_of(config), config.family.layer, config.family.stock_layer
        hidden, width, size, eps = config.hidden_size, config.block_width, config.head_dim, config.norm_eps
        wide = own.output is not None
        if wide:
            stock = replace(stock, dropouts=(stock.dropouts[0], None, f"{_OUTPUT}.dropout"))
        # A bottleneck that no config reads has its parameters in transformers too
        made = [_INPUT, *([_SHARED] if config.key_query_shared_bottleneck else [])] if wide else []
        above = ["bottleneck", *made, _OUTPUT] if wide else []
        above += [path for feed in own.feeds for path in (feed, f"{feed}.intermediate", f"{feed}.output")]
        stock = replace(stock, containers=(*stock.containers, *above))
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
            attach(self, _OUTPUT, Part("dense", "dropout", norm="LayerNorm"))

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
            attach(self, f"{_OUTPUT}.dense", linear(width, hidden))
            attach(self, f"{_OUTPUT}.LayerNorm", norm_of(config, hidden, eps))
        rates = config.attention_probs_dropout_prob, config.hidden_dropout_prob, config.hidden_dropout_prob
        for path, rate in zip(stock.dropouts, rates, strict=True):
            if path is not None:
                attach(self, path, nn.Dropout(rate))

    def _below(self, above: str | None, *names: str) -> Any:
        return None if above is None else tuple(part(self, f"{above}.{name}") for name in names)

    def parts(self) -> Parts:
        """See `PackedLayer`."""
        own, step = self.form.bottleneck, ("dense", "LayerNorm")
        assert own is not None
        keys, values, residual, output = (self._below(path, *step) for path in own[:4])
        feed = "intermediate.dense", "output.dense", "output.LayerNorm"
        feeds = tuple(self._below(path, *feed) for path in own.feeds)
        parts, steps = super().parts(), Steps(keys, values, residual, output, feeds)
        linears, norms = steps.modules
        norms = (parts.attention_norm, parts.output_norm, *norms)
        return parts._replace(steps=steps, plain=all_plain((*parts.linears, *linears), norms, NoNorm))

    def _gap(self) -> str | None:
        """See `EncoderLayer`."""
        reason, own = super()._gap(), self.form.bottleneck
        assert own is not None
        if reason is not None:
            return reason
        norms = [f"{path}.LayerNorm" for path in own.steps] + [
            f"{path}.output.LayerNorm" for path in own.feeds
        ]
        for path in (*own.linears, *norms):
            if (reason := changed(part(self, path))) is not None:
                return f"{path} {reason}"
        for feed in own.feeds:
            if activation_of(part(self, f"{feed}.intermediate.intermediate_act_fn")) != self.form.activation:
                return f"{feed}.intermediate.intermediate_act_fn was replaced, or has hooks"
        return None

    def by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """See `EncoderLayer`."""
        narrow = self._modules.get("bottleneck")
        given = (hidden,) * 4 if narrow is None else narrow(hidden)
        attended, probs = two(self.attention(*given, *args, **kwargs))
        for path in self.form.bottleneck.feeds if self.form.bottleneck else ():
            attended = part(self, path)(attended)
        return self.output(self.intermediate(attended), attended, hidden), probs
