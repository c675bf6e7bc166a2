"""The math of the paper, as calls to ops: embeddings, self-attention, feed-forward, pooler, relative bias.

Modules hold parameters under HuggingFace's names (families.py) and see packed tokens `[total, hidden]` only.
A layer reads its linear layers' and norms' weights and calls our ops, unless one of those sub-modules is no
longer the plain one (LoRA, parametrized, hooked): then that sub-module itself is called, and the rest stays
fused. A linear layer that `quantize` replaced counts as plain.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from fastbert.layers import packing
from fastbert.layers.quantized import QuantizedLinear, copy_of, int8_operands, int8_product
from fastbert.models.config import EncoderConfig
from fastbert.models.families import LayerNames
from fastbert.ops import checks
from fastbert.ops.attention import attention
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import embedding
from fastbert.ops.encoder_layer import close_team, encoder_layer, launchers, open_team
from fastbert.ops.layer_norm import layer_norm
from fastbert.ops.linear import linear
from fastbert.ops.linear import packer as linear_packer
from fastbert.runtime import prepared

_CAST_FROM = 64  # tokens that pay for casting two half-precision weights to float32

_ACTIVATE = {
    None: lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


_MANY_ROWS = 1536  # from here on a weight is packed for the call, not kept packed
_BLOCK_ROWS = 2048  # of a large batch, whose weights are packed block by block: see EncoderLayer._blocks
_FUSED_ROWS = 1024  # the same where the layer is fused, and its weights packed once for all blocks


@dataclass(frozen=True)
class Sequences:
    """What every layer of one call needs to know about the packed batch.

    Attributes:
        cu_seqlens, max_seqlen: see `fastbert.layers.packing.Packing`.
        bias: additive attention bias, (batch or 1, nheads or 1, S or 1, S), or None.
        seed: int64 tensor of one element from which all dropout of the call is drawn, None in eval.
        return_probs: layers return their attention probabilities too.
        scratch: memory in which a backend packs the weights of one layer after the other, and works.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    bias: Tensor | None = None
    seed: Tensor | None = None
    return_probs: bool = False
    scratch: list[Tensor] = field(default_factory=list)


def attach(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register `module` under a dotted path, making plain containers on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root._modules[parent]
    root.add_module(name, module)


def part(root: nn.Module, path: str) -> nn.Module:
    """The sub-module under a dotted path; looked up at every call, so that a replaced one is found."""
    for name in path.split("."):
        root = root._modules[name]
    return root


def is_hooked(module: nn.Module) -> bool:
    """Whether someone watches the calls of `module` itself."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a fused op may read the weights of `module` instead of calling it."""
    return type(module) is kind and not is_hooked(module)


def packed_weight(module: nn.Linear, x: Tensor) -> Tensor | None:
    """The module's weight as the serving backend reads it; made at the first call and kept for inference.

    None in training, under torch.compile, where the backend packs nothing, and for so many rows that packing
    for the one call costs next to nothing.
    """
    if module.training or torch.compiler.is_compiling() or x.shape[:-1].numel() >= _MANY_ROWS:
        return None
    dtype = module.weight.dtype
    if dtype != torch.float64:  # which autocast leaves alone
        dtype = checks.autocast_dtype(x) or dtype
    pack = linear_packer(x.device, dtype)
    if pack is None:
        return None

    def build():
        checks.float_tensor("weight", module.weight)
        return pack(module.weight.to(dtype).contiguous())

    return prepared.derived(module, ("packed", dtype), (module.weight,), build)


def apply_linear(module: nn.Module, x: Tensor, activation: str | None = None) -> Tensor:
    """act(module(x)), fused where the module is a plain nn.Linear."""
    if is_plain(module, nn.Linear):
        return linear(x, module.weight, module.bias, activation, packed=packed_weight(module, x))
    if is_plain(module, QuantizedLinear):
        return int8_product(x, module, [module], activation)
    return _ACTIVATE[activation](module(x))


def apply_norm(module: nn.Module, x: Tensor) -> Tensor:
    """module(x), on our op where the module is a plain nn.LayerNorm."""
    if is_plain(module, nn.LayerNorm):
        return layer_norm(x, module.weight, module.bias, eps=module.eps)
    return module(x)


def dense_norm(
    dense: nn.Module,
    norm: nn.Module,
    x: Tensor,
    residual: Tensor,
    dropout_p: float,
    seed: Tensor | None,
    offset: int,
    fuse: bool = True,
) -> Tensor:
    """norm(residual + dropout(dense(x))): the linear layer's bias, dropout and the sum go into the norm's
    pass, unless the norm is not the plain one or not to `fuse`.
    """
    x_bias = None
    if is_plain(dense, nn.Linear):
        x, x_bias = linear(x, dense.weight, packed=packed_weight(dense, x)), dense.bias
    elif is_plain(dense, QuantizedLinear):
        x, x_bias = int8_product(x, dense, [dense], with_bias=False), dense.bias
    else:
        x = dense(x)
    if fuse and is_plain(norm, nn.LayerNorm):
        return layer_norm(
            x, norm.weight, norm.bias,
            residual=residual, x_bias=x_bias, eps=norm.eps, dropout_p=dropout_p, seed=seed, offset=offset,
        )  # fmt: skip
    if x_bias is not None:
        x = x + x_bias
    if dropout_p > 0:
        x = x * (keep_mask_2d(seed, offset, *x.shape, dropout_p).to(x.dtype) * (1.0 / (1.0 - dropout_p)))
    return norm(x + residual)


def _untrained_row(module: nn.Embedding) -> Tensor:
    """The table, no gradient reaching its padding row: as nn.Embedding, for tables whose op knows no
    padding.
    """
    weight, row = module.weight, module.padding_idx
    if row is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    rows = torch.arange(weight.shape[0], device=weight.device).unsqueeze(1)
    return torch.where(rows == row, weight.detach(), weight)


def table(rows: int, width: int, padding_idx: int | None = None) -> nn.Embedding:
    """An embedding table, not initialised: PyTorch's own initialisation loads half a second of modules on
    meta.
    """
    return nn.Embedding(rows, width, padding_idx, _weight=torch.empty(rows, width))


def _is_plain_table(module: nn.Module) -> bool:
    """Whether rows are looked up and nothing else, forward and backward."""
    return is_plain(module, nn.Embedding) and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )


def embed(
    root: nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Packed ids (total,) or inputs_embeds (total, width) -> (total, width): word + position + segment
    embeddings, LayerNorm, dropout (Devlin et al. 2018, sec. 3 and fig. 2).

    Args:
        root: the module that holds the tables and the norm under HuggingFace's names.
        seed, dropout_p: of the dropout, which is call site 0.
    """
    word, position = root.word_embeddings, root.position_embeddings
    segment = root._modules.get("token_type_embeddings")
    norm = root.LayerNorm
    tables = [m for m in (word, position, segment) if m is not None]
    if all(_is_plain_table(m) for m in tables) and is_plain(norm, nn.LayerNorm) and norm.bias is not None:
        return embedding(
            input_ids,
            word.weight,
            norm.weight,
            norm.bias,
            position_ids=position_ids,
            position=_untrained_row(position),
            token_type_ids=token_type_ids,
            segment=None if segment is None else segment.weight,
            inputs_embeds=inputs_embeds,
            padding_idx=word.padding_idx,
            eps=norm.eps,
            dropout_p=dropout_p,
            seed=seed,
            offset=0,
        )
    x = word(input_ids) if inputs_embeds is None else inputs_embeds
    if segment is not None:
        x = x + segment(token_type_ids)
    x = norm(x + position(position_ids))
    if dropout_p > 0:
        x = x * (keep_mask_2d(seed, 0, *x.shape, dropout_p).to(x.dtype) / (1.0 - dropout_p))
    return x


class Embeddings(nn.Module):
    """Word + position + segment embeddings, LayerNorm, dropout (Devlin et al. 2018, sec. 3 and fig. 2)."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        family, width = config.family, config.embedding_width
        self.word_embeddings = table(config.vocab_size, width, config.pad_token_id)
        self.position_embeddings = table(
            config.max_position_embeddings,
            width,
            config.pad_token_id if family.position_padding_idx else None,
        )
        if family.segments and config.type_vocab_size > 0:
            self.token_type_embeddings = table(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.norm_eps)
        self.dropout_p = config.hidden_dropout_prob

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        token_type_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        """Packed ids (total,) or inputs_embeds (total, width) -> (total, width)."""
        return embed(
            self, input_ids, position_ids, token_type_ids, inputs_embeds, seed,
            self.dropout_p if self.training else 0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class LayerForm:
    """What one encoder layer computes, beside its parameters.

    Attributes:
        names: where its parts are.
        nheads, head_dim: heads, and the size of one.
        activation: of the feed-forward block, as `fastbert.ops.linear` spells it; None where only the
            module's own code knows it.
    """

    names: LayerNames
    nheads: int
    head_dim: int
    activation: str | None


class LayerMath:
    """What an encoder layer computes, for a module that has a `form` and parts under the form's names.

    Self-attention and feed-forward, each followed by dropout, residual sum and LayerNorm.

    Attributes:
        form: what the layer computes.
        fuses_norm: whether LayerNorm is ours, with the residual sum before it.
        int8: whether 8-bit copies of the linear layers run, which stay floating-point ones themselves. Only
            where all six are plain.
        label: the layer's name in errors.

    Source: Vaswani et al. 2017, sec. 3.1-3.3; Devlin et al. 2018.
    """

    SITES = (
        3  # dropout call sites of one layer: attention probabilities, attention output, feed-forward output
    )
    form: LayerForm
    fuses_norm = True
    int8 = False
    label = "layer"

    def linear_at(self, path: str) -> nn.Module:
        """The linear layer under a dotted path, or its 8-bit copy."""
        module = part(self, path)
        return copy_of(module, f"{self.label}.{path}") if self.int8 else module

    def dropout_rates(self) -> tuple[float, float, float]:
        """Of attention probabilities, attention output and feed-forward output, as they are now."""
        raise NotImplementedError

    def run(
        self,
        hidden: Tensor,
        sequences: Sequences,
        gate: Tensor | None = None,
        site: int = 1,
        first_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer on packed tokens; see `EncoderLayer.forward`."""
        fused = None if first_only else self._fused(hidden, sequences)
        if fused is None:
            close_team()  # PyTorch's own ops want threads too
        if first_only:
            return self._forward(hidden, sequences, gate, site, first_only)

        blocks = self._blocks(hidden, sequences, _BLOCK_ROWS if fused is None else _FUSED_ROWS)
        if not blocks and fused is None:
            return self._forward(hidden, sequences, gate, site)
        if not blocks:
            return self._forward_fused(*fused, hidden, sequences, gate), None
        out = hidden.new_empty(hidden.shape)
        for first, last in blocks:
            ends = sequences.cu_seqlens[first : last + 1]
            rows = slice(int(ends[0]), int(ends[-1]))
            some = replace(sequences, cu_seqlens=ends - ends[0])
            if fused is None:
                out[rows] = self._forward(hidden[rows], some, gate, site)[0]
            else:
                self._forward_fused(*fused, hidden[rows], some, gate, out[rows])
        return out, None

    def _forward(self, hidden, sequences, gate, site, first_only=False):
        hidden, probs = self._attend(hidden, sequences, gate, site, first_only)
        return self._feed(hidden, sequences.seed, site + 2), probs

    def _attend(self, hidden, sequences, gate, site, first_only):
        """Self-attention with its residual sum and norm."""
        form, seed = self.form, sequences.seed
        attention_p, hidden_p, _ = self.dropout_rates()
        if first_only:
            starts = packing.starts(sequences.cu_seqlens, hidden.shape[0])
            context = self._first_context(hidden, starts, sequences, gate, attention_p, site)
            probs = None
            hidden = hidden.index_select(0, starts)
        else:
            context = attention(
                *self._qkv(hidden),
                sequences.cu_seqlens,
                sequences.max_seqlen,
                softmax_scale=form.head_dim**-0.5,
                bias=sequences.bias,
                gate=gate,
                dropout_p=attention_p,
                seed=seed,
                offset=site,
                return_probs=sequences.return_probs,
            )
            context, probs = context if sequences.return_probs else (context, None)
        dense, norm = self.linear_at(form.names.attention_output), part(self, form.names.attention_norm)
        context = context.reshape(hidden.shape)
        return dense_norm(dense, norm, context, hidden, hidden_p, seed, site + 1, self.fuses_norm), probs

    def _feed(self, hidden, seed, site):
        """The feed-forward block with its residual sum and norm; `site` is its dropout call site."""
        form = self.form
        inner = apply_linear(self.linear_at(form.names.intermediate), hidden, form.activation)
        dense, norm = self.linear_at(form.names.output), part(self, form.names.output_norm)
        return dense_norm(dense, norm, inner, hidden, self.dropout_rates()[2], seed, site, self.fuses_norm)

    def _forward_fused(
        self,
        launch: Callable,
        weights: object,
        hidden: Tensor,
        sequences: Sequences,
        gate: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        names = self.form.names
        return encoder_layer(
            launch,
            hidden,
            weights,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            nheads=self.form.nheads,
            inner=part(self, names.intermediate).out_features,
            softmax_scale=self.form.head_dim**-0.5,
            bias=sequences.bias,
            gate=gate,
            activation=self.form.activation,
            eps=(part(self, names.attention_norm).eps, part(self, names.output_norm).eps),
            out=out,
        )

    def _fused(self, x: Tensor, sequences: Sequences) -> tuple[Callable, object] | None:
        """(the serving backend's function for a whole layer, the layer's weights as it takes them), or None.

        For inference on a CPU, in a layer whose parts are all plain and hold parameters of `x`'s dtype.
        """
        if (
            self.training
            or any(self.dropout_rates())
            or torch.is_grad_enabled()
            or x.shape[0] == 0
            or x.device.type != "cpu"
            or sequences.return_probs
            or torch.compiler.is_compiling()
            or checks.autocast_dtype(x) is not None
        ):
            return None
        names = self.form.names
        paths = (
            names.query, names.key, names.value, names.attention_output, names.intermediate, names.output
        )  # fmt: skip
        dense = [part(self, path) for path in paths]
        norms = [part(self, path) for path in (names.attention_norm, names.output_norm)]
        kind = type(dense[0])
        int8 = self.int8
        op = "linear_int8" if int8 else {nn.Linear: "linear", QuantizedLinear: "linear_int8"}.get(kind)
        if (
            op is None
            or not all(is_plain(m, kind) for m in dense)
            or not all(is_plain(m, nn.LayerNorm) for m in norms)
        ):
            return None
        found = launchers(x.device, x.dtype, op)
        if found is None:
            return None
        make, launch = found
        if op == "linear" and x.shape[0] >= _MANY_ROWS:
            weights = self._layer_weights(make, dense, norms, x, sequences.scratch)
        else:
            tables = [d for m in (*dense, *norms) for d in (m._parameters, m._buffers) if d]
            sources = tuple([t for d in tables for t in d.values() if t is not None])

            def build() -> object | None:
                if not int8:
                    return self._layer_weights(make, dense, norms, x)
                # Copies for the moment: what is kept of them is their packed form
                named = zip(dense, paths, strict=True)
                copies = [QuantizedLinear.from_linear(m, f"{self.label}.{path}") for m, path in named]
                return self._layer_weights(make, copies, norms, x)

            weights = prepared.derived(self, ("layer", op, x.dtype, launch), sources, build)
        return None if weights is None else (launch, weights)

    def _layer_weights(
        self,
        make: Callable,
        dense: list[nn.Module],
        norms: list[nn.Module],
        x: Tensor,
        scratch: list[Tensor] | None = None,
    ) -> object | None:
        """What `make` makes of the layer's weights; None where a parameter has not the dtype or device that
        the fused layer takes: the single ops then say what is wrong, or cast.
        """
        for module in (*dense, *norms):
            for name, t in module._parameters.items():
                if t is not None:
                    checks.own_elements(name, t)
        vectors = [m.bias for m in dense] + [t for m in norms for t in (m.weight, m.bias)]
        if any(t is not None and (t.dtype != x.dtype or t.device != x.device) for t in vectors):
            return None
        if type(dense[0]) is nn.Linear:
            if any(m.weight.dtype != x.dtype or m.weight.device != x.device for m in dense):
                return None
            linears = [(m.weight, packed_weight(m, x), None, m.bias) for m in dense]
        else:
            qkv = dense[:3]
            if len({m.bias is None for m in qkv}) > 1:
                return None
            linears = []
            whose = qkv[0] if self.int8 else self  # copies for the moment keep nothing
            for owner, modules in ((whose, qkv), *((m, [m]) for m in dense[3:])):
                weight, scale, bias, packed = int8_operands(x.device, x.dtype, owner, modules)
                linears.append((weight, packed, scale, bias))
        return make(linears, [(m.weight, m.bias) for m in norms], scratch)

    def _blocks(self, x: Tensor, sequences: Sequences, least: int) -> list[tuple[int, int]]:
        """Ranges of sequences, of `least` rows or more, to compute one after the other, so that a large
        batch's q, k, v and feed-forward, most of its memory, never exist as a whole; empty where all go at
        once.

        Inference on a CPU only: a GPU wants all rows together. A hook would see one call a block.
        """
        if (
            x.shape[0] < 2 * least
            or x.device.type != "cpu"
            or sequences.bias is not None
            or sequences.return_probs
            or torch.compiler.is_compiling()
            or self.training
            or any(self.dropout_rates())
            or torch.is_grad_enabled()
            or not self.may_skip_rows()
        ):
            return []
        ends = sequences.cu_seqlens.tolist()
        if ends[-1] != x.shape[0]:
            return []
        blocks, first = [], 0
        size = -(-ends[-1] // (ends[-1] // least))
        for last in range(1, len(ends)):  # the last block takes what would be too few rows for one more
            if ends[last] - ends[first] >= size and ends[-1] - ends[last] >= min(least, _MANY_ROWS):
                blocks.append((first, last))
                first = last
        return [*blocks, (first, len(ends) - 1)]

    def may_skip_rows(self) -> bool:
        """Whether `forward` may leave out rows that nobody asked for.

        Not where a hook watches the layer or a part of it: it would miss tokens. A replaced part (LoRA,
        quantised) is called on fewer rows; it has no way to mix rows, which belong to different sequences
        anyway.
        """
        return not any(is_hooked(module) for module in self.modules())

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
        # On a CPU the sequences' ends can be read at no cost
        if (
            x.device.type == "cpu"
            and not torch.is_grad_enabled()
            and dropout_p == 0.0
            and (x.shape[0] >= _CAST_FROM or checks.compute_dtype(x) == x.dtype)
            and is_plain(key, nn.Linear)
            and is_plain(value, nn.Linear)
            and checks.autocast_dtype(x) is None
            and not torch.compiler.is_compiling()
        ):
            return first_attention(
                x, q, key.weight, value.weight, value.bias, sequences.cu_seqlens,
                softmax_scale=self.form.head_dim**-0.5, bias=sequences.bias, gate=gate,
            )  # fmt: skip
        k, v = (apply_linear(module, x).reshape(shape) for module in (key, value))
        # What the other rows ask for is thrown away. An empty sequence has the start of the next one, whose
        # query it must neither change nor, in backward, see.
        filled = sequences.cu_seqlens.diff().gt(0)[:, None, None]
        context = attention(
            torch.zeros_like(k).index_add(0, starts, torch.where(filled, q, 0)),
            k,
            v,
            sequences.cu_seqlens,
            sequences.max_seqlen,
            softmax_scale=self.form.head_dim**-0.5,
            bias=sequences.bias,
            gate=gate,
            dropout_p=dropout_p,
            seed=sequences.seed,
            offset=site,
        )
        return context.index_select(0, starts).flatten(1)

    def _qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each (total, nheads, head_dim); one product with [Wq; Wk; Wv] where that is
        cheaper.
        """
        names = self.form.names
        modules = [self.linear_at(path) for path in (names.query, names.key, names.value)]
        shape = (x.shape[0], self.form.nheads, self.form.head_dim)
        if all(is_plain(m, QuantizedLinear) for m in modules) and len({m.bias is None for m in modules}) == 1:
            return int8_product(x, self, modules).reshape(x.shape[0], 3, *shape[1:]).unbind(1)
        weights = [m.weight for m in modules] if all(is_plain(m, nn.Linear) for m in modules) else []
        biases = [m.bias for m in modules] if weights else []
        grad = torch.is_grad_enabled() and (x.requires_grad or any(w.requires_grad for w in weights))
        # On a CPU the three products run as fast apart, and need no copy of the three weights.
        if not weights or any(b is None for b in biases) or not x.is_cuda:
            return tuple(apply_linear(m, x).reshape(shape) for m in modules)
        if grad or torch.compiler.is_compiling():
            weight, bias = torch.cat(weights), torch.cat(biases)
        else:
            dtype = checks.autocast_dtype(x) or weights[0].dtype
            weight, bias = prepared.derived(
                self,
                ("qkv", dtype),
                (*weights, *biases),
                lambda: (torch.cat(weights).to(dtype), torch.cat(biases).to(dtype)),
            )
        return linear(x, weight, bias).reshape(x.shape[0], 3, *shape[1:]).unbind(1)


def together(layers: list[nn.Module], hidden: Tensor) -> contextlib.AbstractContextManager:
    """While it stands, threads stand by for the layers: see `ops.encoder_layer.open_team`. Not where a hook
    watches them, whose ops would find no threads.
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
    """One encoder layer with parameters of its own."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        family, hidden = config.family, config.hidden_size
        names = family.layer
        self.form = LayerForm(names, config.num_attention_heads, config.head_dim, config.activation_name)
        hidden_p = config.hidden_dropout_prob
        self.attention_dropout_p = config.attention_probs_dropout_prob
        self.hidden_dropout_p = hidden_p if family.attention_output_dropout else 0.0
        self.ffn_dropout_p = hidden_p if family.ffn_dropout else 0.0
        for path in (names.query, names.key, names.value, names.attention_output):
            attach(self, path, nn.Linear(hidden, hidden))
        attach(self, names.attention_norm, nn.LayerNorm(hidden, eps=config.norm_eps))
        attach(self, names.intermediate, nn.Linear(hidden, config.intermediate_size))
        attach(self, names.output, nn.Linear(config.intermediate_size, hidden))
        attach(self, names.output_norm, nn.LayerNorm(hidden, eps=config.norm_eps))

    def dropout_rates(self) -> tuple[float, float, float]:
        """See `LayerMath`."""
        if not self.training:
            return 0.0, 0.0, 0.0
        return self.attention_dropout_p, self.hidden_dropout_p, self.ffn_dropout_p

    def forward(
        self,
        hidden: Tensor,
        sequences: Sequences,
        gate: Tensor | None = None,
        site: int = 1,
        first_only: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(total, hidden) -> ((total, hidden), probabilities (batch, nheads, S, S) or None).

        Args:
            hidden: packed tokens.
            sequences: the batch.
            gate: (nheads,) factor of each head's output, or None.
            site: first of the layer's `SITES` dropout call sites.
            first_only: compute only the rows of `packing.starts`, the first token of each sequence:
                ((batch, hidden), None). Only where `may_skip_rows` says so, with total >= 1 and without
                probabilities; the row of an empty sequence has no meaning.
        """
        return self.run(hidden, sequences, gate, site, first_only)


def first_attention(
    x: Tensor,
    q: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    value_bias: Tensor | None,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence, that of its first token, without making any key or value.

    For a head with one query q, over the tokens x_t of its sequence,

        q · (Wk x_t + bk) = (Wkᵀ q) · x_t + a constant, which softmax does not see
        Σ_t p_t (Wv x_t + bv) = Wv (Σ_t p_t x_t) + bv

    so both products with a weight run over sequences instead of tokens. Computed in float32 (float64 for
    float64) and rounded once. On a CPU only: it reads `cu_seqlens` on the host.

    Args:
        x: (total, hidden), what keys and values would be made of.
        q: (batch, nheads, head_dim).
        key_weight, value_weight, value_bias: of the linear layers; (hidden, hidden), and (hidden,) or None.
        cu_seqlens: (batch + 1,) int32.
        softmax_scale, bias, gate: as `ops.attention.attention`; of a 4-D `bias` query 0 is read.

    Returns:
        (batch, hidden) in x's dtype; zeros where a sequence has no token or its query no allowed key.
    """
    compute = checks.compute_dtype(x)
    batch, nheads, head_dim = q.shape
    wk, wv = (w.to(compute).reshape(nheads, head_dim, -1) for w in (key_weight, value_weight))
    scaled = (q.to(compute) * softmax_scale).transpose(0, 1)  # (nheads, batch, head_dim)
    asked = (scaled @ wk).transpose(0, 1)  # (batch, nheads, hidden)
    mixed = asked.new_zeros(asked.shape)  # Σ_t p_t x_t
    mass = asked.new_zeros(batch, nheads, 1)  # Σ_t p_t: 1, or 0 where there is no allowed key
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    last = 0
    for length, run in groupby(lengths):  # neighbours of one length go together
        first, last = last, last + len(list(run))
        if length == 0:
            continue
        tokens = x[ends[first] : ends[last]].to(compute).reshape(last - first, length, -1)
        scores = asked[first:last] @ tokens.mT  # (sequences, nheads, length)
        mass[first:last] = 1
        if bias is not None:
            scores = scores + bias[slice(first, last) if bias.shape[0] > 1 else 0, :, 0, :length].to(compute)
            blind = scores.isneginf().all(-1, keepdim=True)
            scores, mass[first:last] = scores.masked_fill(blind, 0), blind.logical_not().to(compute)
        mixed[first:last] = torch.softmax(scores, -1) @ tokens
    context = (mixed.transpose(0, 1) @ wv.mT).transpose(0, 1)  # (batch, nheads, head_dim)
    if value_bias is not None:
        context = context + value_bias.to(compute).reshape(nheads, head_dim)
    context = context * mass
    if gate is not None:
        context = context * gate.to(compute).unsqueeze(1)
    return context.reshape(batch, -1).to(x.dtype)


def pool_first(dense: nn.Module, first: Tensor) -> Tensor:
    """BERT's pooler: tanh(dense(first token)), (batch, hidden) -> (batch, hidden) (Devlin et al. 2018,
    "C").
    """
    return torch.tanh(apply_linear(dense, first))


def relative_bias(
    table: nn.Module, seqlen: int, device: torch.device, positions: Tensor | None = None
) -> Tensor:
    """MPNet's bucketed relative attention bias (Raffel et al. 2019, sec. 2.1; Song et al. 2020).

    Args:
        table: embedding of 32 buckets x nheads.
        seqlen: S.
        positions: (batch, S) positions of the packed tokens where they are not consecutive, else None.

    Returns:
        (1 or batch, nheads, S, S).
    """
    if positions is None:
        positions = torch.arange(seqlen, device=device)[None]
    distance = positions[:, None, :] - positions[:, :, None]  # key - query
    # half of the 32 buckets per direction: 8 exact, 8 logarithmic up to a distance of 128
    size = distance.abs()
    far = 8 + (torch.log(size.clamp_min(1).float() / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(size < 8, size, far.clamp_max(15)) + 16 * (distance > 0)
    return table(bucket).permute(0, 3, 1, 2)
