"""How a graph serves padded batches of one shape: where inputs go, and what its outputs are copied to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fastbert.graphs.buckets import Bucket
from fastbert.graphs.recorder import Recording
from fastbert.graphs.staging import Rows
from fastbert.ops.packing import unpack


class Plan(NamedTuple):
    """Views that are the same at every call with a shape; made once, because each view takes a microsecond.

    Attributes:
        bucket: of the recording.
        inputs: (words,) int64: what is written at a call.
        words: its length.
        pinned: whether it is best copied from pinned memory.
        ids, types: (sequences, columns) int64, the parts of `inputs` that have those of a batch whose tokens
            are all kept; None of others.
        indices: (total,) flat positions in the padded batch; None if all tokens are kept.
        replay: computes the outputs again, in place.
        hidden: the recording's output for these batches: packed if there are `indices`, else padded.
        pooled: the pooler's output, or None.
        shape: (sequences, columns) of the padded batch.
    """

    bucket: Bucket
    inputs: Tensor
    words: int
    pinned: bool
    ids: Tensor | None
    types: Tensor | None
    indices: Tensor | None
    replay: Callable[[], None]
    hidden: Tensor
    pooled: Tensor | None
    shape: tuple[int, int]

    def copy_outputs(self) -> tuple[Tensor, Tensor | None]:
        """(last_hidden_state, pooler_output), padded, in memory that the caller owns."""
        padded = self.indices is not None and not self.bucket.first_token_only
        hidden = unpack(self.hidden, self.indices, *self.shape) if padded else self.hidden.clone()
        return hidden, None if self.pooled is None else self.pooled.clone()


def make_plan(bucket: Bucket, recording: Recording, rows: Rows, shape: tuple[int, int, int]) -> Plan:
    """The plan for batches of (sequences, columns, kept tokens) that the recording of `bucket` serves."""
    size, seqlen, total = shape
    dense = total == size * seqlen
    hidden, pooled = recording.outputs
    if bucket.first_token_only:
        hidden = hidden[:size].unsqueeze(1)
    else:
        hidden = hidden[:total].view(size, seqlen, -1) if dense else hidden[:total]
    words = rows.whole.shape[0] - (rows.indices.shape[0] if dense else 0)
    return Plan(
        bucket,
        rows.whole[:words],
        words,
        rows.whole.is_cuda,
        rows.ids[0, :total].view(size, seqlen) if dense else None,
        rows.ids[2, :total].view(size, seqlen) if dense else None,
        None if dense else rows.indices[:total],
        recording.replay,
        hidden,
        None if pooled is None else pooled[:size],
        (size, seqlen),
    )
