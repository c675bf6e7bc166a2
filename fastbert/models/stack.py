"""The module around an encoder's layers, for what watches or replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fastbert.execution.modules import first_of
from fastbert.layers.packing import Packing
from fastbert.models.outputs import BaseModelOutputWithPooling


class Stack(nn.Module):
    """The module around the layers, whose code is `run_encoder`; called only if it is watched.

    Args:
        by_name: whether its input is passed by name.
    """

    def __init__(self, by_name: bool):
        super().__init__()
        self.by_name = by_name

    def forward(self, hidden_states: Tensor, *, run: Callable[[Tensor], Tensor] | None = None) -> Any:
        """The output of the last layer as `last_hidden_state`, (batch, seqlen, hidden) like the input.

        Raises:
            TypeError: called by anything but its model.
        """
        if run is None:
            raise TypeError(
                "run: missing; only its model calls this module; call the model with inputs_embeds"
            )
        return BaseModelOutputWithPooling(last_hidden_state=run(hidden_states))

    def around(
        self, run: Callable[[Tensor], tuple[Any, ...]], hidden: Tensor, packed: Packing
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """`run(hidden)` as a call of this module on the padded batch."""
        found: list[tuple[Any, ...]] = []

        def run_padded(x: Tensor) -> Tensor:
            found.append(run(packed.from_grid(x)))
            return packed.grid(found[-1][0])[0]

        x = packed.grid(hidden)[0]
        y = self(hidden_states=x, run=run_padded) if self.by_name else self(x, run=run_padded)
        hidden = packed.from_grid(first_of(y))
        # A replaced forward may not have called ours
        _, states, attentions = found[-1] if found else (None, [], [])
        if states:
            states[-1] = hidden
        return hidden, states, attentions
