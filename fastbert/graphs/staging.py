"""The memory that recorded graphs read their inputs from, and batches packed for it on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.models.config import EncoderConfig
from fastbert.runtime.loader import extension

_IDS = (torch.int64, torch.int32)


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
        ids, mask, types: in CPU memory, or None; see `to_host`.
        with_ids: False: `ids` are only as many as the true ones, which stay on the device with the types.
    """

    shape: tuple[int, int, int]
    ids: Tensor
    mask: Tensor | int | None
    types: Tensor | int | None
    with_ids: bool


class Stage:
    """Packs padded batches on the host, as `check_inputs` does, in one call of the extension.

    It takes the usual batches only, and refuses all others without a reason: `check_inputs` then takes them,
    or says what is wrong with them.

    Attributes:
        device: where the model and its graphs are.
    """

    def __init__(self, config: EncoderConfig, device: torch.device):
        self.device, family = device, config.family
        self._longest, self._by_column = config.max_tokens, not family.pad_positions
        types = config.type_vocab_size if family.segments else 0
        pad = config.pad_token_id if family.pad_positions else -1
        self._host = None
        if extension is not None and family.relative_bias is None and pad is not None:
            self._host = extension.HostBatch(config.vocab_size, types, pad, Tensor)

    def batch(self, ids: Any, mask: Any, types: Any) -> Batch | None:
        """The batch, on the host; None if `check_inputs` must take it.

        If the ids are on a device, the host waits for it once, and takes all tensors from there. It does not
        wait if the mask is on the host: then the ids stay where they are, unchecked.
        """
        if self._host is None or type(ids) is not Tensor:
            return None
        with_ids = is_on_host(ids) or mask is None or (type(mask) is Tensor and not is_on_host(mask))
        if not with_ids:
            if not self._by_column or not _are_ids(ids, types):
                return None
            # the extension looks at their number alone, not at the memory
            ids, types = torch.empty(ids.shape, dtype=ids.dtype), None
        elif not is_on_host(ids):
            ids, mask, types = to_host(ids, mask, types)
        shape = self._host.measure(ids, mask, types)
        if shape is None or shape[1] > self._longest:
            return None
        if not with_ids and shape[2] < shape[0] * shape[1]:
            return None
        return Batch(shape, ids, mask, types, with_ids)

    def pack(self, batch: Batch, tokens: int, room: int, indices: bool, packed: Tensor) -> bool:
        """Write the batch to `packed` as `Rows` are; False if `check_inputs` must take it.

        Args:
            batch: of at most `tokens` kept tokens and `room` sequences.
            tokens, room: of the graph.
            indices: whether there is padding, and so `Rows.indices`, which are last.
            packed: int64 in CPU memory, as long as that.
        """
        _, ids, mask, types, with_ids = batch
        return self._host.pack(ids, mask, types, packed.data_ptr(), tokens, room, with_ids, indices)


def _are_ids(ids: Tensor, types: Any) -> bool:
    """Whether these are ids of tokens, and types, or None, beside them."""
    if ids.dtype not in _IDS or ids.dim() != 2:
        return False
    if types is None:
        return True
    return (
        type(types) is Tensor
        and types.dtype in _IDS
        and types.shape == ids.shape
        and types.device == ids.device
    )


def is_on_host(t: Tensor) -> bool:
    """Whether a tensor is in CPU memory."""
    return t.device.type == "cpu"


def to_host(
    ids: Tensor, mask: Tensor | None, types: Tensor | None
) -> tuple[Tensor, Tensor | int | None, Tensor | int | None]:
    """Tensors of a device on the host, for which the host waits once if they can be stacked.

    The ids are then the first layer of what is returned for them, and the numbers of the others' layers are
    returned for those. A stack of integers and floats has no ids, and the extension refuses it.
    """
    if mask is None and types is None:
        return ids.cpu(), None, None
    if types is None:
        given, last = (ids, mask), None
    else:
        given, last = ((ids, types), 1) if mask is None else ((ids, mask, types), 2)
    try:
        whole = torch.stack(given).cpu()
    except RuntimeError:  # shapes or devices differ: the extension refuses them
        return ids.cpu(), None if mask is None else mask.cpu(), None if types is None else types.cpu()
    return whole, None if mask is None else 1, last
