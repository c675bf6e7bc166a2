"""The mathematics of the papers, as modules that call ops. Imports from `ops` and `runtime` only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastbert.runtime import moved

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """What older pickles look for here."""
        return moved.find(__name__, name)
