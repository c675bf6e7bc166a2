"""What recordings depend on: the modules and tensors of a model, and whether they have changed."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from operator import attrgetter, is_

from torch import Tensor, nn

from fastbert.runtime import prepared
from fastbert.runtime.model_state import ModelState, state_of
from fastbert.runtime.places import Places

HOOKED = "a hook watches the model"


class Weights:
    """The modules and tensors that recordings read, and whether they have changed.

    `untouched` is asked at every call, while the GPU works: one call of the extension compares everything
    with what it was. If something is not, the other methods tell what.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.tables = [t for m in self.modules for t in (m._parameters, m._buffers, m._modules)]
        self.classes = list(map(type, self.modules))
        self.sizes = list(map(len, self.tables))
        entries = [(table, name, value) for table in self.tables for name, value in table.items()]
        self.homes = [table for table, _, _ in entries]
        self.names = [name for _, name, _ in entries]
        self.values = [value for _, _, value in entries]
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.hooks = [
            hooks
            for m in self.modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        # Recordings read this memory, also a recording that is found outdated only afterwards. So keep it.
        self.memory = [t.detach() for t in self.tensors]
        self.places = Places(self.tensors)
        self._watched: ModelState | None = None
        self.accept()

    def accept(self) -> None:
        """Mark the current values as those that the recordings and derived weights use."""
        self.clears = prepared.clear_count()
        self.versions = [t._version for t in self.tensors]

    def replaced(self) -> bool:
        """Whether a module or tensor was replaced, or has another place in memory."""
        return (
            list(map(type, self.modules)) != self.classes
            or list(map(len, self.tables)) != self.sizes
            or not all(map(is_, map(dict.get, self.homes, self.names), self.values))
            or not self.places.same(self.tensors)
        )

    def changed(self) -> bool:
        """Whether elements may have been written in place."""
        return prepared.clear_count() != self.clears or [t._version for t in self.tensors] != self.versions

    def watched(self) -> str | None:
        """Why the model's own code must run: a hook, or a part in training mode; None if it need not."""
        if any(self.hooks):
            return HOOKED
        if any(map(attrgetter("training"), self.modules)):
            return "a part of the model is in training mode"
        return None

    # --- all of it at once ----------------------------------------------------------------------------------

    def is_followed(self) -> bool:
        """Whether `follow` was told a state."""
        return self._watched is not None

    def untouched(self) -> bool:
        """Whether nothing has changed since the state that `follow` was told."""
        return self._watched is not None and self._watched.untouched()

    def candidate(self, derived: Collection[tuple[nn.Module, Hashable, object]]) -> ModelState | None:
        """The present state, for `follow`; None if one call cannot watch it."""
        changes, old = prepared.change_count(), self._watched
        if old is not None and not old.sources.written and old.extension.same():
            # only the cache of derived weights has changed, perhaps because of another model
            return old._replace(changes=changes)
        return state_of(self.modules, self.tables, self.tensors, derived)

    def follow(self, state: ModelState | None) -> None:
        """Take a state for right.

        Args:
            state: from `candidate`, called before the state was found right, so that no change is missed.
        """
        self._watched = state
