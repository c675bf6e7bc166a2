"""Weights derived from parameters: the one cache.

Parameters stay exactly HuggingFace's. What a kernel wants otherwise (Q, K and V concatenated, packed,
folded, 8-bit) is derived here, built lazily where no gradient is needed, and dropped as soon as a source
changes. A change is noticed by the next call, in three ways.

Key: identity, address and version counter of each source. It sees `load_state_dict`, an optimizer step,
`.to()`, `copy_`, `parameter.data = other`.

Mark: a write through `parameter.data` bypasses the version counter, but not the memory. PyTorch's storages
can be copy-on-write. One that nobody shares loses that state, without a copy, as soon as PyTorch hands out
its memory for writing: to an in-place op on whatever alias, even of one element, to `.numpy()`, to DLPack. So
the state is a mark that says "not written since"; it is set before a value is built. `data_ptr()` and
pickling take the mark away as well, which costs one needless build. Our launchers ask `_native.address`
instead.

Samples, on a CPU: memory may also be written behind PyTorch's back, by a NumPy array that was taken before
the mark was set. So a cache line of each matrix is compared at each call. And some storages cannot have a
mark: mapped files, in which transformers leaves checkpoints that it need not convert, shared memory, NumPy's
memory. There a line of each vector is compared too, and an element of each row: of all rows in a matrix of up
to 256, else of one row in 64, in turn. So a write over a whole tensor is noticed by the next call, one over a
row of a large matrix by one of the next 64, and one over single elements perhaps never. After that, call
`clear(module)` (`model.train()` and `model.eval()` do).

Cost, medians on two cores: a forward of 16 tokens through MiniLM (3.1 to 3.4 ms) takes 14 to 16 us more than
with the key alone, from a mapped file 21. One of 128 tokens through BERT-base (84 ms) takes nothing more that
could be measured, from a mapped file at most 0.7 ms. To read an element of every row at every call instead
takes one core 138 us and 2 ms: each is a cache miss, which prefetching does not hide.

The cache holds modules weakly and lives outside them: it is freed with the module and never copied, pickled
or saved.

A recorded CUDA graph (graphs.py) reads derived weights where they lay when it was recorded: `used` lists
them, `current` says whether they still are right, `overwrite` brings new values to the old place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.runtime.native import address, extension, storage_address

_LINE = 64  # bytes
_WHOLE = 256  # rows of a matrix without a mark that are compared at every call; of more, 1 / _TURNS
_TURNS = 64
_version = attrgetter("_version")


class _Entry(NamedTuple):
    """A derived value, and what tells whether it still is right."""

    value: object
    seal: _Seal


_cache: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Entry]] = weakref.WeakKeyDictionary()
_building: list[_Seal] = []  # of values that threads are building now
_clears = 0
_lock = threading.RLock()  # of all that writes the above; never held while something is built


def _renew_lock() -> None:
    """A thread that held the lock does not exist in a forked process."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Watch(threading.local):
    """Where `used` collects what its thread asks for."""

    entries: list[tuple[nn.Module, Hashable, object]] | None = None


_watch = _Watch()


# --- whether memory was written -----------------------------------------------------------------------------


def _never_marked(tensor: Tensor) -> bool:
    return False


_is_marked = getattr(torch._C, "_is_cow_tensor", _never_marked)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own; DTensors and fake ones have not."""
    return type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided


def _mark(tensor: Tensor) -> bool:
    """Set the mark of a tensor's storage; False where it cannot have one."""
    if not _is_plain(tensor):
        return False
    if not _is_marked(tensor):
        try:
            with torch.inference_mode(False), torch.no_grad():
                torch._lazy_clone(tensor)  # the clone goes at once, the storage's state stays
        except (AttributeError, RuntimeError):
            return False
    return _is_marked(tensor)


def _places(tensors: Iterable[Tensor]) -> list[int]:
    """Where tensors lie: the addresses of their storages, and the offsets in them."""
    return [*map(storage_address, tensors), *map(Tensor.storage_offset, tensors)]


def _store(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return tensor.untyped_storage()._cdata if _is_plain(tensor) else id(tensor)


def _pieces(tensor: Tensor, marked: bool) -> list[tuple[int, int, int, int, int]]:
    """(address, bytes to the next, how many, bytes of each, how many per call) to compare of a tensor."""
    if tensor.device.type != "cpu" or not _is_plain(tensor) or tensor.numel() == 0 or tensor.dim() > 2:
        return []
    if marked and tensor.dim() < 2:
        return []
    matrix, item = tensor.detach() if tensor.dim() == 2 else tensor.detach().reshape(1, -1), tensor.itemsize
    rows, width = matrix.shape
    down, along = (stride * item for stride in matrix.stride())
    line = _LINE // item if along == item else 1
    column = width // 2 // line * line
    line = min(line, width - column)
    at = address(matrix) + column * along
    found = [(at + rows // 2 * down, down, 1, line * item, 1)]
    if not marked and rows > 1:
        found.append((at, down, rows, item, rows if rows <= _WHOLE else rows // _TURNS + 1))
    return found


class _Seal:
    """What tells whether some tensors still are what a value was built from.

    Attributes:
        ids, places, versions: of the tensors.
        marked: for each, whether its storage has a mark.
        by_mark, stores: the storages with a mark, and all of them.
        samples: elements, compared with what they were; None: there are none to compare.
        written: the samples were found to be others.
        broken: someone else found one of the storages written while the value was being built.
    """

    def __init__(self, sources: tuple[Tensor, ...]):
        self.marked = tuple(map(_mark, sources))
        self.whole = all(self.marked)
        self.sources = tuple(map(weakref.ref, sources))
        self.ids, self.places = list(map(id, sources)), _places(sources)
        self.versions = list(map(_version, sources))
        stores = list(map(_store, sources))
        self.stores, self.by_mark = set(stores), set(compress(stores, self.marked))
        pieces = [p for t, marked in zip(sources, self.marked, strict=True) for p in _pieces(t, marked)]
        self.samples = extension.Samples(pieces) if pieces and extension is not None else None
        self.written = self.broken = False

    def holds(self, sources: Iterable[Tensor]) -> bool:
        """Whether `sources` are the tensors that the seal is of, where they were, and were not written.

        Asked for each layer of each call: hence lists that C code walks, the cheapest first.
        """
        return (
            list(map(id, sources)) == self.ids
            and all(map(_is_marked, sources if self.whole else compress(sources, self.marked)))
            and _places(sources) == self.places
            and list(map(_version, sources)) == self.versions
            and not self._differ()
        )

    def _differ(self) -> bool:
        if self.samples is not None and self.samples.differ():
            self.written = True
        return self.written


# --- the cache ----------------------------------------------------------------------------------------------


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
    if is_gathered(owner):
        with torch.no_grad():
            return build()
    entries = _cache.get(owner)
    found = None if entries is None else entries.get(name)
    # Whoever finds a write forgets all that it concerns before setting the marks again. So what is still
    # there after the marks were looked at is right.
    if found is not None and found.seal.holds(sources) and entries.get(name) is found:
        value = found.value
    elif any(map(Tensor.is_inference, sources)):
        with torch.no_grad():
            return build()
    else:
        value = _build(owner, name, found, sources, build)
    if _watch.entries is not None:
        _watch.entries.append((owner, name, value))
    return value


def _build(
    owner: nn.Module,
    name: Hashable,
    old: _Entry | None,
    sources: tuple[Tensor, ...],
    build: Callable[[], object],
) -> object:
    """`build()`, remembered in place of `old`, which no longer holds."""
    with _lock:
        entries = _cache.setdefault(owner, {})
        unmarked = {_store(s) for s in sources if not _is_marked(s)}
        # Not where someone else has found the write already, and is building anew
        written = old.seal.stores if old and old.seal.written and entries.get(name) is old else set()
        _forget(unmarked, written)
        seal = _Seal(sources)
        _building.append(seal)
    try:
        # a tensor made in inference mode could not be used by a later call outside it
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        with _lock:
            if not seal.broken:
                entries[name] = _Entry(value, seal)
    finally:
        with _lock:
            _building.remove(seal)
    return value


def _forget(unmarked: set[int], written: set[int]) -> None:
    """Forget what relies on marks of storages that have none, and what was derived from written ones."""

    def concerns(seal: _Seal) -> bool:
        return not (seal.by_mark.isdisjoint(unmarked) and seal.stores.isdisjoint(written))

    for seal in _building:
        seal.broken |= concerns(seal)
    for entries in list(_cache.values()):
        for name, entry in list(entries.items()):
            if concerns(entry.seal):
                entries.pop(name, None)


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP, either one, manages the module's parameters; torch's own mark for torch.compile."""
    return "_is_fsdp_managed_module" in module.__dict__


def module_of(model: Any) -> nn.Module:
    """The module that a model, or a pipeline that has one, is.

    Raises:
        TypeError: `model` is no module and has none.
    """
    root = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(root, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or a pipeline, got {type(model).__name__}")
    return root


def clear(model: Any) -> None:
    """Forget everything derived from a model's weights; the next call makes it anew.

    To be called after weights were written in a way that no check sees, in eval: single elements through a
    NumPy array or another library that shares the memory. Writes that PyTorch makes are noticed without it,
    through `parameter.data` too, unless the weight lies in a mapped file, shared memory or memory of NumPy's;
    there, writes over a whole tensor are. `model.train()` and `model.eval()` call it.

    Args:
        model: a model of this package, or what `fastbert.accelerate` takes: an nn.Module, or an object whose
            `model` is one.

    Raises:
        TypeError: `model` is no module and has none.
    """
    global _clears
    children = list(module_of(model).modules())
    with _lock:
        _clears += 1
        for child in children:
            _cache.pop(child, None)
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is not None and _is_plain(tensor) and _is_marked(tensor):
                    tensor.data_ptr()  # takes the mark away: who trains has plain storages


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


def current(owner: nn.Module, name: Hashable, value: object) -> bool:
    """Whether `value` is what is remembered under `name`, and its sources' memory was not written since.

    Never waits for a device: the marks are on the host.
    """
    found = _cache.get(owner, {}).get(name)
    if found is None or found.value is not value:
        return False
    sources = [s for source in found.seal.sources if (s := source()) is not None]
    return found.seal.holds(sources)


def overwrite(owner: nn.Module, name: Hashable, value: object) -> bool:
    """Bring the elements of what is now remembered under `name` into `value`, a tensor or a tuple of them
    that was made earlier, and remember `value` instead; False where nothing of its form is remembered.
    """
    found = _cache.get(owner, {}).get(name)
    if found is None or found.value is value:
        return found is not None
    old, new = (v if isinstance(v, tuple) else (v,) for v in (value, found.value))
    if list(map(_shape, old)) != list(map(_shape, new)):
        return False
    with torch.inference_mode(False), torch.no_grad():
        for a, b in zip(old, new, strict=True):
            if isinstance(a, Tensor):
                a.copy_(b)
    with _lock:
        if _cache.get(owner, {}).get(name) is found:
            _cache[owner][name] = found._replace(value=value)
    return True


def _shape(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
