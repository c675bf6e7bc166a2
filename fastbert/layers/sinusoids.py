"""The sinusoids of distances that XLNet's layers score by, and the rows of their table that pairs need.

Tables are kept by the distance that they reach. A call with dropout has a table of its own.

Source: Dai et al. 2019, "Transformer-XL", sec. 3.3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.layers.batch import PackedBatch, Sinusoids
from fastbert.layers.dense_norm import dropped
from fastbert.ops import derivatives
from fastbert.ops.attention_grid import to_grid
from fastbert.ops.attention_relative import ScoreTable

# Dropout call site of the table
TABLE_SITE = (1 << 32) - 2


class KeptTable(NamedTuple):
    """What inference keeps of a layer for one table of sinusoids of 2n rows.

    Attributes:
        table: R, scaled; row n + d has the distance d from the query to the key, and row 0 the difference of
            the vectors of token types.
        bias: (nheads, 2n), the score of each row by b_r - b_w, in the compute dtype.
        of_types: (nheads,), the score of that difference by b_s - b_w.
    """

    table: ScoreTable
    bias: Tensor
    of_types: Tensor


def sinusoids(distances: Tensor, width: int) -> Tensor:
    """[sin | cos] of distances: (n,) int64 -> (n, width), in float32 as in transformers."""
    steps = torch.arange(0, width, 2, dtype=torch.int64, device=distances.device).float()
    angles = distances.float()[:, None] * (1 / torch.pow(10000, steps / width))
    return torch.cat([angles.sin(), angles.cos()], -1)


def shifted(x: Tensor, keys: int) -> Tensor:
    """Scores by row of the table -> scores by key: (…, S, rows) -> (…, S, keys), a view.

    Row S - i + j of the table has the distance of query i from key j.
    """
    *lead, queries, rows = x.shape
    if queries == 0:
        return x.reshape(*lead, 0, keys)
    x = x.reshape(*lead, rows, queries)[..., 1:, :].reshape(*lead, queries, rows - 1)
    return x[..., :keys]


def grid(x: Tensor, batch: PackedBatch) -> Tensor:
    """Packed (total, …) -> (batch, S, …), zeros past each length."""
    size = batch.cu_seqlens.shape[0] - 1
    # Under torch.compile there are rows past the last length
    if x.shape[0] == size * batch.max_seqlen and not torch.compiler.is_compiling():
        return x.unflatten(0, (size, batch.max_seqlen))
    return to_grid(x, batch.cu_seqlens, batch.max_seqlen)


# (width, limit, device) -> its tables, each longer than the previous. Short tables are kept: a graph that a
# caller has captured reads them.
_tables: dict[tuple[int, int, torch.device], list[Tensor]] = {}


def _table(reach: int, width: int, limit: int, device: torch.device) -> Tensor:
    """The sinusoids of the distances from `reach` to 1 - reach, clamped if `limit` > 0."""
    distances = torch.arange(reach, -reach, -1, device=device)
    return sinusoids(distances.clamp(-limit, limit) if limit > 0 else distances, width)


def kept_table(reach: int, width: int, limit: int, device: torch.device) -> Tensor:
    """A table of at least this reach, (2 · its reach, width); it is kept, and made longer when needed."""
    # What a trace makes belongs to the trace
    if torch.compiler.is_compiling() or derivatives.plain_torch() is not None:
        return _table(reach, width, limit, device)
    found = _tables.setdefault((width, limit, device), [])
    if not found or found[-1].shape[0] < 2 * reach:
        # Autograd cannot save tensors that were made in inference mode
        with torch.inference_mode(False):
            found.append(_table(max(128, 1 << (reach - 1).bit_length()), width, limit, device))
    return next(t for t in found if t.shape[0] >= 2 * reach)


def sinusoids_of(
    batch: PackedBatch, reach: int, width: int, limit: int, token_types: Tensor | None, drops: float
) -> Sinusoids:
    """What layers score distances and segments by.

    Args:
        batch: has the columns of tokens, if their order alone does not say the distances; and the seed.
        reach: more than the largest distance.
        width: the hidden size.
        limit: farther distances count as this one; 0 or less for no limit.
        token_types: (total,) int64, or None.
        drops: the probability of dropout of the table, whose one pattern serves all sequences and layers.
    """
    device = batch.cu_seqlens.device
    if batch.seed is None:
        table = kept_table(reach, width, limit, device)
    else:
        table = _table(reach, width, limit, device)
        table = dropped(table, drops, batch.seed, TABLE_SITE) if drops else table
    index = segments = None
    if batch.columns is not None:
        index = reach - batch.columns[:, :, None] + batch.columns[:, None, :]
    if token_types is not None:
        types = grid(token_types, batch)
        segments = (types[:, :, None] != types[:, None, :]).unsqueeze(1)
    return Sinusoids(table, reach, index, segments)
