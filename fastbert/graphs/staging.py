"""The memory that recorded graphs read from, batches packed for it on the host, and what a replay returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.graphs.buckets import Bucket
from fastbert.graphs.calls import longest_text
from fastbert.graphs.recorder import Recording
from fastbert.models.config import EncoderConfig
from fastbert.models.inputs import has_holes, packer_of, to_host
from fastbert.ops.packing import unpack
from fastbert.runtime import dispatch

_IDS = (torch.int64, torch.int32)
# Zeros without memory: the address of a view of them is its offset
_is_zero = torch._C.TensorBase._is_zerotensor


class Rows(NamedTuple):
    """The inputs of a graph for `tokens` tokens and `room` sequences, in one piece of memory.

    Attributes:
        whole: (words,) int64, all of it.
        ids: (3, tokens) int64: ids, positions and types of the tokens.
        ends: (room + 1,) int32: `cu_seqlens`.
        indices: (tokens,) int64: the flat positions of the tokens in the padded batch. No graph reads them.
    """

    whole: Tensor
    ids: Tensor
    ends: Tensor
    indices: Tensor


def words(tokens: int, room: int) -> int:
    """How many int64 the inputs of a graph take."""
    return 4 * tokens + (room + 2) // 2


def rows_in(memory: Tensor, tokens: int, room: int) -> Rows:
    """The inputs of a graph at the start of `memory`, (at least `words`,) int64."""
    ends = memory[3 * tokens : 3 * tokens + (room + 2) // 2]
    return Rows(
        memory[: words(tokens, room)],
        memory[: 3 * tokens].view(3, tokens),
        ends.view(torch.int32)[: room + 1],
        memory[words(tokens, room) - tokens : words(tokens, room)],
    )


class Batch(NamedTuple):
    """A padded batch on the host, which `Stage.pack` can pack.

    Attributes:
        shape: (sequences, columns, kept tokens).
        ids, mask, types: in CPU memory, or None; see `to_host`. If `ids` is None, ids and types stay on the
            device.
    """

    shape: tuple[int, int, int]
    ids: Tensor | None
    mask: Tensor | int | None
    types: Tensor | int | None


class Stage:
    """Packs padded batches on the host, as `check_inputs` does, in one call of the extension.

    It takes usual batches only, and refuses all other batches without a reason. `check_inputs` then takes
    them, or raises an error that says what is wrong.

    Attributes:
        device, dtype: the device and dtype of the model and its graphs.
    """

    def __init__(self, config: EncoderConfig, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype, family = device, dtype, config.family
        self._longest, self._by_column = longest_text(config), not family.pad_positions
        self._segments, self._counts_columns = config.has_segments, family.counts_columns
        self._ignores_types = family.segments and not config.has_segments
        # Whether the op `embedding` reads the ids, and not a table's own module
        own = family.word_table == family.embeddings or family.bottleneck or config.get("rescale_embeddings")
        own = own or config.word_embedding_rank is not None
        self._by_op = not (own or (family.projects_first and config.embedding_width != config.hidden_size))
        self._host: Any = packer_of(config)

    def batch(self, ids: Any, mask: Any, types: Any) -> Batch | None:
        """The batch on the host; None if `check_inputs` must take it.

        If the ids are on a device, the host waits for it once, and copies all tensors from there. It need not
        wait if it can compute the lengths without the ids, because there is no mask or the mask is on the
        host. Then the ids stay where they are, and the kernel that reads them reports bad ids
        (kernels/bad_ids.py).
        """
        if self._ignores_types:
            types = None
        given = [t for t in (ids, mask, types) if type(t) is Tensor]
        if self._host is None or type(ids) is not Tensor or any(map(_is_zero, given)):
            return None
        if not is_on_host(ids):
            has_lengths = type(mask) is not Tensor or is_on_host(mask)
            if has_lengths and not self._are_ids(ids, types):
                return None
            if has_lengths and self._by_column and self._kernel_tells():
                return self._of_lengths(ids.shape, mask)
            if has_lengths and mask is not None:
                return None
            ids, mask, types = to_host(ids, mask, types)
        shape = self._host.measure(ids, mask, types)
        if shape is None or shape[1] > self._longest:
            return None
        return Batch(shape, ids, mask, types)

    def _of_lengths(self, shape: torch.Size, mask: Any) -> Batch | None:
        """The batch without its ids; None if `check_inputs` must take it, because a token is padding."""
        size, columns = shape
        whole = size, columns, size * columns
        if columns > self._longest:
            return None
        if mask is not None:
            memory = torch.empty(shape, dtype=torch.int64)
            if self._host.measure(memory, mask, None) != whole:
                return None
        return Batch(whole, None, mask, None)

    def pack(self, batch: Batch, tokens: int, room: int, indices: bool, packed: Tensor) -> bool:
        """Write the batch to `packed` in the layout of `Rows`; False if `check_inputs` must take it.

        Args:
            batch: at most `tokens` kept tokens and `room` sequences.
            tokens, room: the graph's tokens and sequences.
            indices: whether there is padding, and so `Rows.indices` at the end.
            packed: int64 in CPU memory, `words` long, or without the indices shorter by `tokens`.
        """
        (size, columns, _), ids, mask, types = batch
        with_ids = ids is not None
        if not with_ids:
            # The extension reads the shape alone, not the memory
            ids = torch.empty(size, columns, dtype=torch.int64)
        if not self._host.pack(ids, mask, types, packed.data_ptr(), tokens, room, with_ids, indices):
            return False
        if not (indices and self._counts_columns):
            return True
        ends = packed[3 * tokens : -tokens].view(torch.int32)[: size + 1].tolist()
        return not has_holes(packed[-tokens:], ends)

    def _are_ids(self, ids: Tensor, types: Any) -> bool:
        """Whether these are ids of tokens on the model's device, and types, or None, beside them."""
        if ids.dtype not in _IDS or ids.dim() != 2 or ids.device != self.device:
            return False
        if types is None:
            return True
        beside = self._segments and type(types) is Tensor and types.dtype in _IDS
        return beside and (types.shape, types.device) == (ids.shape, ids.device)

    def _kernel_tells(self) -> bool:
        """Whether the kernel that serves `embedding` now reads no memory for a bad id, and reports it."""
        if not self._by_op:
            return False
        return dispatch.serving_function("bad_ids", ("embedding",), self.device, self.dtype) is not None


def is_on_host(t: Tensor) -> bool:
    """Whether a tensor is in CPU memory."""
    return t.device.type == "cpu"


class Plan(NamedTuple):
    """How a graph serves padded batches of one shape.

    The views are the same at every call, and made once, because each takes a microsecond.

    Attributes:
        bucket: the recording's bucket.
        inputs: int64, the memory that is written at a call.
        ids, types: (sequences, columns) int64, the ids and types in `inputs` if all tokens are kept; else
            None.
        indices: (total,) flat positions in the padded batch; None if all tokens are kept.
        replay: computes the outputs again, in place.
        hidden: the recording's output for these batches: packed if there are `indices`, else padded.
        pooled: the pooler's output, or None.
    """

    bucket: Bucket
    inputs: Tensor
    ids: Tensor | None
    types: Tensor | None
    indices: Tensor | None
    replay: Callable[[], None]
    hidden: Tensor
    pooled: Tensor | None

    def copy_outputs(self, batch: int, seqlen: int) -> tuple[Tensor, Tensor | None]:
        """(last_hidden_state, pooler_output), padded, in memory that the caller owns."""
        if self.indices is None or self.bucket.first_token_only:
            hidden = self.hidden.clone()
        else:
            hidden = unpack(self.hidden, self.indices, batch, seqlen)
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
        rows.ids[0, :total].view(size, seqlen) if dense else None,
        rows.ids[2, :total].view(size, seqlen) if dense else None,
        None if dense else rows.indices[:total],
        recording.replay,
        hidden,
        None if pooled is None else pooled[:size],
    )
