"""What recordings depend on: the modules and tensors of a model, and whether they have changed."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from fastbert.runtime import prepared
from fastbert.runtime.model_state import ModelState, hooks_of, state_of
from fastbert.runtime.places import Places

HOOKED = "a hook watches the model"


class Weights:
    """The modules and tensors that recordings read, and whether they have changed.

    `untouched` runs at every call, while the GPU works. There one call of the extension compares everything
    with `state`. The methods `replaced`, `changed` and `watched` find out what has changed.

    Attributes:
        state: a state for which the recordings are right; None where the extension cannot compare it.
    """

    def __init__(self, model: nn.Module):
        self.modules = list(model.modules())
        self.tables = [t for m in self.modules for t in (m._parameters, m._buffers, m._modules)]
        # Kept alive, so that no other object takes the id of one
        self.values = [value for table in self.tables for value in table.values()]
        self.built = self._built()
        self.tensors = [value for value in self.values if isinstance(value, Tensor)]
        self.hooks = hooks_of(self.modules)
        # Kept, because a recording may read this memory before it is found outdated
        self.memory = [t.detach() for t in self.tensors]
        self.places = Places(self.tensors)
        self.state: ModelState | None = None
        self.accept()

    def _built(self) -> tuple[list[Any], list[Any]]:
        """The modules' types, and the names and ids of what they hold."""
        entries = [(name, id(value)) for table in self.tables for name, value in table.items()]
        return list(map(type, self.modules)), entries

    def accept(self) -> None:
        """Mark the current values as those that the recordings and derived weights use."""
        self.clears = prepared.clear_count()
        self.versions = [t._version for t in self.tensors]

    def replaced(self) -> bool:
        """Whether a module or tensor was replaced, or has another place in memory."""
        return self._built() != self.built or not self.places.same(self.tensors)

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

    def untouched(self) -> bool:
        """Whether nothing has changed since `state` was found right."""
        return self.state is not None and self.state.untouched()

    def candidate(self, derived: Collection[tuple[nn.Module, Hashable, object]]) -> ModelState | None:
        """The present state; None if the extension cannot compare it."""
        changes, old = prepared.change_count(), self.state
        if old is not None and not old.sources.written and old.extension.same():
            # Only the cache of derived weights has changed, perhaps because of another model
            return old._replace(changes=changes)
        return state_of(self.modules, self.tables, self.tensors, derived)
