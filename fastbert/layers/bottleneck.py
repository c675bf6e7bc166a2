"""MobileBERT's layer: its blocks compute in a narrower width, and it has several feed-forward blocks.

    b, a = norm(x Wbᵀ), norm(x Waᵀ)
    q, k, v = a Wqᵀ, a Wkᵀ, x Wvᵀ
    h = norm(b + attention(q, k, v) Woᵀ)
    h = norm(h + act(h Wiᵀ) Wfᵀ)        several times
    y = norm(x + dropout(h Wyᵀ))

Each matrix is another one in each line and has a bias, left out here. A norm is NoNorm, w · x + b, or
LayerNorm. `Bottleneck` (form.py) says which of the narrow inputs there are. `attend` (attention.py) computes
attention, so that taps, gates and probabilities are the same as in other layers.

Source: Sun et al. 2020, "MobileBERT: a Compact Task-Agnostic BERT for Resource-Limited Devices", sec. 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.dense_norm import dense_norm, feed_forward_norm
from fastbert.layers.form import Bottleneck, LayerForm, Parts, StockLayer
from fastbert.layers.linear import apply_linear, apply_norm
from fastbert.layers.modules import NoNorm, part
from fastbert.layers.parts import Attention, Part, SelfAttention, two
from fastbert.layers.quantized import copy_of

INPUT, SHARED, OUTPUT = "bottleneck.input", "bottleneck.attention", "output.bottleneck"


def norm_of(config: Any, width: int, eps: float = 1e-5) -> nn.LayerNorm:
    """A new norm as config normalization_type has it. Some of transformers' norms have PyTorch's eps."""
    return NoNorm(width) if config.normalization_type == "no_norm" else nn.LayerNorm(width, eps=eps)


def bottleneck_of(config: Any) -> Bottleneck:
    """Which bottlenecks and feed-forward blocks the layers of a config have.

    Args:
        config: an `EncoderConfig`, or a transformers config.
    """
    feeds = tuple(f"ffn.{i}" for i in range(config.num_feedforward_networks - 1))
    if not config.use_bottleneck:
        return Bottleneck(None, None, None, None, feeds)
    shared = SHARED if config.key_query_shared_bottleneck else None
    keys, values = (INPUT, INPUT) if config.use_bottleneck_attention else (shared, None)
    return Bottleneck(keys, values, INPUT, OUTPUT, feeds)


def made_bottlenecks(config: Any) -> list[str]:
    """Paths of the bottlenecks before attention that transformers creates; the config may not read all."""
    shared = [SHARED] if config.key_query_shared_bottleneck else []
    return [INPUT, *shared] if config.use_bottleneck else []


def stock_of(config: Any, stock: StockLayer) -> StockLayer:
    """The containers and dropouts of a layer of a config.

    Args:
        config: see `bottleneck_of`.
        stock: those of a layer without bottlenecks and with one feed-forward block.
    """
    own, made = bottleneck_of(config), made_bottlenecks(config)
    above = ["bottleneck", *made, OUTPUT] if made else []
    above += [path for feed in own.feeds for path in (feed, f"{feed}.intermediate", f"{feed}.output")]
    dropouts = (stock.dropouts[0], None, f"{OUTPUT}.dropout") if made else stock.dropouts
    return replace(stock, containers=(*stock.containers, *above), dropouts=dropouts)


class Steps(NamedTuple):
    """The modules of a layer beside those that every layer has.

    Attributes:
        keys, values, residual, output: the (linear layer, norm) of `Bottleneck`'s paths, or None.
        feeds: the (linear layer, linear layer, norm) of each feed-forward block before the last.
    """

    keys: tuple[Any, Any] | None
    values: tuple[Any, Any] | None
    residual: tuple[Any, Any] | None
    output: tuple[Any, Any] | None
    feeds: tuple[tuple[Any, Any, Any], ...]

    @property
    def modules(self) -> tuple[list[Any], list[Any]]:
        """The linear layers, and the norms, as `ops.encoder_layer` has them after those of every layer."""
        pairs = [pair for pair in (self.residual, self.output, self.keys) if pair is not None]
        linears = [dense for dense, _ in pairs] + [dense for feed in self.feeds for dense in feed[:2]]
        return linears, [norm for _, norm in pairs] + [feed[2] for feed in self.feeds]

    @classmethod
    def of(cls, own: Bottleneck, layer: nn.Module) -> Steps:
        """The modules of a layer with these bottlenecks."""

        def below(above: str | None, *names: str) -> Any:
            return None if above is None else tuple(part(layer, f"{above}.{name}") for name in names)

        feed = "intermediate.dense", "output.dense", "output.LayerNorm"
        steps = (below(path, "dense", "LayerNorm") for path in own[:4])
        return cls._make((*steps, tuple(below(path, *feed) for path in own.feeds)))

    def as_multiplied(self, label: str) -> Steps:
        """The modules with 8-bit copies of the linear layers; `label` is the layer's name in errors."""

        def copied(step: Any) -> Any:
            return step and (*(copy_of(m, f"{label}'s bottlenecks") for m in step[:-1]), step[-1])

        return self._make((*map(copied, self[:4]), tuple(map(copied, self.feeds))))


def inputs(parts: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    """What queries and keys are made of, and what values are made of: (rows, hidden) -> two of (rows, …)."""
    steps = parts.steps
    keys = _narrowed(steps.keys, x)
    return keys, keys if steps.values == steps.keys else _narrowed(steps.values, x)


def rest_in_bottleneck(
    form: LayerForm, parts: Parts, x: Tensor, context: Tensor, batch: PackedBatch, asked: Asked
) -> Tensor:
    """The layer's output from its input (rows, hidden) and what attention has computed.

    Args:
        context: (rows, nheads, headdim) or (rows, nheads · headdim).
    """
    steps, rates, seed, site = parts.steps, parts.rates, batch.seed, asked.site
    # A layer with bottlenecks drops only after the last of them
    own = rates[2] if steps.output is None else 0.0
    h = _narrowed(steps.residual, x)
    fuse, modules = parts.fuses_norm, (parts.attention_output, parts.attention_norm)
    kind: Any = {"kind": parts.kind}
    h = dense_norm(*modules, context.flatten(1), h, rates[1], seed, site + 1, fuse, **kind)
    for up, down, norm in steps.feeds:
        h = feed_forward_norm(up, down, norm, h, form.activation, 0.0, None, 0, fuse, **kind)
    inner = apply_linear(parts.intermediate, h, form.activation, **kind)
    if asked.taps is not None:
        inner = asked.taps.inner(asked.number, inner, batch)
    h = dense_norm(parts.output, parts.output_norm, inner, h, own, seed, site + 2, fuse, **kind)
    if steps.output is None:
        return h
    dense, norm = steps.output
    return dense_norm(dense, norm, h, x, rates[2], seed, site + 2, fuse, **kind)


def _narrowed(step: tuple[Any, Any] | None, x: Tensor) -> Tensor:
    """norm(dense(x)), or x if there is no bottleneck."""
    return x if step is None else apply_norm(step[1], apply_linear(step[0], x))


class Narrowing(Part):
    """All bottlenecks before a layer's attention.

    Args:
        keys, values, residual: names of the children, or None; see `Bottleneck`.
    """

    def __init__(self, keys: str | None, values: str | None, residual: str | None):
        super().__init__()
        self.inputs = keys, keys, values, residual

    def forward(self, hidden_states: Tensor, input_tensor: Any = None) -> Any:
        """(batch, seqlen, hidden) -> the inputs of query, key and value, and the residual of attention."""
        made: dict[str | None, Any] = {None: hidden_states}
        for name in self.inputs:
            if name is not None and name not in made:
                made[name] = self._modules[name](hidden_states)
        return tuple(made[name] for name in self.inputs)


class NarrowSelfAttention(SelfAttention):
    """Self-attention whose queries, keys and values have inputs of their own; see `SelfAttention`."""

    def forward(
        self,
        query_tensor: Tensor,
        key_tensor: Tensor,
        value_tensor: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `SelfAttention`; each of the first three is (batch, seqlen, width)."""
        given = zip(self.inputs, (query_tensor, key_tensor, value_tensor), strict=True)
        heads = (-1 if self.num_attention_heads else 0, self.attention_head_size)
        q, k, v = (self._modules[name](x).unflatten(-1, heads).transpose(1, 2) for name, x in given)
        return self.attended(q, k, v, value_tensor, attention_mask, head_mask)


class NarrowAttention(Attention):
    """The attention block with its residual sum and norm; see `Attention`."""

    def forward(
        self,
        query_tensor: Tensor,
        key_tensor: Tensor,
        value_tensor: Tensor,
        layer_input: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As `NarrowSelfAttention.forward`, with the residual `layer_input`."""
        inside = self._modules[self.inside]
        attended, probs = two(inside(query_tensor, key_tensor, value_tensor, *args, **kwargs))
        return self._modules["output"](attended, layer_input), probs


class Feed(Part):
    """A feed-forward block before the last one."""

    def forward(self, hidden_states: Tensor, input_tensor: Any = None) -> Tensor:
        """(batch, seqlen, width) -> (batch, seqlen, width)."""
        return self._modules["output"](self._modules["intermediate"](hidden_states), hidden_states)


class NarrowOutput(Part):
    """The end of the last feed-forward block, and the bottleneck back to the hidden size; see `Part`."""

    def forward(
        self, hidden_states: Tensor, input_tensor: Any = None, layer_input: Tensor | None = None
    ) -> Tensor:
        """(batch, seqlen, inner) -> (batch, seqlen, hidden).

        Args:
            input_tensor: the residual of the feed-forward block.
            layer_input: the residual of the bottleneck.
        """
        y = super().forward(hidden_states, input_tensor)
        wide = self._modules.get("bottleneck")
        return y if wide is None else wide(y, layer_input)


PARTS = frozenset((Narrowing, NarrowSelfAttention, NarrowAttention, Feed, NarrowOutput))
