"""The cache of weights that are derived from parameters.

Parameters stay exactly HuggingFace's. What a kernel wants in another form (Q, K and V concatenated, panels,
folded, 8-bit) is derived here. It is built at its first use where no gradient is needed, and dropped as soon
as a source changes. The next call notices a change in one of four ways.

Key: identity, place (address, sizes, strides) and version counter of each source. They change with
`load_state_dict`, an optimizer step, `.to()`, `copy_` and `parameter.data = other`.

Mark: a write through `parameter.data` bypasses the version counter, but not the memory. PyTorch's storages
can be copy-on-write. An unshared storage loses that state, without a copy, as soon as PyTorch hands out its
memory for writing: to an in-place op on any alias, even of one element, to `.numpy()`, to DLPack. So the
state is a mark that means "not written since"; it is set before a value is built. `data_ptr()` and pickling
remove the mark too, which costs one needless build. Our launchers call `loader.address` instead.

Pages, on a CPU: a mapped file (transformers leaves checkpoints there that it need not convert) cannot have a
mark. But Linux copies a page of it at the first write, and counts a page fault. So the pages are looked at
when the process had a fault since the last call (csrc/cpu/mapped_pages.h). Any first write to a page is
noticed, also of one element. Pages that were written before are left to samples.

Samples, on a CPU: memory may also be written without PyTorch, by a NumPy array that was taken before the mark
was set. So one cache line of each matrix is compared at each call. Where there is neither mark nor page
(shared memory, NumPy's memory, pages written before), one line of each vector is compared too, and one
element of each row. So the next call notices a write over a whole tensor or row, and perhaps no call a write
over single elements. After such a write call `clear(module)`. `model.train()` and `model.eval()` do if a
module's mode changes (`before_mode`).

What the checks cost, and what others would cost: docs/notes/torch.md.

The cache refers to modules weakly and lives outside them: an entry is freed with its module, and never
copied, pickled or saved.

A recorded CUDA graph (graphs/model.py) reads derived weights at the addresses of the time of recording.
`collect_used` lists these weights, `is_current` returns whether one is still right, and `update_in_place`
copies new values to the old address.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fastbert.runtime.loader import address, extension
from fastbert.runtime.places import Places, is_plain

_LINE = 64  # bytes of a cache line
_version = attrgetter("_version")


class _Entry(NamedTuple):
    """A derived value, and the seal that shows whether it is still right."""

    value: Any
    seal: _Seal


_cache: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Entry]] = weakref.WeakKeyDictionary()
# see `keep_beside`
_beside: weakref.WeakKeyDictionary[nn.Module, object] = weakref.WeakKeyDictionary()
_building: list[_Seal] = []  # of values that threads are building now
_clears = 0
_changes = 0
# Guards writes to the four above; never held while something is built
_lock = threading.RLock()


def _renew_lock() -> None:
    """A thread that held the lock does not exist in a forked process."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Watch(threading.local):
    """The state of one thread.

    Attributes:
        entries: where `collect_used` collects what the thread asks for.
        pages: the pages in the seal of the value that the thread builds; None if there are none.
    """

    entries: list[tuple[nn.Module, Hashable, object]] | None = None
    pages: Any = None


_watch = _Watch()


# --- whether memory was written -----------------------------------------------------------------------------


def _never_marked(tensor: Tensor) -> bool:
    return False


_is_marked = getattr(torch._C, "_is_cow_tensor", _never_marked)


def _mark(tensor: Tensor) -> bool:
    """Set the mark of a tensor's storage; False if it cannot have one."""
    if not is_plain(tensor):
        return False
    if not _is_marked(tensor):
        try:
            with torch.inference_mode(False), torch.no_grad():
                # the clone is freed at once; the storage's state stays
                tensor._lazy_clone()
        except (AttributeError, RuntimeError):
            return False
    return _is_marked(tensor)


def _storage_id(tensor: Tensor) -> int:
    """What identifies the storage of a tensor."""
    return tensor.untyped_storage()._cdata if is_plain(tensor) else id(tensor)


def _pages_of(tensors: Iterable[Tensor]) -> tuple[Any, dict[int, list[tuple[int, int]]]]:
    """What watches the pages of tensors in mapped files, and which of these pages were written before.

    Returns:
        (pages, written): an `extension.MappedPages`, or None if nothing can be watched; by the id of each
        tensor that it watches, the written parts, as (begin, end) in bytes from the tensor's first element.
    """
    candidates = [
        t for t in tensors if t.device.type == "cpu" and is_plain(t) and t.numel() and t.is_contiguous()
    ]
    if not candidates or extension is None:
        return None, {}
    ranges = [(address(t), t.numel() * t.itemsize) for t in candidates]
    pages = extension.MappedPages(ranges, within=_watch.pages)
    found = {id(t): pages.written(i) for i, t in enumerate(candidates)}
    written = {which: parts for which, parts in found.items() if parts is not None}
    return pages if written else None, written


def _all_samples(
    tensors: tuple[Tensor, ...], marked: tuple[bool, ...], written: dict[Any, Any]
) -> list[tuple[Any, ...]]:
    """What to compare of all tensors, in the form of `_samples_of`; `written` as from `_pages_of`."""
    found = []
    for tensor, mark in zip(tensors, marked, strict=True):
        height = len(tensor) if tensor.dim() > 0 else 1
        if id(tensor) in written:  # contiguous, on a CPU, and not empty
            row = tensor.nbytes // height
            rows = [(begin // row, -(-end // row)) for begin, end in written[id(tensor)]]
        else:
            rows = [(0, height)]
        found += _samples_of(tensor, mark, rows)
    return found


def _samples_of(tensor: Tensor, marked: bool, rows: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
    """What to compare of a tensor: series of pieces of memory.

    Each is (address of the first piece, bytes to the next one, pieces, bytes per piece).

    Args:
        tensor: a tensor on any device and of any shape.
        marked: whether its storage has a mark.
        rows: (first, last + 1) of rows; one element of each is compared if the tensor is a matrix without a
            mark.
    """
    if tensor.device.type != "cpu" or not is_plain(tensor) or tensor.numel() == 0 or tensor.dim() > 2:
        return []
    if marked and tensor.dim() < 2:
        return []
    matrix, item = tensor.detach() if tensor.dim() == 2 else tensor.detach().reshape(1, -1), tensor.itemsize
    height, width = matrix.shape
    down, along = (stride * item for stride in matrix.stride())
    line = _LINE // item if along == item else 1
    column = width // 2 // line * line
    line = min(line, width - column)
    at = address(matrix) + column * along
    found = [(at + height // 2 * down, down, 1, line * item)]
    if not marked and height > 1:
        found += [(at + first * down, down, end - first, item) for first, end in rows]
    return found


class _Seal:
    """Shows whether the tensors that a value was built from have changed.

    Attributes:
        places, versions: the tensors' places and version counters.
        marked: for each tensor, whether its storage has a mark.
        all_marked: whether all storages have a mark.
        marked_storages, storages: ids of the storages with a mark, and of all storages.
        pages: shows whether a page of a mapped file was written; None if there are none.
        samples: compares some elements with what they were; None if there are none to compare.
        written: a page was written, or samples were found to differ.
        broken: another thread found one of the storages written while the value was being built.
    """

    def __init__(self, sources: tuple[Tensor, ...]):
        self.marked = tuple(map(_mark, sources))
        self.all_marked = all(self.marked)
        self.sources = tuple(map(weakref.ref, sources))
        self.places = Places(sources)
        self.versions = list(map(_version, sources))
        storages = list(map(_storage_id, sources))
        self.storages, self.marked_storages = set(storages), set(compress(storages, self.marked))
        unmarked = [t for t, marked in zip(sources, self.marked, strict=True) if not marked]
        self.pages, pages_written = _pages_of(unmarked)
        pieces = _all_samples(sources, self.marked, pages_written)
        self.samples = extension.Samples(pieces) if pieces and extension is not None else None
        self.written = self.broken = False

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Whether `sources` are the seal's tensors, where they were, and were not written.

        This runs for each layer of each call, so C code walks the lists.
        """
        if self.samples is not None:
            self.samples.fetch()
        return (
            self.places.same(sources)
            and all(map(_is_marked, sources if self.all_marked else compress(sources, self.marked)))
            and list(map(_version, sources)) == self.versions
            and not self.written_unmarked()
        )

    def written_unmarked(self) -> bool:
        """Whether pages or samples show that a source was written."""
        if self.pages is not None and self.pages.changed():
            self.written = True
        if self.samples is not None and self.samples.differ(torch.get_num_threads()):
            self.written = True
        return self.written


# --- the cache ----------------------------------------------------------------------------------------------

_Value = TypeVar("_Value")


def derived(
    owner: nn.Module,
    name: Hashable,
    sources: tuple[Tensor, ...],
    build: Callable[[], _Value],
    *,
    keep: bool = True,
) -> _Value:
    """`build()`, remembered for `owner` under `name` until one of `sources` changes.

    Args:
        owner: the module that the derived weight is freed with.
        name: what is derived; one owner may have several.
        sources: the parameters that `build` reads.
        build: makes the derived value; called under `torch.no_grad()`.
        keep: whether to remember a new value. A value that is remembered already is returned either way.

    Returns:
        The value. It is not remembered if a source has no version counter (inference tensors), or if FSDP
        gathers the owner's parameters before a call: FSDP writes them without changing the counters.
    """
    if is_gathered(owner):
        with torch.no_grad():
            return build()
    entries = _cache.get(owner, {})
    found = entries.get(name)
    # A thread that finds a write forgets all entries it concerns before it sets the marks again. So an entry
    # that is still there after its marks were read is right.
    if found is not None and found.seal.holds(sources) and entries.get(name) is found:
        value = found.value
    elif not keep or any(map(Tensor.is_inference, sources)):
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
    build: Callable[[], _Value],
) -> _Value:
    """`build()`, remembered in place of `old`, which is outdated."""
    with _lock:
        entries = _cache.setdefault(owner, {})
        unmarked = {_storage_id(s) for s in sources if not _is_marked(s)}
        # Empty if another thread has already found the write, and is building again
        written = old.seal.storages if old and old.seal.written and entries.get(name) is old else set()
        _forget(unmarked, written)
        seal = _Seal(sources)
        _building.append(seal)
    outer, _watch.pages = _watch.pages, seal.pages
    try:
        # a tensor made in inference mode could not be used by a later call outside it
        with torch.inference_mode(False), torch.no_grad():
            value = build()
        with _lock:
            if not seal.broken:
                _changed()
                entries[name] = _Entry(value, seal)
    finally:
        _watch.pages = outer
        with _lock:
            _building.remove(seal)
    return value


def _changed() -> None:
    """Count a change of the cache; called with the lock."""
    global _changes
    _changes += 1


def _forget(unmarked: set[int], written: set[int]) -> None:
    """Forget entries that rely on the marks of `unmarked` storages, or are derived from `written` ones."""

    def concerns(seal: _Seal) -> bool:
        return not (seal.marked_storages.isdisjoint(unmarked) and seal.storages.isdisjoint(written))

    for seal in _building:
        seal.broken |= concerns(seal)
    for entries in list(_cache.values()):
        for name, entry in list(entries.items()):
            if concerns(entry.seal):
                _changed()
                entries.pop(name, None)


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP (either version) manages the module's parameters: torch's own sign for torch.compile."""
    return "_is_fsdp_managed_module" in module.__dict__


def module_of(model: Any) -> nn.Module:
    """The module of a model: `model` itself, or the attribute `model` of a pipeline.

    Raises:
        TypeError: `model` is no module and has none.
    """
    root = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(root, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module or a pipeline, got {type(model).__name__}")
    return root


def clear(model: Any) -> None:
    """Forget everything derived from a model's weights; the next call derives it again.

    Call it in eval mode after weights were written in a way that no check sees: single elements, through a
    NumPy array or another library that shares the memory. PyTorch's own writes are noticed without it, also
    through `parameter.data`. If the weight lies in shared memory or in NumPy's memory, only writes over a
    whole tensor or row are sure to be noticed; in a mapped file the first write to each page is, too (Linux).
    `model.train()` and `model.eval()` call `clear` if they change the mode of any module.

    Args:
        model: a model of this package, or what `fastbert.accelerate` takes: an nn.Module, or an object whose
            attribute `model` is one.

    Raises:
        TypeError: `model` is no module and has none.
    """
    global _clears
    children = list(module_of(model).modules())
    with _lock:
        _clears += 1
        _changed()
        for child in children:
            _cache.pop(child, None)
            _beside.pop(child, None)
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is not None and is_plain(tensor) and _is_marked(tensor):
                    tensor.data_ptr()  # removes the mark: training gets plain storages


_Train = TypeVar("_Train", bound=Callable[..., Any])
# `train` methods that set the modes of a module and its children, and do nothing where the modes are set
# already.
_plain_trains: set[Callable[..., Any]] = {nn.Module.train}


def plain_train(method: _Train) -> _Train:
    """Decorate a `train` method of ours that belongs to `_plain_trains`."""
    _plain_trains.add(method)
    return method


def before_mode(model: nn.Module, mode: bool) -> bool:
    """Call `clear` if `model.train(mode)` changes a module's mode; return whether `train` has anything to do.

    Servers and sentence-transformers call `eval()` before each call. Then nothing is derived again, and no
    mode is set again, which takes 3 us per module.
    """
    modules = list(model.modules())
    if any(module.training != mode for module in modules):
        clear(model)
        return True
    return any(type(m).train not in _plain_trains or "train" in m.__dict__ for m in modules)


def beside(module: nn.Module) -> Any:
    """The value of `keep_beside`; None after `clear` of the module or of a module around it."""
    return _beside.get(module)


def keep_beside(module: nn.Module, value: object) -> None:
    """Keep a value until `clear`. It is freed with the module, so it must not refer to the module."""
    _beside[module] = value


def remembered(module: nn.Module) -> list[Hashable]:
    """Names of the derived weights now remembered for `module` and its children."""
    return [name for child in module.modules() for name in _cache.get(child, {})]


def clear_count() -> int:
    """How often `clear` was called, for any module.

    While the count is the same, derived weights whose sources have not changed are still remembered.
    """
    return _clears


def change_count() -> int:
    """How often any value was remembered, replaced or forgotten.

    While the count is the same, what was remembered still is; its sources may have changed.
    """
    return _changes


@contextlib.contextmanager
def collect_used() -> Iterator[list[tuple[nn.Module, Hashable, object]]]:
    """Collect (owner, name, value) of each derived weight that this thread asks for within the block."""
    before, _watch.entries = _watch.entries, []
    try:
        yield _watch.entries
    finally:
        mine, _watch.entries = _watch.entries, before
        if before is not None:
            before += mine


def tell_used(values: Iterable[tuple[nn.Module, Hashable, object]]) -> None:
    """Report to `collect_used` (owner, name, value)s that are used without being asked for again."""
    if _watch.entries is not None:
        _watch.entries += values


def is_current(owner: nn.Module, name: Hashable, value: object) -> bool:
    """Whether `value` is remembered under `name`, and the memory of its sources was not written since.

    Never waits for a device: the marks are on the host.
    """
    found = _cache.get(owner, {}).get(name)
    if found is None or found.value is not value:
        return False
    sources = [s for source in found.seal.sources if (s := source()) is not None]
    return found.seal.holds(sources)


class Sources(NamedTuple):
    """What values are derived from, and how to see that it was written.

    Attributes:
        tensors: the sources.
        marked: those whose storages have a mark, which the next write removes.
        written: functions that return whether a source was written where no mark shows it; on a CPU alone.
    """

    tensors: list[Tensor]
    marked: list[Tensor]
    written: list[Callable[[], bool]]


def sources_of(values: Iterable[tuple[nn.Module, Hashable, object]]) -> Sources | None:
    """The sources of (owner, name, value)s that are remembered; None if one is not, or has lost a source."""
    found = Sources([], [], [])
    for owner, name, value in values:
        entry = _cache.get(owner, {}).get(name)
        if entry is None or entry.value is not value:
            return None
        seal, tensors = entry.seal, [t for source in entry.seal.sources if (t := source()) is not None]
        if len(tensors) < len(seal.sources):
            return None
        found.tensors.extend(tensors)
        found.marked.extend(compress(tensors, seal.marked))
        if seal.pages is not None or seal.samples is not None:
            found.written.append(seal.written_unmarked)
    return found


def update_in_place(owner: nn.Module, name: Hashable, value: object) -> bool:
    """Copy what is now remembered under `name` into `value`, and remember `value` in its place.

    Args:
        owner, name: as in `derived`.
        value: what was remembered before: a tensor, a tuple that may hold tensors and such tuples, or an
            object with such a tuple as its attribute `tensors`.

    Returns:
        False if nothing, or something of other shapes, dtypes or devices, is remembered under `name`.
    """
    found = _cache.get(owner, {}).get(name)
    if found is None or found.value is value:
        return found is not None
    old, new = map(_tensors_of, (value, found.value))
    if list(map(_shape, old)) != list(map(_shape, new)):
        return False
    with torch.inference_mode(False), torch.no_grad():
        for a, b in zip(old, new, strict=True):
            if isinstance(a, Tensor) and a is not b:
                a.copy_(b)
    with _lock:
        if _cache.get(owner, {}).get(name) is found:
            _changed()
            _cache[owner][name] = found._replace(value=value)
    return True


def _tensors_of(value: object) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return tuple(leaf for each in value for leaf in _tensors_of(each))
    return getattr(value, "tensors", (value,))


def _shape(value: object) -> object:
    return (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value
