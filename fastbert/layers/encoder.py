"""One encoder layer, as calls to ops: self-attention and feed-forward.

Modules hold parameters under HuggingFace's names (form.py) and see only packed tokens `[total, hidden]`. A
layer reads the weights of its linear layers and norms and passes them to our ops. A sub-module that is no
longer plain (LoRA, parametrized, hooked) is called itself, and the rest stays fused. A linear layer that
`quantize` has replaced counts as plain.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fastbert.layers import direct, packing
from fastbert.layers.form import LayerForm
from fastbert.layers.fused import FusedLayer
from fastbert.layers.linear import (
    apply_joined,
    apply_linear,
    dense_norm,
    feed_forward_norm,
    has_float_weight,
    takes_rounded,
)
from fastbert.layers.modules import attach, changed, is_hooked, part, plain_dropout, watched
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
from fastbert.layers.patterns import Heads, Rows
from fastbert.layers.quantized import copy_of
from fastbert.layers.sequences import Sequences
from fastbert.layers.taps import Taps
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.encoder_layer import close_team, open_team
from fastbert.ops.first_attention import first_attention, pays


class LayerMath(FusedLayer):
    """The forward of an encoder layer, for a module with a `form` and with parts under the form's names.

    It is self-attention and feed-forward, each followed by dropout, residual sum and LayerNorm.

    Attributes:
        form: see `LayerForm`.
        fuses_norm: whether our op computes LayerNorm, with the residual sum before it.
        int8: whether 8-bit copies of the linear layers run. The layers stay floating-point ones; all six must
            be plain.
        label: the layer's name in errors.

    Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
    """

    # Dropout call sites of one layer: attention probabilities, attention output, feed-forward output
    SITES = 3
    fuses_norm = True

    def dropout_rates(self) -> tuple[float, float, float]:
        """The probabilities of the layer's dropout modules, each by its own mode.

        As in transformers, one in training mode drops in an eval model too (Gal and Ghahramani 2016).
        """
        rates, by_itself = [], self.form.stock.attention_drops_by_itself
        for path in self.form.paths[3]:
            rate = 0.0
            if path is not None:
                above, module = None, self
                for name in path:
                    above, module = module, module._modules[name]
                asked = above if by_itself and not rates else module
                rate = module.p if asked.training else 0.0
            rates.append(rate)
        return tuple(rates)

    def attend_by_modules(self, hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """The attention block's output, as transformers' layer calls its modules, and the probabilities."""
        attended, probs = two(self.attention(hidden, *args, **kwargs))
        if self.form.stock.norms_attention:
            attended = part(self, self.form.names.attention_norm)(attended + hidden)
        return attended, probs

    def feed_by_modules(self, hidden: Tensor) -> Tensor:
        """The feed-forward block's output, as transformers' layer calls its modules."""
        block = self.form.stock.feed_forward
        if (own := self.__dict__.get("feed_forward_chunk")) is not None:
            return own(hidden)
        if block is None:
            return self.output(self.intermediate(hidden), hidden)
        return part(self, self.form.names.output_norm)(getattr(self, block)(hidden) + hidden)

    def linear_at(self, path: str) -> nn.Module:
        """The linear layer at a dotted path, or its 8-bit copy."""
        module = part(self, path)
        return copy_of(module, f"{self.label}.{path}") if self.int8 else module

    def run(
        self,
        hidden: Tensor,
        sequences: Sequences,
        gate: Tensor | None = None,
        site: int = 1,
        first_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer on packed tokens; see `EncoderLayer.forward`."""
        if (
            not first_only
            and direct.on_gpu(hidden)
            and gate is None
            and sequences.taps is None
            and self._may_run_directly()
        ):
            y = direct.forward(self, self.form, hidden, sequences)
            if y is not None:
                return y, None
        found = None if first_only else self._fused(hidden, sequences)
        if found is None:
            # PyTorch's own ops need the threads too
            close_team()
        if first_only:
            return self._forward(hidden, sequences, gate, site, first_only)

        blocks = self._blocks(hidden, sequences, found is not None)
        if not blocks and found is None:
            return self._forward(hidden, sequences, gate, site)
        if not blocks:
            return self._forward_fused(*found, hidden, sequences, gate), None
        out = hidden.new_empty(hidden.shape)
        for first, last in blocks:
            ends = sequences.cu_seqlens[first : last + 1]
            rows = slice(int(ends[0]), int(ends[-1]))
            some = replace(sequences, cu_seqlens=ends - ends[0], blocks={})
            if found is None:
                out[rows] = self._forward(hidden[rows], some, gate, site)[0]
            else:
                self._forward_fused(*found, hidden[rows], some, gate, out[rows])
        return out, None

    def _may_run_directly(self) -> bool:
        """Whether `layers.direct` may run the layer: in inference, if our ops compute all of it."""
        return (
            not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and self.fuses_norm
            and self.form.activation is not None
            and self.form.heads is None
            and not self.int8
            and not any(self.dropout_rates())
        )

    def _forward(self, hidden, sequences, gate, site, first_only=False):
        if first_only:
            starts = packing.starts(sequences.cu_seqlens, hidden.shape[0])
            if self.form.heads is None:
                attention_p = self.dropout_rates()[0]
                context = self._first_context(hidden, starts, sequences, gate, attention_p, site)
            else:
                context = self._attend(hidden, sequences, gate, site)[0].index_select(0, starts)
            return self.after_attention(hidden.index_select(0, starts), context, sequences, site), None
        context, probs = self._attend(hidden, sequences, gate, site)
        return self.after_attention(hidden, context, sequences, site), probs

    def _attend(self, hidden, sequences, gate, site):
        """The output of self-attention, (total, nheads, headdim), and its probabilities or None."""
        q, k, v = self._qkv(hidden)
        taps, heads = sequences.taps, self.form.heads
        if heads is not None:
            if taps is not None and type(taps).qkv is not Taps.qkv:
                raise ValueError(
                    "model: has heads with fixed patterns (config fixed_heads), which have no queries and "
                    "keys to look at"
                )
            found = self._attend_fixed(heads, q, k, v, sequences, gate, site)
        else:
            bias = sequences.bias
            if taps is not None:
                q, k, v, bias = taps.qkv(self._number(site), q, k, v, sequences)
            found = self._attend_learned(q, k, v, bias, sequences, gate, site)
        context, probs = found if sequences.return_probs else (found, None)
        if taps is not None:
            context = taps.context(self._number(site), context, sequences)
        return context, probs

    def _attend_fixed(self, heads, q, k, v, sequences, gate, site):
        """As `_attend_learned`, with heads of which some attend by patterns."""
        rows = Rows.of(sequences.cu_seqlens, v.shape[0], sequences.max_seqlen)
        own = (
            heads.of_learned(v, 1),
            heads.of_learned(sequences.bias, 1),
            sequences,
            heads.of_learned(gate, 0),
        )
        found = self._attend_learned(q, k, *own, site)
        context, probs = found if sequences.return_probs else (found, None)
        context = heads.joined(context, v, rows, gate)
        return context if probs is None else (context, heads.all_probabilities(probs, rows))

    def _attend_learned(self, q, k, v, bias, sequences, gate, site):
        """The output of attention, with `return_probs` and its probabilities."""
        return attention(
            q,
            k,
            v,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            softmax_scale=self.form.head_dim**-0.5,
            causal=sequences.causal,
            bias=bias,
            gate=gate,
            dropout_p=self.dropout_rates()[0],
            seed=sequences.seed,
            offset=site,
            return_probs=sequences.return_probs,
            places=sequences.fitting_places(),
        )

    def after_attention(self, hidden: Tensor, context: Tensor, sequences: Sequences, site: int = 1) -> Tensor:
        """The layer's output from what attention has computed.

        Args:
            hidden: (rows, hidden), the layer's input.
            context: (rows, nheads, headdim) or (rows, hidden), the output of attention.
            sequences, site: see `EncoderLayer.forward`.
        """
        form, seed = self.form, sequences.seed
        dense, norm = self.linear_at(form.names.attention_output), part(self, form.names.attention_norm)
        context = context.reshape(hidden.shape)
        how = self.dropout_rates()[1], seed, site + 1, self.fuses_norm, sequences.arrivals
        rounded = None
        if takes_rounded(self.linear_at(form.names.intermediate), hidden):
            hidden, rounded = dense_norm(dense, norm, context, hidden, *how, rounded=True)
        else:
            hidden = dense_norm(dense, norm, context, hidden, *how)
        tap = None
        if sequences.taps is not None:
            tap = functools.partial(sequences.taps.inner, self._number(site), sequences=sequences)
        return self._feed(hidden, seed, site + 2, sequences.arrivals, rounded, tap)

    def _number(self, site: int) -> int:
        """The number of the layer whose first dropout call site is `site`."""
        return (site - 1) // self.SITES

    def _feed(self, hidden, seed, site, arrivals=None, rounded=None, tap=None):
        """The feed-forward block with its residual sum and norm; `site` is its dropout call site.

        `rounded` is `hidden` in the dtype of its products, if that is there already; `tap` sees what is
        between them.
        """
        names = self.form.names
        up, down = self.linear_at(names.intermediate), self.linear_at(names.output)
        return feed_forward_norm(
            up,
            down,
            part(self, names.output_norm),
            hidden,
            self.form.activation,
            self.dropout_rates()[2],
            seed,
            site,
            self.fuses_norm,
            arrivals,
            rounded,
            tap,
        )

    def _first_context(
        self,
        x: Tensor,
        starts: Tensor,
        sequences: Sequences,
        gate: Tensor | None,
        dropout_p: float,
        site: int,
    ) -> Tensor:
        """The attention's output at the rows `starts` alone: (total, hidden) -> (batch, hidden)."""
        form = self.form
        names, shape = form.names, (-1, form.nheads, form.head_dim)
        q = apply_linear(self.linear_at(names.query), x.index_select(0, starts)).reshape(shape)
        key, value = self.linear_at(names.key), self.linear_at(names.value)
        if (
            not torch.is_grad_enabled()
            and dropout_p == 0.0
            and has_float_weight(key)
            and has_float_weight(value)
            and checks.autocast_dtype(x) is None
            and not torch.compiler.is_compiling()
            and not sequences.causal
            and pays(x, starts.shape[0])
        ):
            return first_attention(
                x,
                q,
                key.weight,
                value.weight,
                value.bias,
                sequences.cu_seqlens,
                softmax_scale=self.form.head_dim**-0.5,
                bias=sequences.bias,
                gate=gate,
                max_seqlen=sequences.max_seqlen,
            )
        k, v = (apply_linear(module, x).reshape(shape) for module in (key, value))
        # The other rows get a query of zeros, and their results are dropped. `starts` has the row of the next
        # sequence for an empty one, which must neither change that query nor get its gradient.
        filled = sequences.cu_seqlens.diff().gt(0)[:, None, None]
        context = attention(
            torch.zeros_like(k).index_add(0, starts, torch.where(filled, q, 0)),
            k,
            v,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            softmax_scale=self.form.head_dim**-0.5,
            causal=sequences.causal,
            bias=sequences.bias,
            gate=gate,
            dropout_p=dropout_p,
            seed=sequences.seed,
            offset=site,
            places=sequences.fitting_places(),
        )
        return context.index_select(0, starts).flatten(1)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (total, nheads, head_dim); the first two only of heads that have them.

        One product with [Wq; Wk; Wv] if that is cheaper than three.
        """
        names = self.form.names
        modules = [self.linear_at(path) for path in (names.query, names.key, names.value)]
        shape = (x.shape[0], self.form.nheads, self.form.head_dim)
        joined = apply_joined(self, modules, x)
        if self.form.heads is not None:
            columns = self.form.head_dim * len(self.form.heads.learned)
            parts = (columns, columns, shape[1] * shape[2])
            each = [apply_linear(m, x) for m in modules] if joined is None else joined.split(parts, 1)
            return tuple(t.reshape(shape[0], t.shape[1] // shape[2], shape[2]) for t in each)
        each = [joined] if joined is not None else [apply_linear(m, x) for m in modules]
        width = shape[1] * shape[2]
        if sum(t.shape[1] for t in each) != 3 * width:
            raise ValueError(
                f"query, key, value: expected {width} outputs each, {shape[1]} heads of {shape[2]}, got "
                f"{', '.join(str(m.out_features) for m in modules)}; after pruning by hand set "
                "num_attention_heads of the attention module"
            )
        if joined is None:
            return tuple(t.reshape(shape) for t in each)
        return split(joined.reshape(x.shape[0], 3, *shape[1:]))


class _Split(torch.autograd.Function):
    """`unbind(1)` whose gradients are not copied where attention's backward has written them side by side."""

    @staticmethod
    def forward(ctx, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.unbind(1)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        whole = grads[0]._base
        if (
            whole is None
            or torch.is_grad_enabled()
            or any(g._base is not whole for g in grads)
            or whole.shape != (grads[0].shape[0], 3, *grads[0].shape[1:])
            or any(
                g.data_ptr() != own.data_ptr() or g.stride() != own.stride()
                for g, own in zip(grads, whole.unbind(1), strict=True)
            )
        ):
            return torch.stack(grads, 1)
        return whole


def split(qkv: Tensor) -> tuple[Tensor, ...]:
    """(total, 3, nheads, head_dim) -> query, key and value, views of it."""
    if qkv.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Split.apply(qkv)
    return qkv.unbind(1)


def together(layers: Iterable[nn.Module], hidden: Tensor) -> contextlib.AbstractContextManager:
    """A context in which threads wait for the layers' ops; see `ops.encoder_layer.open_team`.

    No thread waits if a hook watches the layers: PyTorch's ops inside the hook would find no threads.
    """
    if torch.compiler.is_compiling() or _has_any_global_hook() or any(map(is_hooked, layers)):
        return contextlib.nullcontext()
    return _with_team(hidden)


@contextlib.contextmanager
def _with_team(hidden: Tensor) -> Iterator[None]:
    try:
        open_team(hidden)
        yield
    finally:
        close_team()


class EncoderLayer(LayerMath, nn.Module):
    """One encoder layer with parameters of its own, and the modules of transformers' layer.

    Args:
        config: the model's `EncoderConfig`.
        heads: which heads attend by fixed patterns, if some do.
    """

    def __init__(self, config: Any, heads: Heads | None = None):
        super().__init__()
        self.as_made: AsMade | None = None
        family, hidden = config.family, config.hidden_size
        names, nheads, stock = family.layer, config.num_attention_heads, family.stock_layer
        self.form = LayerForm(names, stock, nheads, config.head_dim, config.activation_name, heads)
        for path in stock.containers:
            attach(self, path, self._container(path))
        columns = hidden if heads is None else len(heads.learned) * config.head_dim
        for path in (names.query, names.key):
            attach(self, path, nn.Linear(hidden, columns))
        for path in (names.value, names.attention_output):
            attach(self, path, nn.Linear(hidden, hidden))
        attach(self, names.attention_norm, nn.LayerNorm(hidden, eps=config.norm_eps))
        attach(self, names.intermediate, nn.Linear(hidden, config.intermediate_size))
        attach(self, stock.activation, Activation(config.activation_name))
        attach(self, names.output, nn.Linear(config.intermediate_size, hidden))
        attach(self, names.output_norm, nn.LayerNorm(hidden, eps=config.norm_eps))
        rates = (config.attention_probs_dropout_prob, *(config.hidden_dropout_prob,) * 2)
        for path, rate in zip(stock.dropouts, rates, strict=True):
            if path is not None:
                attach(self, path, nn.Dropout(rate))

    def _container(self, path: str) -> Part:
        """The module at a path of the form's containers: what is below it, in transformers' order."""
        form = self.form
        names, stock = form.names, form.stock

        def below(*paths: str | None) -> list[str]:
            return [p.rpartition(".")[2] for p in paths if p is not None and p.rpartition(".")[0] == path]

        after = below(names.attention_output, stock.dropouts[1])
        norm = next(iter(below(*names.norms)), None)
        if path == names.query.rpartition(".")[0]:
            return SelfAttention(form, *after, norm=norm)
        inside = below(names.query.rpartition(".")[0])
        if inside:
            return Attention(*inside, *after, norm=norm)
        feeds = below(names.intermediate, stock.activation, names.output, stock.dropouts[2])
        return Part(*(after or feeds), norm=norm)

    def ff_chunk(self, hidden: Tensor) -> Tensor:
        """ALBERT's feed-forward block, which has no module of its own."""
        return self.ffn_output(self.activation(self.ffn(hidden)))

    def dropout_rates(self) -> tuple[float, float, float]:
        """See `LayerMath`."""
        made = self.as_made
        if made is not None and not any(m.training for m in made.droppers):
            return 0.0, 0.0, 0.0
        return super().dropout_rates()

    def _plain_parts(self, sequences: Sequences) -> tuple[list[nn.Module], list[nn.Module]] | None:
        made = self.as_made if sequences.looked_at else None
        if made is None:
            return super()._plain_parts(sequences)
        if made.parts is None:
            made.parts = super()._plain_parts(sequences)
        return made.parts

    def gap(self) -> str | None:
        """Why the layer must be called module by module on a padded batch; None if our ops may run it."""
        if torch.compiler.is_compiling():
            return self._gap()
        made = self.as_made
        if made is not None and made.holds(self):
            return None
        reason = self._gap()
        self.as_made = AsMade(self) if reason is None else None
        return reason

    def _gap(self) -> str | None:
        if watched(self):
            return "it has hooks or another forward"
        containers, linears, norms, dropouts, activation = self.form.paths
        for path in containers:
            module = self
            for name in path:
                module = module._modules.get(name)
                if module is None:
                    return f"{'.'.join(path)} is gone"
            if type(module) not in PARTS or watched(module):
                return f"{'.'.join(path)} was replaced, or has hooks or another forward"
            if type(module) is SelfAttention and module.heads() != (
                self.form.nheads,
                self.form.head_dim,
                self.form.head_dim**-0.5,
            ):
                return f"{'.'.join(path)} has other heads"
        if (self.form.stock.feed_forward or "feed_forward_chunk") in self.__dict__:
            return "it has another feed-forward block"
        for path, dotted in (*linears, *norms):
            module = self
            for name in path:
                module = module._modules[name]
            reason = changed(module)
            if reason is not None:
                return f"{dotted} {reason}"
        for path in dropouts:
            if path is not None and not plain_dropout(part(self, ".".join(path))):
                return f"{'.'.join(path)} is not a plain dropout"
        if activation_of(part(self, ".".join(activation))) != self.form.activation:
            return f"{'.'.join(activation)} was replaced, or has hooks"
        return None

    def forward(
        self,
        hidden: Tensor,
        sequences: Sequences | Tensor | None = None,
        gate: Tensor | None = None,
        site: int = 1,
        first_only: bool = False,
        *,
        output_attentions: bool = False,
    ) -> Any:
        """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None).

        On a padded batch (batch, seqlen, hidden), with an attention mask in place of `sequences`, every
        module is called by itself, as in transformers, and the output is (batch, seqlen, hidden).

        Args:
            hidden: packed tokens.
            sequences: the batch; of a padded one the mask that `SelfAttention` takes.
            gate: (nheads,) factor of each head's output, or None.
            site: the first of the layer's `SITES` dropout call sites.
            first_only: compute only the rows of `packing.starts`, the first token of each sequence, and
                return ((batch, hidden), None). Allowed if `may_skip_rows` is true, total >= 1 and no
                probabilities are asked for. The row of an empty sequence has no meaning.
            output_attentions: of a padded batch: return (output, probabilities).
        """
        if isinstance(sequences, Sequences):
            return self.run(hidden, sequences, gate, site, first_only)
        if self.form.heads is not None:
            raise ValueError(
                "model: layers with fixed heads (config fixed_heads) cannot be called module by module"
                + (f", but {reason}" if (reason := self.gap()) else "")
            )
        given = {} if gate is None else {"head_mask": gate}
        attended, probs = self.attend_by_modules(hidden, sequences, **given)
        y = self.feed_by_modules(attended)
        return (y, probs) if output_attentions else y
