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

A recorded CUDA graph (graphs.py) reads derived weights where they lay when it was recorded: `used` lists
them, `overwrite` brings new values to the old place.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, nn

_cache: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, tuple[tuple, object]]] = (
    weakref.WeakKeyDictionary()
)
_clears = 0


class _Watch(threading.local):
    """Where `used` collects what its thread asks for."""

    entries: list[tuple[nn.Module, Hashable, object]] | None = None


_watch = _Watch()


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
        The value. Not remembered where a source has no version counter (inference tensors), nor where FSDP
        gathers the owner's parameters before a call: it writes them past their version counters.
    """
    if is_gathered(owner) or any(s.is_inference() for s in sources):
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
    if _watch.entries is not None:
        _watch.entries.append((owner, name, found[1]))
    return found[1]


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP, either one, manages the module's parameters; torch's own mark for torch.compile."""
    return "_is_fsdp_managed_module" in module.__dict__


def clear(module: nn.Module) -> None:
    """Forget everything derived from `module`'s and its children's weights."""
    global _clears
    _clears += 1
    for child in module.modules():
        _cache.pop(child, None)


def held(module: nn.Module) -> list[Hashable]:
    """Names of what is now remembered for `module` and its children."""
    return [name for child in module.modules() for name in _cache.get(child, {})]


def clears() -> int:
    """How often `clear` was called, for whichever module: while it stands, so do all derived weights whose
    sources have not changed."""
    return _clears


@contextlib.contextmanager
def used() -> Iterator[list[tuple[nn.Module, Hashable, object]]]:
    """A list that fills with (owner, name, value) of the derived weights that this thread asks for."""
    before, _watch.entries = _watch.entries, []
    try:
        yield _watch.entries
    finally:
        mine, _watch.entries = _watch.entries, before
        if before is not None:
            before += mine


def overwrite(owner: nn.Module, name: Hashable, value: object) -> bool:
    """Bring the elements of what is now remembered under `name` into `value`, a tensor or a tuple of them
    that was made earlier, and remember `value` instead; False where nothing of its form is remembered.
    """
    key, newer = _cache.get(owner, {}).get(name, (None, None))
    if newer is value:
        return key is not None
    old, new = (v if isinstance(v, tuple) else (v,) for v in (value, newer))
    if list(map(_form, old)) != list(map(_form, new)):
        return False
    with torch.inference_mode(False), torch.no_grad():
        for a, b in zip(old, new, strict=True):
            if isinstance(a, Tensor):
                a.copy_(b)
    _cache[owner][name] = (key, value)
    return True


def _form(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
