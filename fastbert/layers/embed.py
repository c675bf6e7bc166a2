"""The mathematics of embeddings, as calls to ops: of BERT's modules, and of others with the same names."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fastbert.layers.factored import FactoredTable
from fastbert.layers.modules import calls_all, is_plain
from fastbert.layers.parts import HOOKS
from fastbert.layers.quantized_table import QuantizedEmbedding
from fastbert.ops import checks
from fastbert.ops.dropout import keep_mask_2d
from fastbert.ops.embedding import EmbeddingInputs, embedding
from fastbert.ops.layer_norm import NARROW
from fastbert.runtime import dispatch


def _is_plain_table(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether the module only looks up rows, in forward and backward."""
    return is_plain(module, nn.Embedding) and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )


def _untrained_row(module: nn.Embedding) -> Tensor:
    """The table, whose padding row gets no gradient, as in nn.Embedding.

    It serves the tables whose padding row is no argument of the op.
    """
    weight, row = module.weight, module.padding_idx
    if row is None or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    rows = torch.arange(weight.shape[0], device=weight.device).unsqueeze(1)
    return torch.where(rows == row, weight.detach(), weight)


def embed(
    root: Any,
    input_ids: Tensor | None,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Packed ids (total,) or inputs_embeds (total, width) -> (total, width): word + position + segment
    embeddings, LayerNorm, dropout (Devlin et al. 2018, sec. 3 and fig. 2).

    Args:
        root: the module that holds the tables and the norm under HuggingFace's names.
        seed, dropout_p: the dropout's seed and probability; its call site is 0.
    """
    modules = root._modules
    modern = "tok_embeddings" in modules
    word = modules["tok_embeddings" if modern else "word_embeddings"]
    norm = modules["norm" if modern else "LayerNorm"]
    position, segment = modules.get("position_embeddings"), modules.get("token_type_embeddings")
    projection = modules.get("embed_proj")
    factored, integers = isinstance(word, FactoredTable), is_plain(word, QuantizedEmbedding)
    if factored and inputs_embeds is None:
        input_ids, inputs_embeds = None, word(input_ids)
    tables = [m for m in (None if factored or integers else word, position, segment) if m is not None]
    plain = projection is None and all(map(_is_plain_table, tables))
    if plain and is_plain(norm, nn.LayerNorm) and norm.weight is not None:
        return embedding(
            input_ids,
            word.weight,
            norm.weight,
            torch.zeros_like(norm.weight) if norm.bias is None else norm.bias,
            position_ids=None if position is None else position_ids,
            position=None if position is None else _untrained_row(position),
            token_type_ids=None if segment is None else token_type_ids,
            segment=None if segment is None else segment.weight,
            inputs_embeds=inputs_embeds,
            padding_idx=word.padding_idx,
            eps=norm.eps,
            dropout_p=dropout_p,
            seed=seed,
            offset=0,
            word_scale=word.scale if integers else None,
        )
    x = word(input_ids) if inputs_embeds is None else inputs_embeds
    if segment is not None:
        x = x + segment(token_type_ids)
    if position is not None:
        x = x + position(position_ids)
    if projection is not None:
        x = projection(x)
    return dropped_rows(norm(x), dropout_p, seed)


def dropped_rows(x: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor:
    """Dropout of embeddings (rows, width), whose call site is 0."""
    if dropout_p == 0:
        return x
    assert seed is not None
    return x * (keep_mask_2d(seed, 0, x.shape[0], x.shape[1], dropout_p).to(x.dtype) / (1.0 - dropout_p))


# The modules of embeddings without segments, and with them.
_NAMES = [
    ("word_embeddings", "position_embeddings", *segments, "LayerNorm", "dropout")
    for segments in ((), ("token_type_embeddings",))
]
_HAS_FORWARD, _MAX_NORM = methodcaller("__contains__", "forward"), itemgetter("max_norm")
_KINDS = [[*[nn.Embedding] * (len(names) - 2), nn.LayerNorm, nn.Dropout] for names in _NAMES]


class _Tables(NamedTuple):
    """What `launched` reads of the modules; all that is in it has been checked."""

    word: Tensor
    position: Tensor
    segment: Tensor | None
    norm: Tensor
    bias: Tensor
    eps: float


def launched(
    root: nn.Module,
    input_ids: Tensor | None,
    position_ids: Tensor,
    token_type_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    known: dict[str, Any] | None = None,
) -> Tensor | None:
    """What `embed` returns for packed ids in inference without dropout, straight from the launcher.

    None if anything is unusual; then the caller calls `embed`. `root` may be of any class, whose forward the
    caller checks. The ids must be in range, as in checked inputs. `known` keeps what was found in the modules
    until the caller drops it, because a module has changed.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    if input_ids is None or inputs_embeds is not None:
        return None
    known, name = {} if known is None else known, "words" if token_type_ids is None else "words and segments"
    # Not kept if it is None, as under autocast: a later call may have them
    tables: _Tables | None = known.get(name) or _tables(root, token_type_ids is not None)
    given = input_ids, position_ids, *(() if token_type_ids is None else (token_type_ids,))
    if tables is None or not checks.are_plain(
        [tables.word, *given],
        [tables.word.dtype, *[torch.int64] * len(given)],
        [tables.word.shape, *[input_ids.shape] * len(given)],
    ):
        return None
    known[name] = tables
    word, position, segment, norm, bias, eps = tables
    ids_and_tables = input_ids, None, word, position_ids, position, token_type_ids, segment
    inputs = EmbeddingInputs(*ids_and_tables, norm, bias, -1, eps, 0.0, None, 0)
    return dispatch.launcher("embedding_fwd", word.device, word.dtype)(inputs, None)[0]


def _tables(root: nn.Module, segments: bool) -> _Tables | None:
    """What `launched` reads of the modules, or None."""
    names, kinds = _NAMES[segments], _KINDS[segments]
    modules = [*map(root._modules.get, names)]
    if [*map(type, modules)] != kinds or len(root._modules) != len(modules):
        return None
    held = [*map(vars, modules)]
    if (
        any(chain.from_iterable(map(HOOKS, (vars(root), *held))))
        or any(map(_HAS_FORWARD, (vars(root), *held)))
        or {*map(_MAX_NORM, held[:-2])} != {None}
        or calls_all()
    ):
        return None
    *tables, norm = [own["_parameters"].get("weight") for own in held[:-1]]
    bias, width, eps = held[-2]["_parameters"]["bias"], held[-2]["normalized_shape"], held[-2]["eps"]
    sizes = [(own["num_embeddings"], *width) for own in held[:-2]]
    if width <= (NARROW,) or not checks.are_plain(
        [*tables, norm, bias],
        [getattr(norm, "dtype", torch.int64)] * (len(tables) + 2),
        [*sizes, width, width],
    ):
        return None
    word, position, segment = [*tables, None][:3]
    return _Tables(word, position, segment, norm, bias, checks.eps(eps))
