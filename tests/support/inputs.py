"""What tests of many ops share: ids of parameters, and inputs that are the same at every call."""

from __future__ import annotations

from itertools import accumulate

import torch


def name(value: object) -> str:
    """The id of a parameter: a dtype without its module, anything else as it prints."""
    return str(value).removeprefix("torch.")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Normal numbers that depend on the shape alone."""
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=g).to(dtype).requires_grad_(grad)


def ends_of(lengths: list[int] | tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """cu_seqlens of these lengths."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
