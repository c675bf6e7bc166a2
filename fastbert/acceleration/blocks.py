"""What differs in transformers' BigBird: attention by blocks, and embeddings that drop before their norm.

transformers divides the padded batch into blocks, and switches to full attention for good
(`set_attention_type`) at the first batch of at most `Blocks.full` tokens. On packed tokens each text is
divided by its own length, and nothing is switched. For one text both compute the same. A model that was
switched, by a call that kept its padding or by its owner, attends fully here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from fastbert.layers.batch import Blocks
from fastbert.layers.form import LayerForm


def form_of(layer: Any, form: LayerForm) -> LayerForm:
    """The form of a layer of transformers as its attention is set now.

    Args:
        layer: the layer, of any family.
        form: its form without blocks.
    """
    attention = layer._modules.get("attention")
    if getattr(attention, "attention_type", None) != "block_sparse":
        return form
    own = attention._modules.get("self")
    names = "block_size", "num_random_blocks", "seed", "num_attention_heads", "max_seqlen"
    blocks = [getattr(own, name, None) for name in names]
    # A replaced part may lack them; then `gap` names it
    if None in blocks:
        return form
    # Attention by blocks drops nothing, and has no module for that
    stock = replace(form.stock, dropouts=(None, *form.stock.dropouts[1:]))
    return replace(form, stock=stock, blocks=Blocks._make(blocks))


def rate_of_short_texts(attention: nn.Module) -> float:
    """The probability of dropping an attention probability of a text without blocks, whatever the mode.

    Args:
        attention: the attention block, whose config transformers reads when it switches to full attention.
    """
    config: Any = attention.config
    return config.attention_probs_dropout_prob


def drops_first(embeddings: Any, dropout_p: float) -> bool:
    """Whether the embeddings must be called, as their dropout comes before the norm or they rescale words."""
    return dropout_p > 0 or bool(embeddings.rescale_embeddings)
