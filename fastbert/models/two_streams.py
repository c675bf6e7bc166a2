"""XLNet's content stream of packed tokens, for our encoder and for transformers' accelerated one; and its
padded batch: both streams and memories, as transformers computes them, masked tokens included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastbert.execution.plan import Plan
from fastbert.layers import packing
from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.dense_norm import dropped
from fastbert.layers.form import SITES
from fastbert.layers.sinusoids import TABLE_SITE, sinusoids, sinusoids_of
from fastbert.layers.two_streams import LAST_SITE, Pairs, rate
from fastbert.models.batch import columns_of
from fastbert.models.bert import BertModel
from fastbert.models.config import EncoderConfig
from fastbert.models.encoder import dropout_seed, run_encoder
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs
from fastbert.models.labels import check_tensor
from fastbert.ops import checks
from fastbert.ops.attention_grid import to_grid


def content_stream(
    model: Any,
    family: Family,
    layers: list[Any] | Plan,
    inputs: Inputs,
    clamp_len: int,
    causal: bool,
    seed: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Packed tokens through all layers.

    Args:
        model: XLNet's encoder, this package's or transformers'.
        family, layers, inputs, seed, asked: see `run_encoder`.
        clamp_len: farther distances count as this one; 0 or less for no limit.
        causal: whether a token sees only itself and earlier tokens.
    """
    drops = rate(model.dropout)
    if drops and seed is None:
        seed = dropout_seed(inputs.device)

    def embed(seed: Tensor | None, _known: dict[str, Any]) -> Tensor:
        x = inputs.inputs_embeds
        x = model._modules[family.embeddings](inputs.input_ids) if x is None else x
        return dropped(x, drops, seed, 0) if drops else x

    def complete(batch: PackedBatch) -> PackedBatch:
        # A batch without tokens has the distance 0 too
        reach = max(batch.max_seqlen, 1)
        if inputs.last_position is not None:
            positions = to_grid(inputs.position_ids, batch.cu_seqlens, batch.max_seqlen)
            batch, reach = replace(batch, columns=positions), inputs.last_position + 1
        elif inputs.holes:
            batch, reach = replace(batch, columns=columns_of(inputs.packing)), inputs.packing.seqlen
        more = model.config.hidden_size, clamp_len, inputs.token_type_ids, drops
        return replace(batch, sinusoids=sinusoids_of(batch, reach, *more))

    parts = model, family, layers, embed, inputs, drops > 0
    hidden, states, probs = run_encoder(*parts, causal=causal, seed=seed, complete=complete, **asked)
    return (dropped(hidden, drops, seed, LAST_SITE) if drops else hidden), states, probs


def both_streams(
    model: BertModel,
    tokens: Sequence[Tensor | None],
    mems: Sequence[Tensor] | None,
    perm_mask: Tensor | None,
    target_mapping: Tensor | None,
    causal: bool,
) -> tuple[Tensor, list[Tensor], list[Any], Inputs]:
    """The padded batch through all layers; the arguments are those of `XLNetModel.forward`.

    Args:
        model: XLNet's encoder.
        tokens: checked input_ids, attention_mask, token_type_ids and inputs_embeds.
        mems, perm_mask, target_mapping: not checked yet.
        causal: whether a token sees only itself and earlier tokens.

    Returns:
        (rows of the last stream, hidden states, probabilities, the places of the rows). The hidden states of
        both streams take turns, and their probabilities are pairs.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    config, device, drops = model.config, model.device, rate(model.dropout)
    ids, mask, types, embeds = (None if t is None else t.to(device) for t in tokens)
    h = model.get_input_embeddings()(ids) if embeds is None else embeds
    batch, seqlen, width = h.shape
    memories = _checked_memories(config, mems, batch, device)
    past = 0 if memories is None else memories[0].shape[1]
    if perm_mask is not None:
        check_tensor("perm_mask", perm_mask)
        checks.shape("perm_mask", perm_mask, (batch, seqlen, seqlen))
        perm_mask = perm_mask.to(device)
    if target_mapping is not None:
        check_tensor("target_mapping", target_mapping)
        if target_mapping.dim() != 3 or target_mapping.shape[::2] != (batch, seqlen):
            raise ValueError(
                f"target_mapping: expected shape ({batch}, predictions, {seqlen}), "
                f"got {tuple(target_mapping.shape)}"
            )
        target_mapping = target_mapping.to(device, h.dtype)
    seeds = [dropout_seed(device) if model.training else None for _ in "hg"]

    def drop(x: Tensor, seed: Tensor | None, site: int) -> Tensor:
        return dropped(x.flatten(0, 1), drops, seed, site).view_as(x) if drops else x

    segments = None
    if types is not None:
        # A memory has the first type
        keys = torch.nn.functional.pad(types, (past, 0))
        segments = (types[:, :, None] != keys[:, None, :])[:, None]
    distance = torch.arange(seqlen, device=device)[:, None] - torch.arange(-past, seqlen, device=device)
    hidden = _hidden(distance, mask, perm_mask, causal, past if config.same_length else None)
    given = Pairs(
        drop(_table(config, batch, past + seqlen, seqlen, device), seeds[0], TABLE_SITE),
        segments,
        (None if hidden is None else hidden & (distance != 0), hidden),
        target_mapping,
    )
    g, states, probs = None, [], []
    if target_mapping is not None:
        g = drop(model.mask_emb.expand(batch, target_mapping.shape[1], width), seeds[1], 0)
    h = drop(h, seeds[0], 0)
    for i, layer in enumerate(model.layer_list()):
        states += [h] if g is None else [h, g]
        memory, asked = None if memories is None else memories[i], Asked(site=1 + i * SITES)
        h, g, seen = layer.streams(h, g, memory, given, asked, seeds)
        probs.append(seen[0] if g is None else seen)
    states += [h] if g is None else [h, g]
    last = drop(h, seeds[0], LAST_SITE) if g is None else drop(g, seeds[1], LAST_SITE)
    positions = torch.arange(last.shape[1], device=device).repeat(batch)
    places = packing.dense(batch, last.shape[1], device)
    return last.flatten(0, 1), states, probs, Inputs(None, positions, None, None, None, places)


def _checked_memories(
    config: EncoderConfig, mems: Sequence[Tensor] | None, batch: int, device: torch.device
) -> list[Tensor] | None:
    """(batch, M, hidden) per layer."""
    if mems is None:
        return None
    if len(mems) != config.num_hidden_layers:
        raise ValueError(f"mems: expected {config.num_hidden_layers} tensors, got {len(mems)}")
    for each in mems:
        check_tensor("mems", each)
        checks.shape("mems", each, (len(mems[0]), batch, config.hidden_size))
    return [each.transpose(0, 1).to(device) for each in mems]


def _hidden(
    distance: Tensor, mask: Tensor | None, perm_mask: Tensor | None, causal: bool, reach: int | None
) -> Tensor | None:
    """Which keys each query does not see, (batch or 1, 1, S, M + S) bool; None if it sees all.

    Args:
        distance: (S, M + S), from query to key.
        mask: (batch, S), non-zero = keep.
        perm_mask: see `XLNetModel.forward`.
        causal: whether no query sees a later key.
        reach: then the distance of the farthest key that a query sees; None for no limit.
    """
    if not causal and mask is None and perm_mask is None:
        return None
    hidden = (distance < 0) & causal
    if causal and reach is not None:
        hidden = hidden | (distance > reach)
    past = distance.shape[1] - distance.shape[0]
    # All memories are seen
    if mask is not None:
        hidden = hidden | torch.nn.functional.pad((mask == 0)[:, None], (past, 0))
    if perm_mask is not None:
        hidden = hidden | torch.nn.functional.pad(perm_mask != 0, (past, 0))
    return hidden[None, None] if hidden.dim() == 2 else hidden[:, None]


def _table(config: EncoderConfig, batch: int, first: int, last: int, device: torch.device) -> Tensor:
    """The sinusoids of the distances from `first` to 1 - `last`: (1, rows, hidden), or one per sequence."""
    distances = torch.arange(first, -last, -1, device=device)
    if config.clamp_len > 0:
        distances = distances.clamp(-config.clamp_len, config.clamp_len)
    table = sinusoids(distances, config.hidden_size)[None]
    if not config.bi_data:
        return table
    if batch % 2:
        raise ValueError(f"input_ids: expected an even number of sequences with config bi_data, got {batch}")
    # The second half of the batch is read from its end
    halves = table, sinusoids(-distances, config.hidden_size)[None]
    return torch.cat([half.expand(batch // 2, -1, -1) for half in halves])
