"""What one encoder layer computes, as plain data: its heads, its activation, and where its parts are.

The parts' places are dotted paths, HuggingFace's names: those of this package's layers and of transformers'
alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch import nn

from fastbert.layers.patterns import Heads


@dataclass(frozen=True)
class LayerNames:
    """Dotted paths of the parts of one encoder layer, relative to the layer."""

    query: str = "attention.self.query"
    key: str = "attention.self.key"
    value: str = "attention.self.value"
    attention_output: str = "attention.output.dense"
    attention_norm: str = "attention.output.LayerNorm"
    intermediate: str = "intermediate.dense"
    output: str = "output.dense"
    output_norm: str = "output.LayerNorm"

    @functools.cached_property
    def linears(self) -> tuple[str, ...]:
        """The six linear layers in execution order."""
        return (
            self.query,
            self.key,
            self.value,
            self.attention_output,
            self.intermediate,
            self.output,
        )

    @functools.cached_property
    def norms(self) -> tuple[str, str]:
        """The two norms in execution order."""
        return self.attention_norm, self.output_norm


@dataclass(frozen=True)
class StockLayer:
    """What a family's layer has apart from the parts in `LayerNames`; dotted paths.

    Attributes:
        name: of transformers' class; None means the family's class_prefix and "Layer".
        containers: the modules in between, which the fused layer does not call.
        dropouts: of attention probabilities, attention output and feed-forward output; None means none.
        activation: of the feed-forward block.
        positional: names of the positional arguments of `forward` after the hidden states.
        returns_tuple: the stock layer's output is (hidden,).
        feed_forward: the layer's module or method (ALBERT's) that computes the feed-forward block, to which
            the layer adds the residual and the norm; None if `intermediate` and `output` compute all of it.
        norms_attention: the layer, and not its attention module, adds the attention's residual and norm.
        attention_drops_by_itself: attention probabilities are dropped by the mode of the attention module,
            and not by that of the dropout inside it.
    """

    name: str | None = None
    containers: tuple[str, ...] = (
        "attention",
        "attention.self",
        "attention.output",
        "intermediate",
        "output",
    )
    dropouts: tuple[str, str | None, str | None] = (
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
    returns_tuple: bool = False
    feed_forward: str | None = None
    norms_attention: bool = False
    attention_drops_by_itself: bool = True


@dataclass(frozen=True)
class LayerForm:
    """What one encoder layer computes, apart from its parameters.

    Attributes:
        names: the paths of its linear layers and norms.
        stock: the paths of its other parts.
        nheads, head_dim: the number of heads and the size of each.
        activation: of the feed-forward block, by its name in `fastbert.ops.activation`; None if only the
            module's own code knows it.
        heads: which heads attend by fixed patterns, if some do: those have no queries and keys.
        paths: of containers, linear layers, norms, dropouts and the activation, split at the dots; those of
            linear layers and norms with the dotted path.
    """

    names: LayerNames
    stock: StockLayer
    nheads: int
    head_dim: int
    activation: str | None
    heads: Heads | None = None
    paths: tuple = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names, stock = self.names, self.stock
        paths = (
            tuple(path.split(".") for path in stock.containers),
            tuple((path.split("."), path) for path in names.linears),
            tuple((path.split("."), path) for path in names.norms),
            tuple(None if path is None else path.split(".") for path in stock.dropouts),
            stock.activation.split("."),
        )
        object.__setattr__(self, "paths", paths)  # the class is frozen

    @functools.cached_property
    def steps(self) -> tuple[tuple[list[str], type], ...]:
        """(path, class) of the linear layers and then of the norms, in execution order, if they are plain."""
        linears = [(path.split("."), nn.Linear) for path in self.names.linears]
        return *linears, *((path.split("."), nn.LayerNorm) for path in self.names.norms)
