"""A model whose table of words is a product of two matrices; and back, in `shrink.dense`.

    E ≈ U_r Σ_r V_rᵀ: the r largest singular values of the table E (V, width)
    table U_r Σ_r (V, r);    projection V_r (width, r), applied to each token's row

It is the best approximation of rank r in the sum of squares. A tied decoder multiplies by V_r, then by the
table: no matrix of V x width is left. The config key `word_embedding_rank` says so in files.

Source: Eckart and Young 1936; Lan et al. 2019, "ALBERT", sec. 3.1, "Factorized embedding parameterization".
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from fastbert.compression import shrink
from fastbert.layers.modules import is_plain
from fastbert.layers.quantized import num_weights
from fastbert.models.base import PreTrainedModel

_Model = TypeVar("_Model", bound=PreTrainedModel)


@torch.no_grad()
def factorize(model: _Model, embedding_rank: int) -> _Model:
    """A copy of a model whose table of words has a smaller rank. The model itself is not changed.

    Args:
        model: a model of this package in floating point, factored or not. A decoder that is not tied to the
            table stays as it is.
        embedding_rank: the columns of the new table, from 1 to the width of the table.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    shrink.check_ours(model)
    if num_weights(model):
        raise ValueError("model: expected floating point, got 8 bits; quantise the smaller model")
    width = model.config.embedding_width
    rank = embedding_rank
    if type(rank) is not int or not 1 <= rank <= width:
        raise ValueError(f"embedding_rank: expected an integer from 1 to {width}, got {rank!r}")
    # What does not fit is named before anything is computed
    type(model.config).from_dict(model.config.to_dict(), word_embedding_rank=rank)
    model = shrink.unfactored(model)
    words = model.get_input_embeddings()
    if not is_plain(words, nn.Embedding):
        raise ValueError(f"model: expected a plain table of words, got a {type(words).__name__}")
    u, s, vt = torch.linalg.svd(words.weight.double(), full_matrices=False)
    learns = words.weight.requires_grad
    table, projection = (
        nn.Parameter(t.to(words.weight.dtype).contiguous(), learns)
        for t in (u[:, :rank] * s[:rank], vt[:rank].T)
    )
    state: dict[str, Tensor] = {
        key: table if value is words.weight else value
        for key, value in model.state_dict(keep_vars=True).items()
    }
    state[f"{shrink.name_of(model, words)}.projection.weight"] = projection
    return shrink.made(model, {"word_embedding_rank": rank}, state)
