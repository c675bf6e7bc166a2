"""What tests of many ops share: ids of parameters, and inputs that are the same at every call."""

from __future__ import annotations

import torch


def name(value: object) -> str:
    """The id of a parameter: a dtype without its module, anything else as it prints."""
    return str(value).removeprefix("torch.")


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """Normal numbers that depend on the shape alone."""
    g = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(*shape, generator=g).to(dtype).requires_grad_(grad)
