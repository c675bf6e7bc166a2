"""A layer on packed tokens, by the executor that a model's call would choose for it."""

from __future__ import annotations

from torch import Tensor, nn

from fastbert.execution.call import Call, Padded
from fastbert.execution.plan import run, survey
from fastbert.layers.batch import PackedBatch
from fastbert.layers.packing import Packing


def through(
    layer: nn.Module, x: Tensor, batch: PackedBatch, gate: Tensor | None = None, call: Call | None = None
) -> Tensor:
    """The layer's output, as the only one of a call."""
    call = Call(batch, 0, None if gate is None else gate[None]) if call is None else call
    sizes = batch.cu_seqlens.shape[0] - 1, batch.max_seqlen, batch.cu_seqlens, batch.max_seqlen
    call.padded = Padded(Packing(*sizes, flat=True), None)
    return run(survey([layer]), x, call)
