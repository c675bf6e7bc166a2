"""The modules that are encoder layers: HuggingFace's parameters and names, our mathematics (encoder.py).

`PackedLayer` is what an executor (fastbert/execution) asks of a layer, be it this package's `EncoderLayer` or
an accelerated layer of transformers.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.layers import bottleneck, disentangled, encoder, first_token, global_tokens
from fastbert.layers.asked import NOTHING_MORE, Asked
from fastbert.layers.bands import bands
from fastbert.layers.batch import PackedBatch
from fastbert.layers.block_sparse import BlockSparseAttention
from fastbert.layers.disentangled import DisentangledAttention
from fastbert.layers.form import LayerForm, Parts
from fastbert.layers.global_tokens import GlobalAttention
from fastbert.layers.linear import kind_of_layer
from fastbert.layers.modules import (
    NoNorm,
    attach,
    changed,
    is_hooked,
    is_no_norm,
    is_plain,
    part,
    plain_dropout,
    rms_eps,
    watched,
)
from fastbert.layers.parts import (
    PARTS,
    Activation,
    AsMade,
    Attention,
    Part,
    SelfAttention,
    activation_of,
    two,
)
from fastbert.layers.patterns import Heads

_PARTS = PARTS | bottleneck.PARTS | {BlockSparseAttention, DisentangledAttention, GlobalAttention}


class PackedLayer(nn.Module):
    """An encoder layer: a module with a `form`, and with parts under the form's names.

    Attributes:
        form: see `LayerForm`.
        fuses_norm: whether our op computes LayerNorm, with the residual sum before it.
        int8: whether 8-bit copies of the linear layers run, which must all be plain. The linear layers
            themselves stay in floating point.
        label: the layer's name in errors.
    """

    form: LayerForm
    attention: nn.Module
    intermediate: nn.Module
    output: nn.Module
    fuses_norm = True
    int8 = False
    label = "layer"

    def is_called(self) -> bool:
        """Whether packed tokens must pass through the module's own call, which something looks at."""
        return is_hooked(self)

    def may_skip_rows(self) -> bool:
        """Whether the layer may skip rows that are not asked for.

        It may not if a hook watches the layer or a part, because the hook would miss tokens. A replaced part
        (LoRA, quantised) is called on fewer rows. It cannot mix rows, which belong to different sequences.
        """
        return not any(is_hooked(module) for module in self.modules())

    def parts(self) -> Parts:
        """What the layer computes with now, if nothing keeps our ops from it (`look`)."""
        names = self.form.names
        linears, norms = ([part(self, path) for path in paths] for paths in (names.linears, names.norms))
        missing = self.form.pre_norm and is_plain(norms[0], nn.Identity)
        own, steps = self.form.bottleneck, None
        if own is None:
            kind = type(norms[1]) if rms_eps(norms[1]) is not None else nn.LayerNorm
            common = kind_of_layer(linears, norms[missing:], kind)
        else:
            steps = bottleneck.Steps.of(own, self)
            more, kind = steps.modules, type(norms[0])
            kind = kind if is_no_norm(norms[0]) else NoNorm
            common = kind_of_layer([*linears, *more[0]], [*norms, *more[1]], kind)
        how = self.dropout_rates(), self.fuses_norm, None, self.int8, self.label, common
        return Parts._make((*linears[:6], *norms, self, *how, [*linears, None][6], steps))

    def look(self, everything: str | None) -> Parts | str:
        """What the layer computes with now, or why it must be called module by module on a padded batch.

        Args:
            everything: why all modules must be called (`calls_all`), or None.
        """
        raise NotImplementedError

    def begin(self, hidden: Tensor) -> None:
        """Called once before the layer computes `hidden`, in any executor; may raise."""

    def on_packed(self, hidden: Tensor, batch: PackedBatch, asked: Asked = NOTHING_MORE) -> Any:
        """The layer's mathematics on packed tokens; see `encoder.layer`."""
        layer = first_token.layer if asked.first_only else encoder.layer
        return layer(self.form, self.parts(), hidden, batch, asked)

    def options(self) -> list[dict[str, Any]]:
        """The dictionaries that `look` depends on besides those of the layer's modules."""
        return []

    def dropout_rates(self) -> tuple[float, ...]:
        """The probabilities of the layer's dropout modules, each by its own mode.

        As in transformers, a module in training mode drops in an eval model too (Gal and Ghahramani 2016).
        """
        rates, by_itself = [], self.form.stock.attention_drops_by_itself
        layer: Any = self
        for path in self.form.paths[3]:
            rate = 0.0
            if path is not None:
                above = layer
                for name in path[:-1]:
                    above = above._modules[name]
                module = above._modules.get(path[-1])
                asked = above if (by_itself and not rates) or module is None else module
                # A number or an nn.Identity in place of the module is in transformers' layers alone
                p = getattr(above, path[-1]) if module is None else getattr(module, "p", 0.0)
                rate = p if asked.training else 0.0
            rates.append(rate)
        return tuple(rates)

    def attend_by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The attention block's output, as transformers' layer calls its modules, and the probabilities."""
        form = self.form
        if form.rotary is None:
            attended, probs = two(self.attention(hidden, *args, **kwargs))
            if form.stock.norms_attention:
                attended = part(self, form.names.attention_norm)(attended + hidden)
            return attended, probs
        norm, attention = part(self, form.names.attention_norm), part(self, form.stock.containers[0])
        attended, probs = two(attention(norm(hidden) if form.pre_norm else hidden, *args, **kwargs))
        if form.pre_norm:
            return hidden + attended, probs
        return norm(hidden + self._dropped(1, attended)), probs

    def feed_by_modules(self, hidden: Tensor) -> Tensor:
        """The feed-forward block's output, as transformers' layer calls its modules."""
        form, block = self.form, self.form.stock.feed_forward
        if form.rotary is not None:
            norm, feed = part(self, form.names.output_norm), part(self, form.stock.containers[-1])
            if form.pre_norm:
                return hidden + feed(norm(hidden))
            return norm(hidden + self._dropped(2, feed(hidden)))
        if (own := self.__dict__.get("feed_forward_chunk")) is not None:
            return own(hidden)
        if block is None:
            return self.output(self.intermediate(hidden), hidden)
        return part(self, self.form.names.output_norm)(getattr(self, block)(hidden) + hidden)

    def _dropped(self, site: int, x: Tensor) -> Tensor:
        path = self.form.stock.dropouts[site]
        return x if path is None else part(self, path)(x)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """An nn.Linear, without PyTorch's warning of weights without elements."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")
        return nn.Linear(inputs, outputs, bias)


class EncoderLayer(PackedLayer):
    """One encoder layer with parameters of its own, and the modules of transformers' layer.

    Args:
        config: the model's `EncoderConfig`.
        heads: which heads attend by fixed patterns; None if all learn.
        kept: which of the config's heads the layer has; None for all.
        inner: columns of the feed-forward block; None for the config's number.
        kind: further fields of the layer's form.
    """

    ffn: nn.Module
    ffn_output: nn.Module
    activation: nn.Module

    def __init__(
        self,
        config: Any,
        heads: Heads | None = None,
        kept: tuple[int, ...] | None = None,
        inner: int | None = None,
        **kind: Any,
    ):
        super().__init__()
        self.as_made: AsMade | None = None
        family, hidden = config.family, config.hidden_size
        names, size, stock = family.layer, config.head_dim, family.stock_layer
        nheads = config.num_attention_heads if kept is None else len(kept)
        wide: int = config.intermediate_size if inner is None else inner
        if kind.get("relative") is not None:
            stock = replace(stock, dropouts=(*stock.dropouts, disentangled.dropout(names)))
        self.form = LayerForm(names, stock, nheads, size, config.activation_name, heads, kept, **kind)
        bias = config.has_bias
        for path in stock.containers:
            attach(self, path, self._container(path))
        columns = size * (nheads if heads is None else len(heads.learned))
        shared = None if self.form.kv_heads is None else size * self.form.kv_heads
        widths = columns, shared or columns, shared or nheads * size
        for path, width in zip((names.query, names.key, names.value), widths, strict=True):
            attach(self, path, linear(hidden, width, bias(path)))
        if self.form.relative is not None:
            for path in dict.fromkeys(disentangled.projections(self.form)):
                if path is not None and path not in names.linears:
                    attach(self, path, linear(hidden, columns))
        if self.form.global_tokens:
            for path in global_tokens.projections(names):
                attach(self, path, linear(hidden, columns))
        attach(self, names.attention_output, linear(nheads * size, hidden, bias(names.attention_output)))
        attach(self, names.attention_norm, config.norm(hidden))
        halves = 2 if self.form.gated is not None and names.gate is None else 1
        for path in (names.intermediate, names.gate):
            if path is not None:
                attach(self, path, linear(hidden, halves * wide, bias(path)))
        attach(self, stock.activation, Activation(config.activation_name))
        attach(self, names.output, linear(wide, hidden, bias(names.output)))
        attach(self, names.output_norm, config.norm(hidden))
        others = len(stock.dropouts) - 1
        rates = (config.attention_probs_dropout_prob, *(config.hidden_dropout_prob,) * others)
        for path, rate in zip(stock.dropouts, rates, strict=True):
            if path is not None:
                attach(self, path, nn.Dropout(rate))

    def _container(self, path: str) -> Part:
        """The container at one of the form's paths, which calls its children in transformers' order."""
        form = self.form
        names, stock = form.names, form.stock

        def below(*paths: str | None) -> list[str]:
            return [p.rpartition(".")[2] for p in paths if p is not None and p.rpartition(".")[0] == path]

        after = below(names.attention_output, stock.dropouts[1])
        norm = next(iter(below(*names.norms)), None)
        if path == names.query.rpartition(".")[0]:
            if form.blocks is not None:
                return BlockSparseAttention(form, *after, norm=norm)
            kind = SelfAttention if form.relative is None else DisentangledAttention
            kind = GlobalAttention if form.global_tokens else kind
            return kind(form, *after, norm=norm)
        inside = below(names.query.rpartition(".")[0])
        if inside:
            return Attention(*inside, *after, norm=norm)
        feeds = below(names.intermediate, stock.activation, names.output, stock.dropouts[2])
        return Part(*(after or feeds), norm=norm)

    def ff_chunk(self, hidden: Tensor) -> Tensor:
        """ALBERT's feed-forward block, which has no module of its own."""
        return self.ffn_output(self.activation(self.ffn(hidden)))

    def gap(self) -> str | None:
        """Why the layer must be called module by module on a padded batch; None if our ops may run it."""
        if torch.compiler.is_compiling():
            return self._gap()
        made = self.as_made
        if made is not None and made.holds(self):
            return None
        reason, self.as_made = self._gap(), None
        # Under a hook that may stay nothing is kept, as its removal would not show
        if reason is None and (made := AsMade(self)).holds(self):
            self.as_made = made
        return reason

    def _gap(self) -> str | None:
        if watched(self):
            return "it has hooks or another forward"
        containers, linears, norms, dropouts, activation = self.form.paths
        for path in containers:
            module: nn.Module | None = self
            for name in path:
                module = module._modules.get(name)
                if module is None:
                    return f"{'.'.join(path)} is gone"
            if type(module) not in _PARTS or watched(module):
                return f"{'.'.join(path)} was replaced, or has hooks or another forward"
            if isinstance(module, SelfAttention) and module.heads() != (
                self.form.nheads,
                self.form.head_dim,
                self.form.softmax_scale,
            ):
                return f"{'.'.join(path)} has other heads"
        if (self.form.stock.feed_forward or "feed_forward_chunk") in self.__dict__:
            return "it has another feed-forward block"
        others = global_tokens.projections(self.form.names) if self.form.global_tokens else ()
        for dotted in (*(path for _, path in (*linears, *norms)), *others):
            if (reason := changed(part(self, dotted))) is not None:
                return f"{dotted} {reason}"
        for path in dropouts:
            if path is not None and not plain_dropout(part(self, ".".join(path))):
                return f"{'.'.join(path)} is not a plain dropout"
        if activation_of(part(self, ".".join(activation))) != self.form.activation:
            return f"{'.'.join(activation)} was replaced, or has hooks"
        return None

    def by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """(output on a padded batch, as transformers' layer calls its modules, probabilities)."""
        attended, probs = self.attend_by_modules(hidden, *args, **kwargs)
        return self.feed_by_modules(attended), probs

    def look(self, everything: str | None) -> Parts | str:
        """See `PackedLayer`."""
        reason, made = everything or self.gap(), self.as_made
        if reason is not None or made is None or torch.compiler.is_compiling():
            return reason or self.parts()
        if made.parts is None:
            made.parts = self.parts()._replace(owner=None)
        rates = self.dropout_rates() if made.drops() else (0.0, 0.0, 0.0)
        return made.parts._replace(owner=self, rates=rates)

    def is_called(self) -> bool:
        """See `PackedLayer`. A subclass with another forward is called too."""
        return is_hooked(self) or type(self).forward is not EncoderLayer.forward

    def may_skip_rows(self) -> bool:
        """See `PackedLayer`. A subclass with another forward computes all rows."""
        return type(self).forward is EncoderLayer.forward and super().may_skip_rows()

    def forward(
        self,
        hidden: Tensor,
        batch: PackedBatch | Tensor | None = None,
        asked: Asked = NOTHING_MORE,
        *,
        gate: Tensor | None = None,
        output_attentions: bool = False,
        grid: PackedBatch | None = None,
    ) -> Any:
        """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None).

        On a padded batch (batch, seqlen, hidden), with an attention mask in place of `batch`, every module is
        called by itself, as in transformers, and the output is (batch, seqlen, hidden).

        Args:
            hidden: packed tokens.
            batch: where the sequences are; for a padded batch the mask that `SelfAttention` takes.
            asked: what else is asked for; packed tokens only.
            gate: (nheads,) factor of each head's output, or None; padded batches only.
            output_attentions: whether to return (output, probabilities); padded batches only.
            grid: what attention on a padded batch rotates by, scores distances by, or divides into blocks by;
                or the global tokens.
        """
        if isinstance(batch, PackedBatch):
            return self.on_packed(hidden, batch, asked)
        if self.form.heads is not None:
            raise ValueError(
                "model: layers with fixed heads (config fixed_heads) cannot be called module by module"
                + (f", but {reason}" if (reason := self.gap()) else "")
            )
        given: dict[str, Any] = {} if gate is None else {"head_mask": gate}
        if grid is not None:
            given["grid"] = grid
        y, probs = self.by_modules(hidden, batch, **given)
        if output_attentions and probs is not None and self.form.global_tokens:
            flags = None if grid is None or grid.globals is None else grid.globals.flags
            probs = bands(self.form, probs, flags)
        return (y, probs) if output_attentions else y
