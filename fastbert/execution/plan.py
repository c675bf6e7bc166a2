"""Which executor runs which layers of a call.

    steps = survey(layers)              what each layer is now: its form and parts, or why it must be called
    hidden = run(steps, hidden, call)   packed tokens through all of them

An executor is a module of this room with three functions:

    serves(x, call) -> None, or one sentence on why it runs no layer of this call
    takes(step, x, call) -> what its `run` needs for the layer, or one sentence on why it does not run it
    run(group, x, call) -> x            consecutive layers, as (step, taken) pairs

`EXECUTORS` has them in order: the first that takes a layer runs it. `eager` takes every layer that `modules`
does not. To add one: a module with the three functions, and its line in `EXECUTORS`. One with mathematics of
its own (`cpu`, `gpu`) refuses forms of a kind that it does not know (`LayerForm.kinds`). `takes` may be asked
twice for a layer, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import NamedTuple

from torch import Tensor, nn

from fastbert.execution import cpu, eager, gpu, modules
from fastbert.execution.call import Call, Step
from fastbert.layers.encoder_layer import PackedLayer
from fastbert.layers.modules import calls_all

EXECUTORS = (modules, gpu, cpu, eager)


def survey(layers: Iterable[nn.Module], own: type = PackedLayer, inside: bool = False) -> list[Step]:
    """What the layers of a call are now.

    Args:
        layers: in execution order.
        inside: whether the layers' own call is under way.
        own: a class whose layers are called on packed tokens: a family's own, with other mathematics.
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
        step.layer.training if step.parts is None else any(step.parts.rates)
        for step in steps
        if step.reason is None
    )


def run(steps: list[Step], x: Tensor, call: Call) -> Tensor:
    """Packed tokens (total, hidden) through the layers; (batch, hidden) with `call.first_only`.

    Hidden states and probabilities that are asked for are appended to the call's lists.
    """
    done = 0
    while done < len(steps):
        serving = [each for each in EXECUTORS if each.serves(x, call) is None]
        executor, taken = _choose(serving, steps[done], x, call)
        group = [(steps[done], taken)]
        for step in steps[done + 1 :]:
            following, taken = _choose(serving, step, x, call)
            if following is not executor:
                break
            group.append((step, taken))
        x = executor.run(group, x, call)
        done += len(group)
    return x


def _choose(serving: list[ModuleType], step: Step, x: Tensor, call: Call) -> tuple[ModuleType, object]:
    """The first executor that takes the layer, and what its `run` needs."""
    for executor in serving:
        taken = executor.takes(step, x, call)
        if not isinstance(taken, str):
            return executor, taken
    raise RuntimeError(f"layer {step.number}: no executor takes it: {taken}")


class Served(NamedTuple):
    """Which executor runs some layers in a row.

    Attributes:
        first, last: numbers of the layers.
        executor: its name.
        refused: of those that come before it, name -> one sentence on why it does not run these.
    """

    first: int
    last: int
    executor: str
    refused: dict[str, str]


def explain(steps: list[Step], x: Tensor, call: Call) -> list[Served]:
    """Which executors would run the layers of a call, and why not the others."""
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
