"""Whether tensors are the same, at the same place: identity, address, sizes and strides.

`parameter.data = other` changes these and no version counter. The question comes at every call for all
weights, so one call of the extension compares what Python would read tensor by tensor
(csrc/cpu/tensor_places.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.runtime.loader import extension, storage_address

# The address of a tensor's TensorImpl
_impl = attrgetter("_cdata")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own; DTensors and fake tensors have none."""
    return type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided


def _read(tensors: Sequence[Tensor]) -> list[Any]:
    """The addresses of the tensors' storages, then the offsets in them, sizes and strides."""
    offsets, sizes = map(Tensor.storage_offset, tensors), map(Tensor.size, tensors)
    return [*map(storage_address, tensors), *offsets, *sizes, *map(Tensor.stride, tensors)]


def _watch(tensors: Sequence[Tensor], impls: list[int]) -> Any:
    """An `extension.TensorPlaces`, or None if it cannot tell where these tensors are."""
    if extension is None or not all(map(is_plain, tensors)):
        return None
    places = extension.TensorPlaces(impls)
    return places if places.known() else None


class Places:
    """Remembers where tensors are.

    Args:
        tensors: tensors on any device. They are not kept alive.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._impls = list(map(_impl, tensors))
        self._watched = _watch(tensors, self._impls)
        self._places = _read(tensors) if self._watched is None else None

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors` are the remembered tensors, at the remembered places."""
        if list(map(_impl, tensors)) != self._impls:
            return False
        return _read(tensors) == self._places if self._watched is None else self._watched.same()
