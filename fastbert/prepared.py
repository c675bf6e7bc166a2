"""Weights derived from parameters: the one cache.

Parameters stay exactly HuggingFace's. What a kernel wants otherwise (Q, K and V concatenated, packed,
folded, 8-bit) is derived here, built lazily where no gradient is needed, and dropped as soon as a source
changes.

A derived tensor is keyed by the identity, storage, version counter, dtype and device of each of its sources,
so `load_state_dict`, an optimizer step, `.to()` and `copy_` all make a new one. Writing through
`parameter.data` bypasses PyTorch's version counter; after that call `clear(module)` (`model.train()` and
`model.eval()` do).
The cache holds modules weakly and lives outside them: it is freed with the module and never copied, pickled
or saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

_cache: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, tuple[tuple, object]]] = (
    weakref.WeakKeyDictionary()
)


def derived(
    owner: nn.Module, name: Hashable, sources: tuple[Tensor, ...], build: Callable[[], object]
) -> object:
    """`build()`, remembered for `owner` under `name` until one of `sources` changes.

    Args:
        owner: the module with whose life the derived weight ends.
        name: what is derived; several may be kept for one owner.
        sources: the parameters `build` reads.
        build: makes the derived value; called under `torch.no_grad()`.

    Returns:
        The value. Not remembered where a source has no version counter (inference tensors).
    """
    if any(s.is_inference() for s in sources):
        with torch.no_grad():
            return build()
    key = tuple((id(s), s.data_ptr(), s._version, s.dtype, s.device) for s in sources)
    entries = _cache.get(owner)
    if entries is None:
        entries = _cache.setdefault(owner, {})
    found = entries.get(name)
    if found is None or found[0] != key:
        # a tensor made in inference mode could not be used by a later call outside it
        with torch.inference_mode(False), torch.no_grad():
            found = (key, build())
        entries[name] = found
    return found[1]


def clear(module: nn.Module) -> None:
    """Forget everything derived from `module`'s and its children's weights."""
    for child in module.modules():
        _cache.pop(child, None)


def held(module: nn.Module) -> list[Hashable]:
    """Names of what is now remembered for `module` and its children."""
    return [name for child in module.modules() for name in _cache.get(child, {})]
