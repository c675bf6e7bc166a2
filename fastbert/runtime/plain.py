"""Tensors whose values are in memory, where kernels read them."""

from __future__ import annotations

from typing import Any

import torch

# The base class of torch.Tensor: torch.Tensor's own isinstance takes ten times as long.
_TensorBase = torch._C.TensorBase
_is_neg, _is_zero = _TensorBase.is_neg, _TensorBase._is_zerotensor
# Types of most arguments that are no tensors. They are looked up first, because `isinstance` of a tensor's
# class is slow.
_NUMBERS = frozenset((bool, float, int, str, type(None)))


def plain(t: torch.Tensor) -> torch.Tensor:
    """`t` with its values in memory, where kernels read them.

    A negative bit (`x.conj().imag`) is resolved, and a tensor that is zero without memory
    (`torch._efficientzerotensor`) becomes a tensor of zeros.
    """
    if t.is_neg():
        return t.resolve_neg()
    return t.clone() if t._is_zerotensor() else t


def any_not_plain(args: tuple[Any, ...]) -> bool:
    """Whether `plain` would change one of the tensors among `args`, or in their NamedTuples.

    NamedTuples hold no tuples. This runs at every call: a recursion, or a list of the tensors, takes longer.
    """
    for a in args:
        if type(a) in _NUMBERS:
            continue
        if isinstance(a, tuple):
            for b in a:
                if type(b) not in _NUMBERS and isinstance(b, _TensorBase) and (_is_neg(b) or _is_zero(b)):
                    return True
        elif isinstance(a, _TensorBase) and (_is_neg(a) or _is_zero(a)):
            return True
    return False


def plain_argument(a: Any) -> Any:
    """`plain` of a tensor, and of the tensors of a NamedTuple."""
    if isinstance(a, torch.Tensor):
        return plain(a)
    return type(a)(*map(plain_argument, a)) if isinstance(a, tuple) else a
