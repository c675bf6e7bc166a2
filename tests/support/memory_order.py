"""What happens before what among the programs of one launch in Triton's interpreter, for its sanitizer.

A program passes through moments: one begins at a barrier, at each atomic operation and after it. An atomic
that releases hands on all that came before the program's last barrier, which alone gathers the stores of all
threads, and all that was handed to it. An atomic that acquires receives what others have handed on at its
address. Both need the scope of the whole GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Order:
    """The moments of one launch.

    Attributes:
        programs: the program of each moment.
        before: per moment, the moments of any program that happen before it.
    """

    programs: list[int] = field(default_factory=list)
    before: list[frozenset[int]] = field(default_factory=list)
    _now: dict[int, int] = field(default_factory=dict)
    # the program's own moments that its last barrier gathered
    _gathered: dict[int, frozenset[int]] = field(default_factory=dict)
    _handed_on: dict[int, frozenset[int]] = field(default_factory=dict)

    def now(self, program: int) -> int:
        """The moment in which `program` is."""
        if program not in self._now:
            self._begin(program, frozenset())
        return self._now[program]

    def _begin(self, program: int, before: frozenset[int]) -> None:
        self._now[program] = len(self.programs)
        self.programs.append(program)
        self.before.append(before)

    def barrier(self, program: int) -> None:
        """All threads of the program wait for each other."""
        moment = self.now(program)
        self._gathered[program] = self._gathered.get(program, frozenset()) | {moment}
        self._begin(program, self.before[moment])

    def atomic(self, program: int, addresses: np.ndarray, semantics: str, scope: str) -> int:
        """The moment of an atomic; `semantics` and `scope` are names, such as "ACQUIRE_RELEASE" and "GPU"."""
        received = self.before[self.now(program)]
        at = np.unique(addresses).tolist()
        wide = scope != "CTA"
        if wide and "ACQUIRE" in semantics:
            received = received.union(*(self._handed_on.get(a, frozenset()) for a in at))
        self._begin(program, received)
        moment = self._now[program]
        if wide and "RELEASE" in semantics:
            handed = received | self._gathered.get(program, frozenset()) | {moment}
            for a in at:
                self._handed_on[a] = self._handed_on.get(a, frozenset()) | handed
        self._begin(program, received)
        return moment

    def ordered(self, one: int, other: int) -> bool:
        """Whether one of the two moments happens before the other."""
        same = self.programs[one] == self.programs[other]
        return same or one in self.before[other] or other in self.before[one]
