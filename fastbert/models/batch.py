"""What the layers of a call read beside the packed tokens, as each family needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.execution.call import Padded, Step
from fastbert.layers import alibi, global_tokens
from fastbert.layers.batch import Distances, Globals, PackedBatch
from fastbert.layers.block_sparse import lengths_of
from fastbert.layers.linear import apply_norm
from fastbert.layers.modules import calls_all, changed, part
from fastbert.layers.packing import Packing
from fastbert.layers.positions import relative_bias, rotary_tables
from fastbert.models.families import Family
from fastbert.models.inputs import Inputs
from fastbert.ops.attention_places import attention_places
from fastbert.ops.attention_relative import RelativeScores, dense_scores
from fastbert.ops.checks import autocast_dtype
from fastbert.runtime import prepared


def batch_of(
    root: nn.Module,
    family: Family,
    steps: list[Step],
    inputs: Inputs,
    x: Tensor,
    seed: Tensor | None,
    causal: bool,
) -> PackedBatch:
    """The batch as the layers read it.

    Args:
        root: the encoder, with its parts under the family's names.
        steps: the layers of the call.
        inputs: the batch, on the model's device.
        x: the packed tokens, for their number, dtype and device.
        seed, causal: see `PackedBatch`.
    """
    packed, places = inputs.packing, None
    lengths = packed.cu_seqlens, packed.max_seqlen
    if steps:
        places = attention_places(*lengths, x.shape[0], autocast_dtype(x) or x.dtype)
    batch = PackedBatch(*lengths, inputs.bias, seed, causal, places)
    columns = columns_of(packed) if inputs.holes else None
    if family.relative_bias is not None or family.alibi:
        longest = packed.max_seqlen if columns is None else packed.seqlen
        return replace(batch, relative=shared_scores(root, family, longest, x.device, columns))
    if family.rotary:
        tables = _tables_of(steps, inputs, x)
        return replace(batch, positions=inputs.position_ids, tables=tables, columns=columns)
    if family.disentangled:
        found = distances_of(part(root, family.layers.partition(".")[0]))
        return replace(batch, distances=found, columns=columns)
    if family.block_sparse:
        each = (step.form.blocks for step in steps if step.form is not None)
        blocks = next((found for found in each if found is not None), None)
        return batch if blocks is None else replace(batch, lengths=lengths_of(batch, blocks))
    if family.global_tokens:
        return replace(batch, globals=global_tokens.of(inputs.globals, batch), columns=columns)
    return batch


def padded_of(root: nn.Module, family: Family, inputs: Inputs, x: Tensor, batch: PackedBatch) -> Padded:
    """What layers need that are called on the padded batch. Arguments as of `batch_of`, and its result."""
    packed = inputs.packing
    grid = None if batch.distances is None else batch
    if family.rotary:
        assert batch.positions is not None
        grid = replace(batch, positions=packed.grid(batch.positions)[0].flatten())
    if family.block_sparse:
        kept = packed.mask
        columns = None if kept is None else kept.long().cumsum(1) - kept.long()
        grid = replace(batch, bias=None, columns=columns)
    if family.global_tokens:
        flags = None if batch.globals is None else packed.grid(batch.globals.flags)[0]
        grid = replace(batch, globals=None if flags is None else Globals(flags))
    return Padded(packed, _padded_mask(root, family, inputs, x, batch.causal), grid)


def _tables_of(steps: list[Step], inputs: Inputs, x: Tensor) -> Any:
    """What layers rotate by: see `PackedBatch.tables`."""
    forms = [step.form for step in steps if step.form is not None]
    sizes = {form.head_dim for form in forms}
    thetas = {form.rotary for form in forms if form.rotary is not None}
    return rotary_tables(thetas, sizes.pop(), inputs.table_rows, x) if thetas else {}


def distances_of(stack: nn.Module) -> Distances | None:
    """DeBERTa's table of distances, normed if there is a norm of it; None if layers score no distances."""
    embeddings, norm = (stack._modules.get(name) for name in ("rel_embeddings", "LayerNorm"))
    if embeddings is None:
        return None
    rows: Any = embeddings.weight
    watches = norm is not None and (calls_all() or changed(norm))
    if watches or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return Distances(rows if norm is None else apply_norm(norm, rows), ())
    sources = rows, *(() if norm is None else norm.parameters())
    # By PyTorch's own functions, which leave the marks of parameters (runtime/prepared.py)
    normed = prepared.derived(
        stack, "distances", sources, lambda: rows.clone() if norm is None else norm(rows)
    )
    return Distances(normed, sources)


def columns_of(packed: Packing) -> Tensor | None:
    """(batch, max_seqlen): the padded column of each kept token, then those of masked ones."""
    if packed.mask is None:
        return None
    order = torch.argsort(packed.mask.logical_not().to(torch.uint8), dim=1, stable=True)
    return order[:, : packed.max_seqlen].contiguous()


def _padded_mask(
    root: nn.Module, family: Family, inputs: Inputs, hidden: Tensor, causal: bool
) -> Tensor | None:
    """The mask of attention on the padded batch: (batch, 1, 1, S) bool, or additive with more dimensions.

    Args:
        root, family, inputs, causal: see `batch_of`.
        hidden: the packed tokens, for their dtype and device.
    """
    packed, bias, lowest = inputs.packing, inputs.bias, torch.finfo(hidden.dtype).min
    kept = packed.grid(hidden[:, :1])[1]
    mask = None if kept is None else kept[:, None, None, :]
    if family.relative_bias is not None or family.alibi:
        relative = shared_scores(root, family, packed.seqlen, hidden.device)
        dense = dense_scores(relative, None, packed.seqlen, hidden)
        bias = dense if bias is None else bias + dense
    if causal:
        earlier = torch.ones(packed.seqlen, packed.seqlen, dtype=torch.bool, device=hidden.device).tril()
        mask = earlier[None, None] if mask is None else mask & earlier
    if bias is None:
        return mask
    bias = bias.to(hidden.dtype).clamp_min(lowest)
    return bias if mask is None else bias.masked_fill(mask.logical_not(), lowest)


def shared_scores(
    root: Any, family: Family, seqlen: int, device: torch.device, positions: Tensor | None = None
) -> RelativeScores:
    """The scores of distances that all layers of MPNet or jina-v2 share; arguments as `relative_bias`."""
    if family.relative_bias is not None:
        return relative_bias(part(root, family.relative_bias), seqlen, device, positions)
    return alibi.scores(root.config.num_attention_heads, seqlen, device, positions)
