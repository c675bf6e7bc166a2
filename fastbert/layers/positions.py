"""Where tokens are in their sequence: rotary positions, windows of sequences with holes, MPNet's distances.

The angle of pair c of a head's columns at position p is p · theta^(-2c / head_dim). Its cosine and sine are
computed in float32, as transformers computes them, also for float64 models. Linear scaling divides the angle.
Dynamic NTK scaling has another base if the longest text of a batch has n > trained tokens, which is
theta · (factor · n / trained - factor + 1)^(head_dim / (head_dim - 2)).

Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", sec. 3.2; Peng et al.
2023, "YaRN: Efficient Context Window Extension of Large Language Models", sec. 3.1 (NTK scaling).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fastbert.layers.batch import PackedBatch, Rotary, Tables
from fastbert.layers.form import LayerForm
from fastbert.ops import derivatives
from fastbert.ops.attention_relative import RelativeScores
from fastbert.ops.rotary import rotary

# Rows of the shortest table that is kept
_FEWEST = 512
# (base, divisor, head_dim, device) -> its tables in float32, each longer than the previous. Short tables are
# kept: a graph that a caller has captured reads them.
_tables: dict[tuple[float, float, int, torch.device], list[tuple[Tensor, Tensor]]] = {}


def rotary_tables(rotaries: Iterable[Rotary], head_dim: int, rows: int, x: Tensor) -> Tables:
    """The tables of some rotations for positions 0 to `rows` - 1, on the device of `x`.

    They are in float64 for float64 `x`, else in float32. Tables are kept, and made longer when longer texts
    come.
    """
    found = {each: _table(each, head_dim, rows, x.device) for each in rotaries}
    if x.dtype == torch.float64:
        return {each: (cos.double(), sin.double()) for each, (cos, sin) in found.items()}
    return found


def _table(rotary: Rotary, head_dim: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    theta, factor, trained = rotary
    if trained is not None and rows > trained:
        # In float32, as in transformers. Each length has its own angles, so the table is not kept.
        stretched = factor * torch.tensor(rows, device="cpu") / trained - (factor - 1)
        return _computed(theta * stretched ** (head_dim / (head_dim - 2)), 1.0, head_dim, rows, device)
    factor = 1.0 if trained is not None else factor
    # What a trace makes belongs to the trace
    if torch.compiler.is_compiling() or derivatives.plain_torch() is not None:
        return _computed(theta, factor, head_dim, rows, device)
    found = _tables.setdefault((theta, factor, head_dim, device), [])
    if not found or found[-1][0].shape[0] < rows:
        # Autograd cannot save tensors that were made in inference mode
        with torch.inference_mode(False):
            longer = max(_FEWEST, 1 << (rows - 1).bit_length())
            found.append(_computed(theta, factor, head_dim, longer, device))
    return found[-1]


def _computed(
    theta: float | Tensor, factor: float, head_dim: int, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    frequencies = (1.0 / theta ** (pairs / head_dim) / factor).to(device)
    angles = torch.arange(rows, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotated(form: LayerForm, qkv: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, each (total, nheads, head_dim), the first two rotated if the layer rotates.

    Args:
        form: the form of a packed layer.
        qkv: (total, 3 · nheads · head_dim), the product of its linear layer; read in place.
        batch: has the positions, and the tables of the layer's base.
    """
    nheads = form.nheads
    if form.head_major:
        q, k, v = qkv.view(qkv.shape[0], nheads, 3, form.head_dim).unbind(2)
        return rotate(form, q, batch), rotate(form, k, batch), v
    both, v = qkv.view(qkv.shape[0], 3 * nheads, form.head_dim).split([2 * nheads, nheads], 1)
    q, k = rotate(form, both, batch).split([nheads, nheads], 1)
    return q, k, v


def rotate(form: LayerForm, heads: Tensor, batch: PackedBatch) -> Tensor:
    """Queries or keys (total, heads, head_dim), rotated if the layer rotates."""
    if form.rotary is None:
        return heads
    assert batch.tables is not None
    return rotary(heads, *batch.tables[form.rotary], batch.positions, interleaved=form.interleaved)


def window_bias(batch: PackedBatch, window: tuple[int, int]) -> Tensor:
    """The batch's bias with minus infinity where a key is outside the query's window, counted in columns.

    Args:
        batch: without `columns` each sequence is counted from its own start.
        window: see `LayerForm`.

    Returns:
        (batch or 1, nheads or 1, S, S).
    """
    columns = batch.columns
    if columns is None:
        columns = torch.arange(batch.max_seqlen, device=batch.cu_seqlens.device)[None]
    distance = columns[:, None, :] - columns[:, :, None]  # key - query
    outside = ((distance < -window[0]) | (distance > window[1]))[:, None]
    inside = torch.zeros((), device=columns.device) if batch.bias is None else batch.bias
    return torch.where(outside, float("-inf"), inside)


def relative_bias(
    table: nn.Module, seqlen: int, device: torch.device, positions: Tensor | None = None
) -> RelativeScores:
    """MPNet's bucketed relative attention bias (Raffel et al. 2019, sec. 2.1; Song et al. 2020).

    Args:
        table: embedding of 32 buckets, (32, nheads).
        seqlen: S.
        positions: (batch, S) positions of the packed tokens if they are not consecutive, else None.
    """
    # Larger distances share the last buckets
    reach = 128 if positions is not None else max(seqlen - 1, 0)
    distance = torch.arange(-reach, reach + 1, device=device)  # key - query
    # half of the 32 buckets per direction: 8 exact, 8 logarithmic up to a distance of 128
    size = distance.abs()
    far = 8 + (torch.log(size.clamp_min(1).float() / 8) / math.log(128 / 8) * 8).long()
    bucket = torch.where(size < 8, size, far.clamp_max(15)) + 16 * (distance > 0)
    rows = table(torch.arange(32, device=device))
    return RelativeScores(bucket.to(torch.int32), bias=rows.t(), positions=positions)
