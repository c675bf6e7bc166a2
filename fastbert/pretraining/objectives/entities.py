"""Masked-language modelling in stages: words, then phrases, then entities. ERNIE 1.0's.

A stage is masked-language modelling whose masks take one kind of unit as a whole (`masking.py`); the loss is
that of masked-language modelling. A stage starts with the weights of the previous stage. Stages are counted
in epochs, so that an example still depends on its epoch and number alone. For stages of other lengths make a
run per stage.

The unit of the first stage is a word; each Chinese character is a word. Phrases and entities come from the
corpus's spans.

Source: Sun et al. 2019, "ERNIE: Enhanced Representation through Knowledge Integration", sec. 3.2.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fastbert.pretraining.formats import Plan
from fastbert.pretraining.masking import Masking
from fastbert.pretraining.objectives.masked import MaskedExample, Objective


@dataclass(frozen=True)
class Staged(Objective):
    """Examples of masked-language modelling in stages; see the module.

    Attributes:
        masking: the rule of all stages; its unit must be the default, since each stage sets its own.
        static: as in `Objective`. The stage depends on the epoch itself, not on the epoch modulo n.
        stages: (unit of `Masking`, first epoch) of each stage, in order; the first stage has first epoch 0.

    Raises:
        ValueError: naming the attribute.
    """

    stages: tuple[tuple[str, int], ...] = (("word", 0), ("phrase", 1), ("entity", 2))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "stages", _checked(self.stages))
        if self.masking.unit != Masking.unit:
            raise ValueError(
                f"masking: stages set the unit; expected the default unit, got {self.masking.unit!r}"
            )
        for unit, _ in self.stages:
            replace(self.masking, unit=unit)  # a stage's error is raised now, not when the stage begins

    @cached_property
    def _objectives(self) -> tuple[Objective, ...]:
        rules = [replace(self.masking, unit=unit) for unit, _ in self.stages]
        return tuple(Objective(self.format, rule, self.seed, self.static) for rule in rules)

    def stage(self, epoch: int) -> Objective:
        """The objective of an epoch's stage."""
        return [
            objective
            for objective, (_, first) in zip(self._objectives, self.stages, strict=True)
            if first <= epoch
        ][-1]

    def example(self, plan: Plan, epoch: int, index: int) -> MaskedExample:
        """One sequence with the masks of its epoch's stage."""
        return self.stage(epoch).example(plan, epoch, index)


def _checked(stages: Any) -> tuple[tuple[str, int], ...]:
    """Stages as pairs; ValueError if they are no pairs or out of order."""
    try:
        found = tuple((unit, first) for unit, first in stages)
    except (TypeError, ValueError):
        found = ()
    firsts = [first for _, first in found]
    if (
        not found
        or not all(isinstance(unit, str) and type(first) is int for unit, first in found)
        or firsts[0] != 0
        or any(a >= b for a, b in itertools.pairwise(firsts))
    ):
        raise ValueError(
            "stages: expected pairs of a unit and its first epoch, from epoch 0 on in ascending order, "
            f"got {stages!r}"
        )
    return found
