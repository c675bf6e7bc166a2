"""Which executor runs which layers of a call.

    steps = survey(layers)              what each layer is now: its form and parts, or why it must be called
    hidden = run(steps, hidden, call)   packed tokens through all layers

An executor is a module of this folder with three functions:

    serves(x, call) -> None, or one sentence on why it runs no layer of this call
    takes(step, x, call) -> what its `run` needs for the layer, or one sentence on why it does not run it
    run(group, x, call) -> x            consecutive layers, as (step, taken) pairs

In inference `plan_of` keeps a plan until a module, a parameter or an option changes, if each executor of it
has one more function:

    kept(group) -> what its `run` takes as the group in further calls, or None if it takes none

The first of `EXECUTORS` that takes a layer runs it. `eager` takes every layer that `modules` does not. To add
an executor, write a module with the three functions and its line in `EXECUTORS`. An executor with mathematics
of its own (`cpu`, `gpu`, `launchers`) refuses forms of a kind that it does not know (`LayerForm.kinds`).
`takes` may be called twice for a layer, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastbert.execution import cpu, eager, gpu, launchers, modules
from fastbert.execution.call import Call, Step
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.modules import calls_all
from fastbert.runtime import prepared
from fastbert.runtime.model_state import ModelState, state_of

EXECUTORS = (modules, gpu, launchers, cpu, eager)
# After this many plans in a row that did not last, only each MOST_MADE-th plan is made to be kept.
MOST_MADE = 8
_forward = attrgetter("forward")


def survey(layers: Iterable[nn.Module], own: type = PackedLayer, inside: bool = False) -> list[Step]:
    """What the layers of a call are now.

    Args:
        layers: the layers in execution order.
        own: a family's own class with other mathematics, whose layers are called on packed tokens.
        inside: whether the layers' own call is under way.
    """
    everything, steps = calls_all(), []
    for number, layer in enumerate(layers):
        if isinstance(layer, PackedLayer):
            found = layer.look(everything)
            said = isinstance(found, str)
            parts, reason = (None, found) if said else (found, None)
            steps.append(Step(number, layer, layer.form, parts, reason, layer.is_called() and not inside))
        else:
            reason = None if isinstance(layer, own) else f"it is a {type(layer).__name__}"
            steps.append(Step(number, layer, None, None, reason, True))
    return steps


def drops(steps: list[Step]) -> bool:
    """Whether a layer that runs on packed tokens drops anything."""
    return any(
        any(m.training for m in step.layer.modules()) if step.parts is None else any(step.parts.rates)
        for step in steps
        if step.reason is None
    )


def run(steps: list[Step], x: Tensor, call: Call, groups: list[Any] | None = None) -> Tensor:
    """Packed tokens (total, hidden) through the layers; (batch, hidden) with `call.first_only`.

    Hidden states and probabilities that are asked for are appended to the call's lists, and (executor, group)
    pairs to `groups`.
    """
    done, groups = 0, [] if groups is None else groups
    while done < len(steps):
        serving = [each for each in EXECUTORS if each.serves(x, call) is None]
        executor, taken = _choose(serving, steps[done], x, call)
        group = [(steps[done], taken)]
        for step in steps[done + 1 :]:
            following, taken = _choose(serving, step, x, call)
            if following is not executor:
                break
            group.append((step, taken))
        groups.append((executor, group))
        x = executor.run(group, x, call)
        done += len(group)
    return x


class Plan:
    """The decision on the layers of a model, for one call or, while nothing changes, for several calls.

    Args:
        container: the module that holds the layers, and nothing else.
        layers, own: see `survey`.
        keeps: whether to keep the plan for further calls, if its executors can.
        around: further modules that must not change while a kept plan holds, with all that they contain.

    Attributes:
        steps: see `survey`.
        changed: the first layer that must be called on a padded batch, or None.
        drops: whether a layer on packed tokens drops anything.
        known: what callers found in the modules, which holds as long as the plan.
        kept: what is asked of a call -> (what each executor runs, what was derived for it).
        state: the state of the modules that the decision depends on, if the plan is kept.
        made: how many plans in a row were made because something had changed.
    """

    def __init__(
        self,
        container: nn.Module,
        layers: list[Any],
        own: type,
        keeps: bool,
        around: Sequence[nn.Module] = (),
    ):
        self.layers, self.around = layers, around
        self.known: dict[str, Any] = {}
        self.kept: dict[tuple[Any, ...], tuple[list[Any], list[Any]]] = {}
        self.state: ModelState | None = None
        self.made = 0
        # Without the container, because the plan is freed with it
        whole = (m for each in (container, *around) for m in each.modules())
        self._below = [m for m in whole if m is not container] if keeps else []
        self._kinds = list(set(map(type, self._below)))
        self._forwards = list(map(_forward, self._kinds))
        every = (container, *self._below) if keeps else ()
        self._tables = [t for m in every for t in (m._parameters, m._buffers, m._modules, vars(m))]
        self._tables += [t for m in layers if keeps and isinstance(m, PackedLayer) for t in m.options()]
        own_tensors = (t for m in every for table in (m._parameters, m._buffers) for t in table.values())
        self._tensors = [t for t in own_tensors if t is not None]
        self._before = self._state([]) if keeps else None
        self.steps = survey(layers, own)
        self.changed = next((step for step in self.steps if step.reason is not None), None)
        self.drops = drops(self.steps)

    def _state(self, derived: list[Any]) -> ModelState | None:
        return state_of(self._below, self._tables, self._tensors, derived)

    def holds(self, layers: list[nn.Module], around: Sequence[nn.Module] = ()) -> bool:
        """Whether the plan is kept, and nothing that it depends on has changed."""
        # Where a recorded graph runs the layers in place of the plan, nothing was derived for it
        state = self._before if self.state is None else self.state
        return (
            state is not None
            and self.layers == layers
            and self.around == around
            and calls_all() is None
            and list(map(_forward, self._kinds)) == self._forwards
            and state.untouched()
        )

    def run(self, x: Tensor, call: Call) -> Tensor:
        """See the function `run`."""
        if not call.inference:
            return run(self.steps, x, call)
        serving = [each.serves(x, call) is None for each in EXECUTORS]
        key = x.dtype, cpu.keeps_panels(x), call.batch.has_bias, call.first_only, *serving
        found = self.kept.get(key)
        if found is None:
            return self._run_first(key, x, call)
        groups, derived = found
        prepared.tell_used(derived)
        for executor, group in groups:
            x = executor.run(group, x, call)
        return x

    def _run_first(self, key: tuple[Any, ...], x: Tensor, call: Call) -> Tensor:
        """`run`, and keep what the executors run if all of them can run it again."""
        groups: list[tuple[ModuleType, list[Any]]] = []
        with prepared.collect_used() as derived:
            x = run(self.steps, x, call, groups)
        again = [(e, e.kept(group) if hasattr(e, "kept") else None) for e, group in groups]
        if all(group is not None for _, group in again):
            self.kept[key] = again, derived
            if self._before is not None:
                state = self._state(derived)
                # A change by another thread in the meantime shows in one of the three
                if self._before.extension.same() and all(prepared.is_current(*each) for each in derived):
                    self.state = state
                self._before = None
        return x


def plan_of(
    container: nn.Module,
    layers: list[nn.Module],
    own: type = PackedLayer,
    around: Sequence[nn.Module] = (),
    gap: Callable[[], str | None] = lambda: None,
) -> Plan | None:
    """The kept plan for layers if it is still right, or a new plan.

    Args:
        container, layers, own, around: see `Plan`.
        gap: returns why there is no plan, or None; called before a new plan is made. It depends on nothing
            but the container, `around` and the modules below them.
    """
    keeps = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    found: Plan | None = prepared.beside(container) if keeps else None
    if found is not None and found.holds(layers, around):
        found.made = 0
        return found
    if gap() is not None:
        return None
    if not keeps:
        return Plan(container, layers, own, False)
    # To watch a model takes as long as some calls. It pays only if the plan can be kept and the model rests
    made = 0 if found is None or not found.kept else found.made + 1
    plan = Plan(container, layers, own, 0 < made <= MOST_MADE or made % MOST_MADE == 1, around)
    plan.made = made
    prepared.keep_beside(container, plan)
    return plan


def _choose(serving: list[ModuleType], step: Step, x: Tensor, call: Call) -> tuple[ModuleType, object]:
    """The first executor that takes the layer, and what its `run` needs."""
    for executor in serving:
        taken = executor.takes(step, x, call)
        if not isinstance(taken, str):
            return executor, taken
    raise RuntimeError(f"layer {step.number}: no executor takes it: {taken}")


class Served(NamedTuple):
    """The executor of some consecutive layers.

    Attributes:
        first, last: numbers of the layers.
        executor: its name.
        refused: name of each executor before it -> one sentence on why it does not run these layers.
    """

    first: int
    last: int
    executor: str
    refused: dict[str, str]


def explain(steps: list[Step], x: Tensor, call: Call) -> list[Served]:
    """Which executors would run the layers of a call, and why executors before them would not."""
    found: list[Served] = []
    for step in steps:
        refused: dict[str, str] = {}
        for executor in EXECUTORS:
            reason, name = executor.serves(x, call), executor.__name__.rpartition(".")[2]
            taken = executor.takes(step, x, call) if reason is None else reason
            if not isinstance(taken, str):
                break
            refused[name] = taken
        if step.reason is not None:
            refused = {"eager": step.reason}
        if found and found[-1][2:] == (name, refused):
            found[-1] = found[-1]._replace(last=step.number)
        else:
            found.append(Served(step.number, step.number, name, refused))
    return found
