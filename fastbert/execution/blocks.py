"""Large batches in blocks of sequences, one after the other, for inference on a CPU.

So q, k, v and the feed-forward rows of a large batch, which take most memory, never exist as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from fastbert.execution.call import Call, Step
from fastbert.layers.batch import PackedBatch
from fastbert.ops.encoder_layer import sequence_blocks


def blocks_of(step: Step, x: Tensor, call: Call, fused: bool) -> list[tuple[int, int]]:
    """(first, last) sequence of each block; empty if all rows run at once.

    There are no blocks under a hook, which would see one call per block.

    Args:
        step: the layer.
        x: (total, hidden), its input.
        call: the call.
        fused: whether the layer runs as one `encoder_layer`, or else op by op.
    """
    batch = call.batch
    positions = None if batch.relative is None else batch.relative.positions
    special = (batch.bias, positions, batch.columns, batch.globals, batch.lengths)
    asks = any(t is not None for t in special)
    asks = asks or call.taps is not None or call.wants_attentions or bool(call.kept)
    if asks or not call.inference:
        return []
    if fused not in call.blocks:
        call.blocks[fused] = sequence_blocks(call.batch.cu_seqlens, x, fused)
    return call.blocks[fused] if call.blocks[fused] and step.layer.may_skip_rows() else []


def by_blocks(
    blocks: list[tuple[int, int]],
    x: Tensor,
    batch: PackedBatch,
    run: Callable[[Tensor, PackedBatch, Tensor | None], Tensor],
) -> Tensor:
    """`run(x, batch, None)`, or `run(rows, batch, out)` for each block, with memory for the result."""
    if not blocks:
        return run(x, batch, None)
    y = x.new_empty(x.shape)
    for first, last in blocks:
        ends = batch.cu_seqlens[first : last + 1]
        rows = slice(int(ends[0]), int(ends[-1]))
        own = replace(batch, cu_seqlens=ends - ends[0])
        if batch.positions is not None:
            own = replace(own, positions=batch.positions[rows])
        found = run(x[rows], own, y[rows])
        if found.data_ptr() != y[rows].data_ptr():
            y[rows] = found
    return y
