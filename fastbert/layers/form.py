"""What one encoder layer computes (`LayerForm`, plain data), and with which modules (`Parts`).

The parts' places are dotted paths of HuggingFace's names, in this package's layers and in transformers'
layers alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.layers.batch import Blocks, PackedBatch, Relative, Rotary
from fastbert.layers.patterns import Heads
from fastbert.layers.quantized import copy_of

# Which half of a gated feed-forward block's outputs is activated
Half = Literal["first", "second"]
# Dropout call sites of one layer: attention probabilities, attention output, feed-forward output
SITES = 3
# Added to the first of them: the call site of a fourth dropout
INNER_SITE = 1 << 31


@dataclass(frozen=True)
class LayerNames:
    """Dotted paths of the parts of one encoder layer, relative to the layer.

    Query, key and value may be one linear layer, whose path then appears three times. The first four paths
    are "" where attention has parameters of its own in place of linear layers (XLNet's). `gate` is the linear
    layer with the activated half of a gated feed-forward block, if `intermediate` has the other half alone.
    """

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    intermediate: str = "intermediate.dense"
    output: str = "output.dense"
    output_norm: str = "output.LayerNorm"
    gate: str | None = None

    @functools.cached_property
    def linears(self) -> tuple[str, ...]:
        """The linear layers in execution order, then the gate if there is one."""
        six = self.query, self.key, self.value, self.attention_output, self.intermediate, self.output
        six = tuple(filter(None, six))
        return six if self.gate is None else (*six, self.gate)

    @functools.cached_property
    def norms(self) -> tuple[str, str]:
        """The two norms in execution order."""
        return self.attention_norm, self.output_norm


@dataclass(frozen=True)
class StockLayer:
    """What a family's layer has apart from the parts in `LayerNames`; dotted paths.

    Attributes:
        name: transformers' class; None means the family's class_prefix and "Layer".
        containers: the modules in between, which the fused layer does not call.
        dropouts: the dropouts of attention probabilities, attention output and feed-forward output; None
            where there is no dropout. In transformers' layers the first may be a number, and one that never
            drops an nn.Identity. A pre-norm layer's last dropout is before the block's second product. A
            fourth dropout is there in a post-norm layer that is gated, or that scores distances.
        activation: the activation of the feed-forward block.
        positional: names of the positional arguments of `forward` after the hidden states.
        tuple_size: size of the tuple that the stock layer returns, hidden states first; 0 for no tuple.
        feed_forward: the layer's module or method (ALBERT's) that computes the feed-forward block, to which
            the layer adds the residual and the norm; None if `intermediate` and `output` compute all of it.
        norms_attention: whether the layer, and not its attention module, adds the attention's residual and
            norm.
        attention_drops_by_itself: whether the mode of the attention module decides if attention probabilities
            are dropped, and not the mode of the dropout inside it.
    """

    name: str | None = None
    containers: tuple[str, ...] = (
        "attention",
        "attention.self",
        "attention.output",
        "intermediate",
        "output",
    )
    dropouts: tuple[str | None, ...] = (
        "attention.self.dropout",
        "attention.output.dropout",
        "output.dropout",
    )
    activation: str = "intermediate.intermediate_act_fn"
    positional: tuple[str, ...] = (
        "attention_mask",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "past_key_values",
    )
    tuple_size: int = 0
    feed_forward: str | None = None
    norms_attention: bool = False
    attention_drops_by_itself: bool = True


class Bottleneck(NamedTuple):
    """How a layer's blocks compute in a narrower width, and how many there are; see `bottleneck.py`.

    Attributes:
        keys, values: paths of the bottlenecks that queries and keys, and values, are made from; None if they
            are made from the layer's input.
        residual: path of the bottleneck whose output is added to attention's; None for the layer's input.
        output: path of the bottleneck back to the hidden size; None if there is none.
        feeds: paths of the feed-forward blocks before the last.
    """

    keys: str | None
    values: str | None
    residual: str | None
    output: str | None
    feeds: tuple[str, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """The paths of the bottlenecks that are computed."""
        return tuple(path for path in dict.fromkeys(self[:4]) if path is not None)

    @property
    def linears(self) -> tuple[str, ...]:
        """The paths of the linear layers of the bottlenecks and of `feeds`."""
        feeds = (f"{feed}.{name}.dense" for feed in self.feeds for name in ("intermediate", "output"))
        return (*(f"{path}.dense" for path in self.steps), *feeds)

    @property
    def norms(self) -> tuple[str, ...]:
        """The paths of the norms of the bottlenecks and of `feeds`."""
        return (
            *(f"{path}.LayerNorm" for path in self.steps),
            *(f"{feed}.output.LayerNorm" for feed in self.feeds),
        )


@dataclass(frozen=True)
class LayerForm:
    """What one encoder layer computes, apart from its parameters.

    Attributes:
        names: the paths of its linear layers and norms.
        stock: the paths of its other parts.
        nheads, head_dim: the number of heads, 0 or more, and the size of each. Attention's width, their
            product, need not be the hidden size.
        activation: the name in `fastbert.ops.activation` of the feed-forward block's activation; None if only
            the module's own code knows it.
        heads: which heads attend by fixed patterns, and so have no queries and keys; None if all learn.
        kept: which of the model's heads the layer has, ascending; None for all.
        pre_norm: whether the norms come before the blocks, not after their residual sums.
        packed: whether query, key and value are one linear layer with outputs (3, nheads, head_dim).
        head_major: whether such outputs are (nheads, 3, head_dim).
        gated: which half of the feed-forward block's outputs is activated and multiplies the other half;
            None if there are no halves.
        window: how many tokens before and after its own a token sees, (left, right); None for all.
        kv_heads: the number of heads of keys and values, each of which serves equally many heads of queries;
            None for one per head.
        rotary: by which angles queries and keys are rotated; None if they are not rotated.
        interleaved: whether two neighbouring columns are rotated as a pair, not one of each half of a head.
        relative: how the distance between two tokens is scored; None if it is not scored.
        bottleneck: in which width the blocks compute; None if it is the hidden size and there are two blocks.
        blocks: by which blocks a long text attends; None if all tokens see all tokens.
        global_tokens: whether some tokens may see all tokens, and be seen by all; see `global_tokens.py`.
        paths: the paths of containers, linear layers, norms, dropouts and the activation, split at the dots.
            Each path of a linear layer or norm comes with its dotted form.
        kinds: the fields in which the layer is of another kind than BERT's. An executor with mathematics of
            its own refuses a layer with a kind that it does not know. `blocks` is none, because it matters in
            some calls alone (`PackedBatch.lengths`).
    """

    names: LayerNames
    stock: StockLayer
    nheads: int
    head_dim: int
    activation: str | None
    heads: Heads | None = None
    kept: tuple[int, ...] | None = None
    pre_norm: bool = False
    packed: bool = False
    head_major: bool = False
    gated: Half | None = None
    window: tuple[int, int] | None = None
    kv_heads: int | None = None
    rotary: Rotary | None = None
    interleaved: bool = False
    relative: Relative | None = None
    bottleneck: Bottleneck | None = None
    blocks: Blocks | None = None
    global_tokens: bool = False
    paths: tuple[Any, ...] = field(init=False, repr=False, compare=False)
    kinds: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stock, norms = self.stock, self.names.norms
        if self.bottleneck is not None:
            norms = (*norms, *self.bottleneck.norms)
        paths = (
            tuple(path.split(".") for path in stock.containers),
            tuple((path.split("."), path) for path in self.linears),
            tuple((path.split("."), path) for path in norms),
            tuple(None if path is None else path.split(".") for path in stock.dropouts),
            stock.activation.split("."),
        )
        sizes = ("names", "stock", "nheads", "head_dim", "activation", "kept", "paths", "blocks", "kinds")
        others = [field for field in fields(self) if field.name not in sizes]
        kinds = frozenset(field.name for field in others if getattr(self, field.name) != field.default)
        object.__setattr__(self, "paths", paths)  # the class is frozen
        object.__setattr__(self, "kinds", kinds)

    @property
    def linears(self) -> tuple[str, ...]:
        """The paths of all linear layers."""
        return self.names.linears if self.bottleneck is None else self.names.linears + self.bottleneck.linears

    @property
    def softmax_scale(self) -> float:
        """The factor of the scores: 1 / sqrt(head_dim · number of summed scores)."""
        terms = 0 if self.relative is None else len(self.relative.terms)
        return (self.head_dim * (1 + terms)) ** -0.5

    def of_own_heads(self, t: Tensor, dim: int) -> Tensor:
        """The layer's own heads of `t`, whose dimension `dim` has all of the model's heads, or size 1."""
        if self.kept is None or t.shape[dim] == 1:
            return t
        return t.index_select(dim, torch.tensor(self.kept, dtype=torch.int64, device=t.device))

    def for_each_head(self, t: Tensor, dim: int) -> Tensor:
        """Keys or values, whose dimension `dim` has the layer's heads of them, once per head of queries."""
        return t if self.kv_heads is None else t.repeat_interleave(self.nheads // self.kv_heads, dim)

    def own_batch(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the biases of the layer's heads alone."""
        bias, relative = batch.bias, batch.relative
        if self.kept is None or (bias is None and relative is None):
            return batch
        if relative is not None and relative.bias is not None:
            relative = relative._replace(bias=self.of_own_heads(relative.bias, 0))
        return replace(batch, bias=None if bias is None else self.of_own_heads(bias, 1), relative=relative)


class Parts(NamedTuple):
    """What a layer computes with.

    Attributes:
        query, …, output: the linear layers in execution order, or modules in their place.
        attention_norm, output_norm: the norms, or modules in their place.
        owner: the layer, which keeps what is derived from several parameters.
        rates: the probabilities of dropout at the layer's `SITES`, and of a fourth dropout if it has one.
        fuses_norm: whether our op computes LayerNorm, with the residual sum before it.
        feed: (rows, hidden) -> (rows, hidden), another module's feed-forward block with its sum and norm;
            None for ours. Accelerated models alone have one, and they have no taps.
        int8: whether 8-bit copies of the linear layers, all of them plain, run in their place.
        label: the layer's name in errors.
        kind: how all linear layers are multiplied (`linear.LinearKind`), if they are of one kind and not
            empty, the norms are LayerNorms (NoNorms in a layer with bottlenecks) or RMSNorms, and nothing
            looks at any of them. None: each part is looked at before it is read.
        gate: the linear layer with the activated half of a gated feed-forward block; None if there is none.
        steps: the further modules of a layer with bottlenecks, `bottleneck.Steps`; None in other layers.
    """

    query: Any
    key: Any
    value: Any
    attention_output: Any
    intermediate: Any
    output: Any
    attention_norm: Any
    output_norm: Any
    owner: nn.Module
    rates: tuple[float, ...]
    fuses_norm: bool = True
    feed: Callable[[Tensor], Tensor] | None = None
    int8: bool = False
    label: str = "layer"
    kind: Any = None
    gate: Any = None
    steps: Any = None

    @property
    def linears(self) -> tuple[Any, ...]:
        """The six linear layers in execution order, then the gate if there is one."""
        return self[:6] if self.gate is None else (*self[:6], self.gate)

    def as_multiplied(self, names: LayerNames) -> Parts:
        """The parts with 8-bit copies of the linear layers."""
        named = zip(self.linears, names.linears, strict=True)
        copies = [copy_of(m, f"{self.label}.{path}") for m, path in named]
        steps = None if self.steps is None else self.steps.as_multiplied(self.label)
        return Parts._make((*copies[:6], *self[6:]))._replace(
            int8=False, kind=None, gate=[*copies, None][6], steps=steps
        )
