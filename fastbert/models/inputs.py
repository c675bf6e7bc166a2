"""The inputs that callers pass to a model: defaults and the packed form. `input_checks.py` has the checks.

All checks of values (ids in range, kept tokens per sequence) share one read-back, so that a forward on a GPU
synchronises once. It needs no sync if the host has the lengths, as a mask or cu_seqlens in CPU memory:
- If all other inputs are on the host too, they are checked and packed there, then sent to the GPU.
- If the ids are on the GPU, the host does not check them. Our kernel does (kernels/bad_ids.py): it reads no
  memory outside the table, makes the token NaN, and the next call raises an IndexError. A recorded graph
  treats ids without a mask in the same way (graphs/staging.py).

Under `torch.compile` values are not checked, and everything must be on the model's device.
"""

from __future__ import annotations

import functools
import itertools
import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastbert.layers import packing
from fastbert.layers.packing import Packing
from fastbert.models.config import EncoderConfig
from fastbert.models.input_checks import (
    check_ids,
    check_length,
    check_lengths,
    check_on,
    check_ranges,
    masks_of,
    read_back,
    tokens_of,
)
from fastbert.ops import checks
from fastbert.runtime.loader import extension

# Up to this many ids on a device are copied to the host faster than eight kernels check them.
_FEW = 16384
_STACKED = (torch.int64, torch.bool)
_is_neg, _is_zero = torch._C.TensorBase.is_neg, torch._C.TensorBase._is_zerotensor


@dataclass(frozen=True)
class Inputs:
    """Packed inputs of one call.

    Attributes:
        input_ids, position_ids, token_type_ids: (rows,) int64; token_type_ids is None if the family has no
            segments.
        inputs_embeds: (rows, embedding size) instead of input_ids, or None.
        bias: additive attention bias (batch or 1, nheads or 1, S or 1, S) from a 4-D mask, or None.
        packing: the places of the rows in the padded batch.
        first_masked: the first sequence that has kept tokens, but not at position 0; None if there is none,
            and under `torch.compile`.
        holes: whether the kept tokens of a sequence are not adjacent; under `torch.compile`, whether there is
            a mask. False if the family's attention does not depend on it.
        last_position: the largest of the caller's position_ids, if no table limits them; else None.
        globals: (rows,) bool, which tokens the attention mask's value 2 makes global, if the family has such
            tokens; else None.
    """

    input_ids: Tensor | None
    position_ids: Tensor
    token_type_ids: Tensor | None
    inputs_embeds: Tensor | None
    bias: Tensor | None
    packing: Packing
    first_masked: int | None = None
    holes: bool = False
    last_position: int | None = None
    globals: Tensor | None = None

    @property
    def table_rows(self) -> int:
        """How many positions a table needs."""
        return self.packing.seqlen if self.last_position is None else self.last_position + 1

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.position_ids.device

    def to(self, device: torch.device) -> Inputs:
        """The inputs with their tensors on `device`; the host does not wait for the copies."""
        if self.device == device:
            return self
        names = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds", "bias", "globals")
        given = {name: getattr(self, name) for name in names}
        moved = {n: None if t is None else packing.send(t, device) for n, t in given.items()}
        return replace(self, packing=self.packing.to(device), **moved)

    def chosen(self, numbers: list[int], lengths: list[int]) -> tuple[Inputs, Tensor]:
        """The inputs of some sequences alone.

        Args:
            numbers: of the sequences, one at least; the result has them in this order.
            lengths: number of tokens of each sequence of the batch.

        Returns:
            (the inputs, (rows,) int64: the packed rows of their tokens before).
        """
        first = [0, *itertools.accumulate(lengths)]
        of_tokens = torch.cat([torch.arange(first[i], first[i + 1]) for i in numbers])
        at, rows = (packing.send(t, self.device) for t in (torch.tensor(numbers), of_tokens))
        names = ("input_ids", "position_ids", "token_type_ids", "inputs_embeds", "globals")
        given = {name: getattr(self, name) for name in names}
        own = {name: None if t is None else t.index_select(0, rows) for name, t in given.items()}
        bias = self.bias
        if bias is not None and bias.shape[0] > 1:
            bias = bias.index_select(0, at)
        packed = self.packing.chosen(at, [lengths[i] for i in numbers], bias is not None)
        return replace(self, bias=bias, packing=packed, first_masked=None, **own), rows

    @classmethod
    def from_packed(
        cls,
        config: EncoderConfig,
        device: torch.device,
        input_ids: Tensor | None,
        cu_seqlens: Tensor,
        max_seqlen: int | None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Inputs:
        """The checked inputs of a call with packed tokens, on the device of the tokens.

        Raises:
            TypeError, ValueError: naming the argument, what came and what was expected.
        """
        source, tokens, home = tokens_of(config, input_ids, inputs_embeds, device, "total")
        total = tokens.shape[0]
        if token_type_ids is not None and not config.family.segments:
            raise ValueError(f"token_type_ids: {config.model_type} has no segment embeddings; expected None")
        check_lengths(cu_seqlens, max_seqlen, home)
        for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
            if ids is not None:
                check_ids(name, ids, home)
                checks.shape(name, ids, (total,))
        token_type_ids = token_type_ids if config.has_segments else None
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        last_position = known = None
        if torch.compiler.is_compiling():
            if max_seqlen is None:
                raise ValueError("max_seqlen: expected an integer under torch.compile, got None")
            last_position = _last_position(config, position_ids, {})
        else:
            looked_at: dict[str, Tensor | None] = {"lengths": lengths}
            if cu_seqlens.device == home:
                looked_at |= dict(
                    input_ids=input_ids, token_type_ids=token_type_ids, position_ids=position_ids
                )
            elif config.family.unlimited:
                looked_at["position_ids"] = position_ids
            facts = read_back(looked_at, cu_seqlens)
            first, last = facts["extra"][0], facts["extra"][-1]
            if first != 0 or last != total or facts["lengths"][0] < 0:
                raise ValueError(
                    f"cu_seqlens: expected to rise from 0 to total = {total}, got {first} to {last} "
                    f"with a smallest step of {facts['lengths'][0]}"
                )
            longest = facts["lengths"][1]
            max_seqlen = longest if max_seqlen is None else max_seqlen
            if longest > max_seqlen:
                raise ValueError(f"max_seqlen: {max_seqlen} is below the longest sequence, {longest}")
            if position_ids is None:
                check_length(config, longest, source)
            check_ranges(config, facts)
            last_position = _last_position(config, position_ids, facts)
            known = tuple(end - start for start, end in pairwise(facts["extra"]))
        cu_seqlens = packing.send(cu_seqlens, home)
        sizes = cu_seqlens.shape[0] - 1, max_seqlen, cu_seqlens, max_seqlen
        packed = Packing(*sizes, flat=True, lengths=known)
        flags = None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() == 1 and config.family.global_tokens:
            flags, attention_mask = _packed_globals(attention_mask, total, home), None
        if isinstance(attention_mask, Tensor) and attention_mask.dim() != 4:
            raise ValueError(
                "attention_mask: expected None or a 4-D mask beside cu_seqlens, because packed tokens have "
                f"no padding; got shape {tuple(attention_mask.shape)}"
            )
        _, bias = masks_of(config, attention_mask, packed.batch, max_seqlen, home)
        if position_ids is None:
            position_ids = _packed_positions(config, input_ids, cu_seqlens, total)
        if token_type_ids is None and config.has_segments:
            token_type_ids = torch.zeros_like(position_ids)
        given = input_ids, position_ids, token_type_ids, inputs_embeds, bias, packed
        return cls(*given, last_position=last_position, globals=flags)


def _packed_globals(mask: Tensor, total: int, home: torch.device) -> Tensor:
    """Which packed tokens are global, (total,) bool, by a mask of 1 and 2."""
    check_on("attention_mask", mask, home)
    checks.shape("attention_mask", mask, (total,))
    if not torch.compiler.is_compiling() and bool((mask == 0).any()):
        raise ValueError("attention_mask: expected 1, or 2 for a global token, beside cu_seqlens, got 0")
    return mask == 2


@functools.cache
def _packer(vocab_size: int, types: int, pad: int) -> Any:
    return extension.HostBatch(vocab_size, types, pad, Tensor)


def packer_of(config: EncoderConfig) -> Any | None:
    """What checks and packs batches in CPU memory (csrc/cpu/host_batch.h); None if the config needs more."""
    family = config.family
    if extension is None or family.relative_bias is not None:
        return None
    types = config.type_vocab_size if family.segments else 0
    return _packer(config.vocab_size, types, config.first_position - 1)


def to_host(
    ids: Tensor, mask: Tensor | None, types: Tensor | None
) -> tuple[Tensor, Tensor | int | None, Tensor | int | None]:
    """Copies on the host of tensors on a device, after one wait if the tensors can be stacked.

    Returns:
        (ids, mask, types); or, if they were stacked, (the stack, which begins with the ids, the mask's index
        in it, the types' index in it). A missing tensor is None. The extension refuses a stack of integers
        and floats.
    """
    given = [t for t in (ids, mask, types) if t is not None]
    if len(given) == 1:
        return ids.cpu(), None, None
    try:
        whole = torch.stack(given).cpu()
    except RuntimeError:  # shapes or devices differ, which the extension refuses
        return ids.cpu(), None if mask is None else mask.cpu(), None if types is None else types.cpu()
    return whole, None if mask is None else 1, None if types is None else len(given) - 1


def packed_on_host(
    config: EncoderConfig,
    device: torch.device,
    ids: Tensor | None,
    mask: Tensor | None,
    types: Tensor | None,
) -> Inputs | None:
    """The same as `check_inputs` for a usual batch, on `device`: packed by the extension, sent in one piece.

    If the ids are on a device, the host waits for it once, as in `check_inputs`. None if `check_inputs` must
    pack the batch, or raise its errors.
    """
    has_segments = config.has_segments
    if not has_segments and config.family.segments:
        types = None
    given = [t for t in (ids, mask, types) if t is not None]
    if torch.compiler.is_compiling() or ids is None or {*map(type, given)} != {Tensor}:
        return None
    packer = packer_of(config)
    if (
        packer is None
        or device.type == "meta"
        or ids.dtype != torch.int64
        or ids.dim() != 2
        or (ids.shape[1] > config.max_tokens and config.has_positions)
        or any(map(_is_zero, given))
        or any(map(_is_neg, given))
        or torch._C._are_functorch_transforms_active()
    ):
        return None
    (batch, seqlen), host = ids.shape, (ids, mask, types)
    if not checks.has_values(ids):
        # A mask of floats cannot be stacked
        if ids.numel() > _FEW or any(t.device != device or t.dtype not in _STACKED for t in given):
            return None
        host = to_host(ids, mask, types)
    shape = packer.measure(*host)
    if shape is None or shape[2] == 0:
        return None
    total, whole = shape[2], shape[2] == batch * seqlen
    # Even numbers of int64, so that each part is aligned as a tensor of its own
    tokens, words = total + total % 2, (batch + 5) // 4 * 2
    sizes = [tokens, tokens, tokens, words] + [tokens] * (not whole)
    memory = host[0].new_empty(sum(sizes), pin_memory=device.type == "cuda")
    if not packer.pack(*host, memory.data_ptr(), tokens, 2 * words - 2, True, not whole):
        return None
    parts = [*memory.to(device, non_blocking=True).split_with_sizes(sizes)]
    cu_seqlens = parts.pop(3).view(torch.int32)[: batch + 1]
    if tokens > total:
        parts = [part[:total] for part in parts]
    input_ids, position_ids, segments, *indices = parts
    if whole or mask is None:
        packed, holes = Packing(batch, seqlen, cu_seqlens, seqlen), False
    else:
        ends = memory[3 * tokens : 3 * tokens + words].view(torch.int32)[: batch + 1].tolist()
        lengths = tuple(map(operator.sub, ends[1:], ends))
        keep = packing.send(mask if mask.dtype == torch.bool else mask != 0, device)
        packed = Packing(batch, seqlen, cu_seqlens, max(lengths), indices[0], keep, lengths=lengths)
        # Not the positions, which may skip a hole of padding
        holes = config.family.counts_columns and has_holes(memory[3 * tokens + words :], ends)
    own = segments if has_segments else None
    return Inputs(input_ids, position_ids, own, None, None, packed, holes=holes)


def has_holes(columns: Tensor, ends: list[int]) -> bool:
    """Whether the kept tokens of a sequence are not adjacent.

    Args:
        columns: (total,) int64 in CPU memory, the padded column of each kept token, total > 0; or its flat
            position in the padded batch.
        ends: `cu_seqlens`.
    """
    spans = torch.tensor([(start, end - 1) for start, end in pairwise(ends) if end > start])
    return bool((columns[spans].diff() != spans.diff()).any())


def packed_inputs(config: EncoderConfig, device: torch.device, *given: Tensor | None) -> Inputs:
    """`check_inputs` of the same arguments, on `device`; by `packed_on_host` if that supports the batch."""
    *usual, position_ids, inputs_embeds = given
    found = None
    if position_ids is None and inputs_embeds is None:
        found = packed_on_host(config, device, *usual)
    found = check_inputs(config, device, *given).to(device) if found is None else found
    mask = given[1]
    if config.family.global_tokens and mask is not None and mask.dim() == 2 and mask.dtype != torch.bool:
        found = replace(found, globals=found.packing.pack(packing.send(mask == 2, device)))
    return found


def check_inputs(
    config: EncoderConfig,
    device: torch.device,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    inputs_embeds: Tensor | None,
) -> Inputs:
    """Check a padded batch, fill in the defaults and pack it, on the device of its tokens.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    source, tokens, home = tokens_of(config, input_ids, inputs_embeds, device, "batch", "seqlen")
    batch, seqlen = shape = tuple(tokens.shape[:2])
    if seqlen == 0:
        raise ValueError(f"{source}: expected at least one token per sequence, got shape {shape}")
    if position_ids is None:
        check_length(config, seqlen, source)
    if token_type_ids is not None:
        check_ids("token_type_ids", token_type_ids, home)
        checks.shape("token_type_ids", token_type_ids, shape)
        if not config.family.segments:
            raise ValueError(f"token_type_ids: {config.model_type} has no segment embeddings; expected None")
    token_type_ids = token_type_ids if config.has_segments else None
    if position_ids is not None:
        check_ids("position_ids", position_ids, home)
        if tuple(position_ids.shape) not in (shape, (1, seqlen)):
            raise ValueError(
                f"position_ids: expected shape {shape} or (1, {seqlen}), got {tuple(position_ids.shape)}"
            )
        position_ids = position_ids.expand(shape)
    mask, bias = masks_of(config, attention_mask, batch, seqlen, home)
    lengths = first_masked = None
    last_position = _last_position(config, position_ids, {}) if torch.compiler.is_compiling() else None
    holes = mask is not None and torch.compiler.is_compiling()
    if not torch.compiler.is_compiling() and batch:
        ids = {"input_ids": input_ids, "token_type_ids": token_type_ids, "position_ids": position_ids}
        # The host has the lengths: do not wait for the rest
        if mask is not None and mask.device != home:
            ids = {"position_ids": position_ids} if config.family.unlimited else {}
        asked = []
        if mask is not None:
            asked = [mask.sum(1), mask[:, 0].long()]
            if config.family.counts_columns:
                asked.append(packing.runs(mask))
        facts = read_back(ids, torch.cat(asked) if asked else None)
        check_ranges(config, facts)
        last_position = _last_position(config, position_ids, facts)
        extra = facts["extra"]
        lengths, first_kept, in_runs = extra[:batch], extra[batch : 2 * batch], extra[2 * batch :]
        first_masked = next((i for i, kept in enumerate(first_kept) if lengths[i] and not kept), None)
        holes = max(in_runs, default=0) > 1
    packed = (
        packing.dense(batch, seqlen, home)
        if mask is None or batch == 0
        else packing.from_mask(mask, lengths).to(home)
    )
    if position_ids is None:
        position_ids = _default_positions(config, input_ids, batch, seqlen, home)
    if token_type_ids is None and config.has_segments:
        token_type_ids = position_ids.new_zeros(1, 1).expand(shape)
    return Inputs(
        None if input_ids is None else packed.pack(input_ids),
        packed.pack(position_ids),
        None if token_type_ids is None else packed.pack(token_type_ids),
        None if inputs_embeds is None else packed.pack(inputs_embeds),
        bias,
        packed,
        first_masked,
        holes,
        last_position,
    )


def _default_positions(
    config: EncoderConfig, input_ids: Tensor | None, batch: int, seqlen: int, device: torch.device
) -> Tensor:
    """Positions (batch, seqlen), counted from 0; or RoBERTa's, from pad + 1 over ids that are not padding."""
    start = config.first_position
    if config.family.pad_positions and input_ids is not None:
        real = input_ids.ne(start - 1).long()
        return real.cumsum(1) * real + (start - 1)
    return torch.arange(start, start + seqlen, device=device).expand(batch, seqlen)


def _packed_positions(
    config: EncoderConfig, input_ids: Tensor | None, cu_seqlens: Tensor, total: int
) -> Tensor:
    """`_default_positions` of packed tokens, (total,)."""
    places, start = packing.positions_of(cu_seqlens, total)[1], config.first_position
    if not config.family.pad_positions:
        return places
    # A text may have a padding token of its own ("<pad>")
    real = None if input_ids is None else input_ids.ne(start - 1)
    if real is None or (real.is_cpu and not torch.compiler.is_compiling() and bool(real.all())):
        return places + start
    counts = torch.nn.functional.pad(real.cumsum(0), (1, 0))
    first = torch.arange(total, device=real.device) - places
    return (counts[1:] - counts[first]) * real + (start - 1)


def _last_position(
    config: EncoderConfig, position_ids: Tensor | None, facts: dict[str, list[int]]
) -> int | None:
    """See `Inputs`. Where values are not read it is the last position that the model is made for."""
    if position_ids is None or not config.family.unlimited:
        return None
    return facts.get("position_ids", (0, config.max_position_embeddings - 1))[1]
