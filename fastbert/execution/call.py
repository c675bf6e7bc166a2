"""The input of executors: the layers of a call, what is asked of them, and memory that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastbert.layers.asked import Asked
from fastbert.layers.batch import PackedBatch
from fastbert.layers.elimination import Eliminated, Kept, kept_of, smaller
from fastbert.layers.form import SITES, LayerForm, Parts
from fastbert.layers.packing import Packing
from fastbert.layers.taps import Taps


class Step(NamedTuple):
    """One layer of a call; a layer that runs twice has two steps.

    Attributes:
        number: the layer's number, from 0 in execution order.
        layer: the module, a `PackedLayer` if it has a form.
        form, parts: what it computes, and with what. A layer without a form has other mathematics, and is
            called on packed tokens as `EncoderLayer.forward` is.
        reason: why the layer must be called on a padded batch, and so has no parts; or None.
        called: whether packed tokens must pass through the module's own call, which something looks at.
    """

    number: int
    layer: Any
    form: LayerForm | None
    parts: Parts | None
    reason: str | None
    called: bool


class Padded(NamedTuple):
    """How to make the padded batch, for layers that are called on it, and its attention mask.

    `grid` has the tables of layers that rotate or score distances, the global tokens, and for layers that
    rotate the positions of all tokens, padding included. For layers that attend by blocks its `columns` has
    the place of each token among the kept tokens of its sequence.
    """

    packing: Packing
    mask: Tensor | None
    grid: PackedBatch | None = None


@dataclass
class Call:
    """One call of an encoder's layers.

    Attributes:
        batch: the packed batch; after a layer that keeps fewer tokens, theirs.
        last: the number of the last layer.
        gates: (layers, nheads) factors of the heads' outputs, or None.
        wants_states, wants_attentions: whether to fill `states` and `attentions`.
        first_only: whether the last layer computes the first token of each sequence alone.
        recompute_every: recompute every n-th layer in backward; 0 recomputes none.
        taps: sees what the layers compute inside, or None.
        padded: the padded batch, where a layer needs it.
        after_first: applied to the output of the first layer; None for nothing.
        kept: how many tokens each layer keeps, None where it keeps all; () if all layers keep all.
        eliminated: the tokens that have left.
        half: see `Asked`; the executor `eager` sets it.
        inference: whether no gradients are recorded and no code is compiled.
        states, attentions: output of each layer, and its probabilities, as far as they are wanted.
        arrivals: the counters of `ops.linear_norm`, once a layer has needed them.
        scratch: memory of a backend for panels and results, which all layers of the call reuse.
        blocks: see `blocks.py`; found once per call.
    """

    batch: PackedBatch
    last: int
    gates: Tensor | None = None
    wants_states: bool = False
    wants_attentions: bool = False
    first_only: bool = False
    recompute_every: int = 0
    taps: Taps | None = None
    padded: Padded | None = None
    after_first: Callable[[Tensor], Tensor] | None = None
    kept: tuple[Kept | None, ...] = ()
    eliminated: Eliminated | None = None
    half: bool = False
    inference: bool = field(init=False)
    states: list[Tensor] = field(default_factory=list)
    attentions: list[Tensor] = field(default_factory=list)
    arrivals: list[Tensor] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)
    blocks: dict[bool, list[tuple[int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inference = not (torch.is_grad_enabled() or torch.compiler.is_compiling())

    def asked(self, step: Step) -> Asked:
        """What is asked of one layer."""
        gate = None if self.gates is None else self.gates[step.number]
        if gate is not None and step.form is not None:
            gate = step.form.of_own_heads(gate, 0)
        only = self.first_only and step.number == self.last
        kept = self.kept[step.number] if self.kept and not only else None
        site = 1 + step.number * SITES
        asked = gate, site, only, self.wants_attentions, self.taps, self.arrivals, kept
        return Asked(*asked, half=self.half)

    def eliminate(self, schedule: Sequence[float], lengths: Sequence[int], device: torch.device) -> None:
        """Let layers keep fewer tokens; arguments as of `fastbert.layers.elimination.kept_of`."""
        kept = kept_of(schedule, lengths, device)
        self.kept = kept if any(kept[: len(kept) - self.first_only]) else ()
        # Tokens that have left are not restored where first tokens alone are asked for
        self.eliminated = None if self.first_only else Eliminated()

    def restored(self, x: Tensor) -> Tensor:
        """The states of all tokens, also of those that have left."""
        return x if self.eliminated is None else self.eliminated.restored(x)

    def shrink(self, x: Tensor, kept: Kept, rows: Tensor) -> None:
        """Continue with the rows of `x` that a layer has kept of its input."""
        if self.eliminated is not None:
            self.eliminated.steps.append((x, rows))
        self.batch = smaller(self.batch, kept, rows)

    def keep(self, x: Tensor, probabilities: Tensor | None = None) -> Tensor:
        """Keep a layer's results, as far as they are wanted; returns its output, which may change here."""
        if self.after_first is not None:
            x, self.after_first = self.after_first(x), None
        if self.wants_states:
            self.states.append(self.restored(x))
        if self.wants_attentions and probabilities is not None:
            self.attentions.append(probabilities)
        return x
