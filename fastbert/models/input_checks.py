"""What each argument of a call must be, and the one read-back of the values that are checked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from fastbert.models.config import EncoderConfig
from fastbert.models.config_values import MAX_SIZE
from fastbert.ops import checks


def tokens_of(
    config: EncoderConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    device: torch.device,
    *sizes: str,
) -> tuple[str, Tensor, torch.device]:
    """Name and tensor of the argument with the tokens, and its device: the model's, or the host.

    `sizes` are names of the dimensions that its shape must have, before the width of embeddings.
    """
    both = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    given = [(name, t) for name, t in both.items() if t is not None]
    if len(given) != 1:
        came = "both" if given else "neither"
        raise ValueError(f"input_ids, inputs_embeds: expected exactly one of the two, got {came}")
    ((name, t),) = given
    (checks.float_tensor if input_ids is None else checks.int_tensor)(name, t)
    if is_batchedtensor(t):
        raise ValueError(
            f"{name}: is mapped by torch.func.vmap, under which the host cannot read lengths; map the "
            "parameters instead, or call the model for each example"
        )
    if not (t.device.type == "cpu" and may_be_on_host(device)):
        check_on(name, t, device)
    width = () if inputs_embeds is None else (config.embedding_width,)
    if t.dim() != len(sizes) + len(width) or t.shape[len(sizes) :] != width:
        expected = ", ".join([*sizes, *map(str, width)]) + "," * (t is input_ids and len(sizes) == 1)
        raise ValueError(f"{name}: expected shape ({expected}), got {tuple(t.shape)}")
    return name, t, t.device


def check_ids(name: str, ids: Tensor, device: torch.device) -> None:
    """Raise TypeError or ValueError unless these are integers on `device`."""
    checks.int_tensor(name, ids)
    check_on(name, ids, device)


def check_on(name: str, t: Tensor, device: torch.device) -> None:
    """Raise ValueError unless the tensor is on `device`."""
    if t.device != device:
        raise ValueError(
            f"{name}: expected a tensor on {device}, where the model or the ids are, got one on {t.device}"
        )


def may_be_on_host(device: torch.device) -> bool:
    """Whether a caller of a model on `device` may also pass CPU tensors."""
    return device.type not in ("cpu", "meta") and not torch.compiler.is_compiling()


def check_lengths(cu_seqlens: object, max_seqlen: object, home: torch.device) -> None:
    """Raise TypeError or ValueError for lengths of packed tokens that have a wrong type, shape or device."""
    whole = isinstance(max_seqlen, (int, torch.SymInt)) and not isinstance(max_seqlen, bool)
    if max_seqlen is not None and not whole:
        raise TypeError(f"max_seqlen: expected an integer or None, got {max_seqlen!r}")
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        came = (
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
            if isinstance(cu_seqlens, Tensor)
            else type(cu_seqlens).__name__
        )
        raise TypeError(
            f"cu_seqlens: expected a one-dimensional int32 tensor of batch + 1 entries, got {came}"
        )
    if not (cu_seqlens.device.type == "cpu" and may_be_on_host(home)):
        check_on("cu_seqlens", cu_seqlens, home)
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens: expected batch + 1 entries, got none")


def masks_of(
    config: EncoderConfig, mask: Tensor | None, batch: int, seqlen: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """(2-D keep mask or None, 4-D additive bias or None)."""
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype.is_complex:
        raise TypeError(f"attention_mask: expected bool, an integer or a float dtype, got {mask.dtype}")
    if not (mask.dim() == 2 and mask.device.type == "cpu" and may_be_on_host(device)):
        check_on("attention_mask", mask, device)
    if mask.dim() == 2:
        checks.shape("attention_mask", mask, (batch, seqlen))
        return mask if mask.dtype == torch.bool else mask != 0, None
    heads = config.num_attention_heads
    if mask.dim() == 4 and (mask.dtype == torch.bool or mask.is_floating_point()):
        if config.fixed_heads is not None:
            raise ValueError(
                "attention_mask: expected 2-D, got 4-D; heads with fixed patterns (config fixed_heads) "
                "attend by position, also to what the mask hides"
            )
        b, h, *rest = mask.shape
        if b not in (1, batch) or h not in (1, heads) or rest not in ([seqlen, seqlen], [1, seqlen]):
            raise ValueError(
                f"attention_mask: expected shape ({batch} or 1, {heads} or 1, {seqlen} or 1, {seqlen}), "
                f"got {tuple(mask.shape)}"
            )
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=device).masked_fill(mask.logical_not(), float("-inf"))
        return None, mask
    raise ValueError(
        "attention_mask: expected 2-D of any real dtype, or 4-D bool or float, "
        f"got {mask.dim()}-D {mask.dtype}"
    )


def head_gates(config: EncoderConfig, head_mask: Tensor, device: torch.device) -> Tensor:
    """Factors (layers, nheads) from a head mask of shape (nheads,) or (layers, nheads).

    Raises:
        TypeError, ValueError: for another dtype or shape.
    """
    if not isinstance(head_mask, Tensor):
        raise TypeError(f"head_mask: expected a torch.Tensor, got {type(head_mask).__name__}")
    nheads = config.num_attention_heads
    layers = config.num_hidden_layers * (config.get("inner_group_num") or 1)
    if tuple(head_mask.shape) not in ((nheads,), (layers, nheads)):
        raise ValueError(
            f"head_mask: expected shape ({nheads},) or ({layers}, {nheads}), got {tuple(head_mask.shape)}"
        )
    if head_mask.dtype.is_complex:
        raise TypeError(f"head_mask: expected a real tensor, got {head_mask.dtype}")
    check_on("head_mask", head_mask, device)
    gates = head_mask if head_mask.is_floating_point() else head_mask.float()
    return gates.expand(layers, nheads)


def check_length(config: EncoderConfig, longest: int, name: str) -> None:
    """Raise ValueError for a sequence that is longer than the table of positions."""
    if config.has_positions and longest > config.max_tokens:
        raise ValueError(
            f"{name}: a sequence of {longest} tokens is longer than the {config.max_tokens} that "
            f"max_position_embeddings = {config.max_position_embeddings} allows"
        )


def read_back(tensors: dict[str, Tensor | None], extra: Tensor | None) -> dict[str, list[int]]:
    """(smallest, largest) of each tensor, and the 1-D `extra`, in one transfer to the host."""
    given = {name: t for name, t in tensors.items() if t is not None and t.numel()}
    parts = [torch.stack(torch.aminmax(t)).long() for t in given.values()]
    if extra is not None:
        parts.append(extra.long())
    values = torch.cat(parts).tolist() if parts else []
    facts = {name: values[2 * i : 2 * i + 2] for i, name in enumerate(given)}
    facts.setdefault("lengths", [0, 0])
    facts["extra"] = values[2 * len(given) :]
    return facts


def check_ranges(config: EncoderConfig, facts: dict[str, list[int]]) -> None:
    """Raise ValueError for a value outside its table; `facts` is what `read_back` returns."""
    tables = (
        ("input_ids", "token id", config.vocab_size, "vocab_size"),
        ("token_type_ids", "token type", config.type_vocab_size, "type_vocab_size"),
        ("position_ids", "position", config.max_position_embeddings, "max_position_embeddings"),
    )
    limits = {"token_type_ids": config.has_segments, "position_ids": config.has_positions}
    for name, what, size, key in tables:
        low, high = facts.get(name, (0, 0))
        if not limits.get(name, True):
            # No table limits these numbers
            size = MAX_SIZE
        if low < 0 or high >= size:
            raise ValueError(
                f"{name}: {what} {low if low < 0 else high} is outside [0, {size}), the range {key} allows"
            )
