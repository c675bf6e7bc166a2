r"""Scores of the distance between two tokens, which `attention` adds to those of q and k.

    S_ij += query[i, h, c] + key[j, h, c] + bias[h, c],   c = columns[p_j - p_i + reach]

p is the position of a token in its sequence. The sum covers DeBERTa (query = scale q Krᵀ, key = scale k Qrᵀ),
XLNet (query = scale (q + r) Rᵀ), and biases by distance (MPNet, T5, ALiBi). A backend that does not read
these scores itself gets them as a dense bias, which autograd differentiates.

`query` and `key` are products with a table of distances. In inference a backend may keep the table in a
layout of its own (`score_table`), with two functions, found together by `score_table_maker`:

    table_panels(table) -> panels                    table: (rows, nheads, headdim)
    table_scores(x, panels, table_rows, first, count) -> (total, nheads, count)
        x: (total, nheads, headdim), in the table's dtype, which the scores have too (float32 if it is
        float16); the scores of the table's rows from `first` on. Each is one sum, whatever else is computed.

Source: Shaw et al. 2018, "Self-Attention with Relative Position Representations"; Dai et al. 2019,
"Transformer-XL", sec. 3.3; Raffel et al. 2019, sec. 2.1; He et al. 2020, "DeBERTa", eq. 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastbert.ops import checks
from fastbert.ops.attention_grid import to_grid
from fastbert.ops.checks import TensorOrNone
from fastbert.runtime import dispatch
from fastbert.runtime.plain import plain

_SCORES = ("query", "key", "bias")


class RelativeScores(NamedTuple):
    """Scores of distances, added after `softmax_scale`. At least one of `query`, `key`, `bias` is given.

    Attributes:
        columns: int32 (2 * reach + 1,), reach at least the largest distance: at index d + reach the column of
            the distance d from the query to the key. The caller is responsible for values from 0 to
            ncolumns - 1; those of a CPU tensor are checked.
        query: (total, nheads, ncolumns), padded (batch, seqlen, nheads, ncolumns); the last dimension is
            contiguous. Any float dtype. Differentiable. None adds nothing.
        key: as `query`, one row per key.
        bias: (nheads, ncolumns), any float dtype. Differentiable. None adds nothing.
        positions: (batch, S) int64, the position of each token in its sequence; None means 0 to S - 1. With
            positions a distance beyond `reach` has the column of `reach`.
    """

    columns: Tensor
    query: TensorOrNone = None
    key: TensorOrNone = None
    bias: TensorOrNone = None
    positions: TensorOrNone = None


class ScoreTable(NamedTuple):
    """A table of distances in the layout of the backend that serves attention.

    Attributes:
        panels: what the backend made of the table.
        rows: the table's rows.
        multiply: the backend's `table_scores`.
    """

    panels: Tensor
    rows: int
    multiply: Callable[..., Tensor]

    def scores(self, x: Tensor, first: int, count: int) -> Tensor:
        """(total, nheads, headdim) -> (total, nheads, count), products with `count` rows from `first` on."""
        return self.multiply(plain(x), self.panels, self.rows, first, count)


def score_table_maker(x: Tensor) -> Callable[[Tensor], ScoreTable] | None:
    """(rows, nheads, headdim) -> `ScoreTable` of the backend that serves attention of `x`, or None."""
    names = "table_panels", "table_scores"
    found = dispatch.serving_functions(names, ("attention",), x.device, x.dtype)
    return None if found is None else _maker(*found)


@functools.cache
def _maker(panels: Callable[..., Tensor], scores: Callable[..., Tensor]) -> Callable[[Tensor], ScoreTable]:
    return lambda table: ScoreTable(panels(table), table.shape[0], scores)


def checked_relative(
    relative: RelativeScores | None, rows: torch.Size, batch: int, max_seqlen: int, q: Tensor
) -> RelativeScores | None:
    """The scores with `query` and `key` in the packed layout.

    Args:
        relative: as `attention` got it.
        rows: shape of the caller's q without its last two dimensions.
        batch, max_seqlen: of the batch.
        q: (total, nheads, headdim).

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    if relative is None:
        return None
    if not isinstance(relative, RelativeScores):
        raise TypeError(f"relative: expected RelativeScores, got {type(relative).__name__}")
    columns, query, key, bias, positions = relative
    if not isinstance(columns, Tensor):
        raise TypeError(f"relative.columns: expected an int32 torch.Tensor, got {type(columns).__name__}")
    given = [(name, t) for name, t in zip(_SCORES, relative[1:4], strict=True) if t is not None]
    if not given:
        raise ValueError("relative: expected at least one of query, key and bias, got None for each")
    nheads, ncolumns = q.shape[1], checks.float_tensor(f"relative.{given[0][0]}", given[0][1], q).shape[-1]
    for name, t in given:
        checks.float_tensor(f"relative.{name}", t, q)
        checks.shape(f"relative.{name}", t, (*(() if t is bias else rows), nheads, ncolumns))
    if positions is not None:
        checks.operand("relative.positions", positions, (batch, max_seqlen), (torch.int64,), q)
    check_columns("relative.columns", columns, max_seqlen if positions is None else 0, ncolumns, q)
    query, key = (None if t is None else t.reshape(q.shape[0], nheads, ncolumns) for t in (query, key))
    return RelativeScores(columns, query, key, bias, positions)


def check_columns(name: str, columns: Tensor, max_seqlen: int, ncolumns: int, x: Tensor) -> None:
    """Raise an error unless `columns` has columns for the distances within `max_seqlen` tokens."""
    checks.operand(name, columns, columns.shape, (torch.int32,), x)
    if columns.dim() != 1 or columns.shape[0] % 2 == 0:
        raise ValueError(f"{name}: expected shape (2 * reach + 1,), got {tuple(columns.shape)}")
    if columns.shape[0] < 2 * max_seqlen - 1:
        raise ValueError(
            f"{name}: expected at least {2 * max_seqlen - 1} distances for max_seqlen = {max_seqlen}, got "
            f"{columns.shape[0]}"
        )
    if columns.device.type == "cpu" and not torch.compiler.is_compiling() and columns.numel():
        least, most = (int(bound) for bound in torch.aminmax(columns))
        if least < 0 or most >= ncolumns:
            got = least if least < 0 else most
            raise ValueError(f"{name}: expected values from 0 to {ncolumns - 1}, got {got}")


def dense_scores(relative: RelativeScores, cu_seqlens: TensorOrNone, max_seqlen: int, q: Tensor) -> Tensor:
    """The scores as a bias (batch or 1, nheads, S, S) in the compute dtype of `q`; differentiable, no sync.

    Args:
        relative: as `checked_relative` returns it; in the padded layout if `cu_seqlens` is None.
        cu_seqlens, max_seqlen, q: see `attention`.
    """
    columns, query, key, bias, positions = relative
    compute = checks.compute_dtype(q)
    if positions is None:
        positions = torch.arange(max_seqlen, device=q.device)[None]
    reach = columns.shape[0] // 2
    distance = (positions[:, None, :] - positions[:, :, None]).clamp(-reach, reach)
    index = columns.long()[distance + reach]
    total = None
    for rows, at in ((query, index), (key, index.transpose(1, 2))):
        if rows is None:
            continue
        grid = rows.to(compute)
        grid = grid if cu_seqlens is None else to_grid(grid, cu_seqlens, max_seqlen)
        grid = grid.transpose(1, 2)  # (batch, nheads, S, ncolumns)
        found = grid.gather(-1, at[:, None].expand(*grid.shape[:2], -1, -1))
        found = found.transpose(2, 3) if rows is key else found
        total = found if total is None else total + found
    if bias is not None:
        found = bias.to(compute)[:, index].transpose(0, 1)
        total = found if total is None else total + found
    assert total is not None
    return total
