"""Where a family's models have their parts, as dotted paths: HuggingFace's names.

They are those of the models of this package and of transformers' alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any


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
class LMHead:
    """Paths of a masked-LM head: act(dense(x)) -> norm -> decoder, the decoder tied to the word embeddings.

    `bias` is the path of the separate bias to which the decoder's bias is tied, or None. `act` is the path of
    the activation module, or None if transformers has none. If `activation` is None, it is the config's.
    """

    dense: str
    norm: str
    decoder: str
    bias: str | None
    act: str | None = None
    activation: str | None = None


@dataclass(frozen=True)
class ClassifierHead:
    """Paths of a sequence-classification head: [pooled or first token] -> (dense -> activation) -> out.

    If `dense` is None, the model's pooler comes first. `act` is the path of the activation module, or None if
    transformers has none. `dropout` is the path of the dropout before `out`; `dropout_first` says whether it
    runs before the dense layer too. `dropout_key` is its config key. `fixed` lists the config keys for which
    the head supports a single value, with that value.
    """

    dense: str | None
    activation: str | None
    out: str
    act: str | None = None
    dropout: str = "dropout"
    dropout_first: bool = False
    dropout_key: str = "classifier_dropout"
    fixed: dict[str, Any] = field(default_factory=dict)


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
class StockModel:
    """What a family's encoder in transformers has beside ours.

    Attributes:
        output: the class that it returns.
        pooler_activation: if `pooler` is a linear layer, the encoder's module that is applied to its
            output; None if `pooler` does all.
        stack_by_name: the module around the layers gets its input by name.
        embeds_by_name: the embeddings get their ids by name.
        tuple_keeps_none: with return_dict=False, what is missing is a None in the tuple, because the heads
            count on its place.
    """

    output: str = "BaseModelOutputWithPoolingAndCrossAttentions"
    pooler_activation: str | None = None
    stack_by_name: bool = False
    embeds_by_name: bool = True
    tuple_keeps_none: bool = False
