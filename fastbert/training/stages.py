"""Stages of a run: some steps with one module, one source and one size of batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastbert.runtime import expected
from fastbert.training.module import Losses
from fastbert.training.optimizers import decay_groups, optimizer
from fastbert.training.schedules import Schedule
from fastbert.training.stream import Source, Stream


@dataclass
class Stage:
    """Some steps with one module, one source and one size of batch.

    Attributes:
        steps: number of steps.
        source: where the examples come from.
        build: makes the module that is trained, with its first weights.
        schedule: the learning rate of a step.
        micro_batches: number of micro-batches per step, of all processes together.
        sequences, tokens: size of a micro-batch; see `Stream`.
        first_micro_batch: number, in the stream, of the stage's first micro-batch. A stage that continues the
            previous stage's source starts where that stage stopped.
        first_step: the step of `schedule` at which the stage starts.
        enter: fills the new module from the previous stage's module; None: the previous module is trained
            further.
        moments: with `enter`: (the optimizer's state as {"name/key": value}, old module, new module) -> the
            state to begin with; None: the optimizer starts anew.
        fresh_optimizer: whether the optimizer starts anew without `enter`.
        options: arguments of `optimizers.optimizer`: kind, betas, eps, weight_decay.
        groups: the parameter groups of a module; a group may have an `lr_scale`.
        clip: the largest norm of all gradients together; None: no clipping.
    """

    steps: int
    source: Source
    build: Callable[[], Losses]
    schedule: Schedule
    micro_batches: int = 1
    sequences: int | None = None
    tokens: int | None = None
    first_micro_batch: int = 0
    first_step: int = 0
    enter: Callable[[Losses, Losses], None] | None = None
    moments: Callable[[dict[str, Tensor], Losses, Losses], dict[str, Tensor]] | None = None
    fresh_optimizer: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: {"kind": "adamw"})
    groups: Callable[[nn.Module, float], list[dict[str, Any]]] = decay_groups
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        expected.integers(1, steps=self.steps, micro_batches=self.micro_batches)
        expected.integers(0, first_micro_batch=self.first_micro_batch, first_step=self.first_step)
        Stream(self.source, 0, self.sequences, self.tokens)  # raises now, not when the stage begins
        optimizer(**{"kind": "adamw", **self.options}, groups=[nn.Parameter(torch.zeros(1))])
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip: expected a number > 0, or None, got {self.clip!r}")


def check_order(stages: Sequence[Stage]) -> None:
    """Raise ValueError unless each stage can follow the previous one."""
    if stages[0].enter is not None:
        raise ValueError("enter: expected None in the first stage, which has no previous stage")
    for before, stage in itertools.pairwise(stages):
        fresh = stage.enter is not None or stage.fresh_optimizer
        if not fresh and dict(stage.options) != dict(before.options):
            raise ValueError(
                "options: expected those of the previous stage, whose optimizer is kept, "
                f"{dict(before.options)!r}, got {dict(stage.options)!r}"
            )
