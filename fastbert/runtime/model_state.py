"""Whether modules and their tensors are unchanged, by one call of the extension.

Python would read a thousand dictionaries instead (csrc/bindings/model_watch.cpp).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fastbert.runtime import prepared
from fastbert.runtime.loader import extension
from fastbert.runtime.places import is_plain


class ModelState(NamedTuple):
    """A state of modules.

    Attributes:
        extension: compares the state. It borrows all objects; `held` and the other attributes own them.
        changes: `prepared.change_count` of the state.
        sources: sources of the derived weights.
        storages: storages of the marked sources.
        held: the other borrowed objects.
    """

    extension: Any
    changes: int
    sources: prepared.Sources
    storages: list[Any]
    held: tuple[Any, ...]

    def untouched(self) -> bool:
        """Whether the modules still have this state."""
        return (
            prepared.change_count() == self.changes
            and self.extension.same()
            and not any(written() for written in self.sources.written)
        )


def hooks_of(modules: Iterable[nn.Module]) -> list[dict[Any, Any]]:
    """The dictionaries of the modules' hooks."""
    return [
        each
        for m in modules
        for each in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    ]


def state_of(
    modules: Sequence[nn.Module],
    tables: Sequence[dict[Any, Any]],
    tensors: Sequence[Tensor],
    derived: Collection[tuple[nn.Module, Hashable, object]],
) -> ModelState | None:
    """The present state; None if one call cannot watch it.

    None means that a module has hooks or is in training mode, that a tensor is of another class than
    PyTorch's own, or that the extension is not built.

    Args:
        modules: all that count.
        tables: dictionaries whose names and objects must stay the same.
        tensors: the modules' tensors, whose places and versions must stay the same.
        derived: (owner, name, value) of what was derived from the tensors.
    """
    changes, sources = prepared.change_count(), prepared.sources_of(derived)
    if extension is None or sources is None or not all(map(is_plain, tensors)):
        return None
    attributes, hooks = list(map(vars, modules)), hooks_of(modules)
    if any(hooks) or any(each.get("training", True) for each in attributes):
        return None
    storages = [t.untyped_storage() for t in sources.marked]
    watch = extension.ModelWatch(
        modules=modules,
        tables=tables,
        empty=hooks,
        attributes=attributes,
        tensors=tensors,
        sources=tensors,
        marked_storages=storages,
    )
    held = modules, tables, hooks, attributes, tensors
    return ModelState(watch, changes, sources, storages, held) if watch.known() else None
