"""Where a family's models have their parts, as dotted paths: HuggingFace's names.

The models of this package and transformers' models have the same paths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LMHead:
    """Paths of a masked-LM head: act(dense(x)) -> norm -> decoder, the decoder tied to the word embeddings.

    `dense` and `norm` are None in a head that is the decoder alone. `decoder` is "" if the table of word
    embeddings itself is multiplied.
    `bias` is the path of the separate bias to which the decoder's bias is tied, or None. `act` is the path of
    the activation module, or None if transformers has none. If `activation` is None, it is the config's
    (`EncoderConfig.head_activation`). `more` is the path of a linear layer whose weight, (hidden - embedding
    size, vocabulary), is below the decoder's transposed weight, so that `dense` and `norm` keep the hidden
    size; or None.
    """

    dense: str | None
    norm: str | None
    decoder: str
    bias: str | None
    act: str | None = None
    activation: str | None = None
    more: str | None = None


@dataclass(frozen=True)
class ClassifierHead:
    """Paths of a classification head: [pooled, first or each token] -> (dense -> activation -> norm) -> out.

    If `dense` is None, a head of sequences reads the model's pooler. `act` is the path of the activation
    module, or None if transformers has none; if `activation` is None beside it, it is the config's. `norm` is
    the path of the norm, or None. `dropout` is the path of the dropout before `out`, "" for none;
    `dropout_first` says whether it runs before the dense layer too. `dropout_key` is its config key. `fixed`
    lists the config keys for which the head supports a single value, with that value. `act_key` is the config
    key of the activation, "" for none. `first_dropout` is the path and config key of a dropout of its own
    before the dense layer.
    """

    dense: str | None
    activation: str | None
    out: str
    act: str | None = None
    dropout: str = "dropout"
    dropout_first: bool = False
    dropout_key: str = "classifier_dropout"
    fixed: dict[str, Any] = field(default_factory=dict)
    norm: str | None = None
    act_key: str = ""
    first_dropout: tuple[str, str] | None = None


@dataclass(frozen=True)
class StockModel:
    """How a family's encoder in transformers differs from ours.

    Attributes:
        output: the class of the output.
        pooler_activation: if `pooler` is a linear layer, the encoder's module that is applied to its
            output; None if `pooler` does all.
        stack_by_name: whether the input of the module around the layers is passed by name.
        embeds_by_name: whether the ids are passed to the embeddings by name.
        tuple_keeps_none: whether a missing output is None in the tuple of return_dict=False, because heads
            index the tuple.
        dropout: name of the embeddings' dropout; None if there is none.
    """

    output: str = "BaseModelOutputWithPoolingAndCrossAttentions"
    pooler_activation: str | None = None
    stack_by_name: bool = False
    embeds_by_name: bool = True
    tuple_keeps_none: bool = False
    dropout: str | None = "dropout"
