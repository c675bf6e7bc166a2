"""Schedules of tokens that are worth their cost, by evolution towards the best score at each cost.

    start       shares that fall by the same factor from layer to layer
    mutation    of a schedule: each layer's share with probability 1/2 anew, between the layer after and
                the layer before
    crossover   of two schedules: the mean of their shares
    frontier    the schedules than which none is cheaper with as good a score; a round begins with these

The cost is `fastbert.compression.size.flops_of`, as a share of the same model's with all tokens. Any model
that `fastbert.eliminate` takes can be searched; one that has learned with `length_drop` loses least.

Source: Kim and Cho 2021, "Length-Adaptive Transformer: Train Once with Length Drop, Use Anytime with Search",
sec. 3.3.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fastbert.analysis.measures import Measure
from fastbert.compression.elimination import check_whole, scheduled
from fastbert.compression.size import TOKENS, flops_of
from fastbert.models.base import PreTrainedModel
from fastbert.runtime import expected
from fastbert.tasks.examples import Examples

# The number of schedules to start with; shares have so many digits, and the smallest share is 1 in the last
_STARTS, _DIGITS = 20, 3


class Point(NamedTuple):
    """What a schedule costs and brings.

    Attributes:
        schedule: the share of the tokens that each layer keeps, as `fastbert.eliminate` takes it.
        cost: operations of all layers, as a share of those with all tokens.
        score: the score of the model with the schedule.
    """

    schedule: tuple[float, ...]
    cost: float
    score: float


def search_schedules(
    model: PreTrainedModel,
    score: Examples | Callable[[PreTrainedModel], float],
    *,
    pooling: str | None = None,
    lengths: Sequence[int] | None = None,
    rounds: int = 30,
    mutations: int = 30,
    crossovers: int = 30,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """The schedules of the best scores at their cost, the cheapest first; the last has the best score.

    A score is measured once per schedule: `rounds` · (`mutations` + `crossovers`) + 20 times at most.

    Args:
        model: a model that `fastbert.eliminate` takes, without a schedule. It is not changed.
        score: labelled examples, whose mean score counts (`fastbert.analysis.measures`); or a function of the
            model, where more is better.
        pooling: pooling of an encoder without a head, for examples: "mean", "cls", ….
        lengths: the tokens of typical texts, for the cost; None: those of the examples, or one of `TOKENS`.
        rounds: number of rounds.
        mutations, crossovers: new schedules per round.
        seed: of the draws; the same arguments find the same schedules.
        say: callback for a line per round.

    Raises:
        TypeError, ValueError: naming the argument, what came and what was expected.
    """
    expected.integers(0, rounds=rounds, mutations=mutations, crossovers=crossovers)
    if type(seed) is not int:
        raise TypeError(f"seed: expected an integer, got {seed!r}")
    if isinstance(score, Examples):
        measure = Measure.of(model, score, pooling)
        lengths = score.lengths.tolist() if lengths is None else lengths
    elif not callable(score):
        raise TypeError(f"score: expected Examples or a function, got {type(score).__name__}")
    elif pooling is not None:
        raise ValueError(f"pooling: expected None with a function as score, got {pooling!r}")
    else:
        measure = score
        lengths = [TOKENS] if lengths is None else lengths
    if not lengths or any(type(n) is not int or n < 1 for n in lengths):
        raise ValueError("lengths: expected integers >= 1, at least one")
    layers, draw = check_whole(model), random.Random(seed)
    least = 10**-_DIGITS
    whole, seen = flops_of(model, lengths, None), dict[tuple[float, ...], Point]()

    def rated(schedule: Iterable[float]) -> None:
        own = tuple(max(round(share, _DIGITS), least) for share in schedule)
        if own in seen:
            return
        with scheduled(model, own):
            found = float(measure.scores().mean() if isinstance(measure, Measure) else measure(model))
        if not math.isfinite(found):
            raise ValueError(f"score: expected a finite number, got {found} with the schedule {own}")
        seen[own] = Point(own, flops_of(model, lengths, own) / whole, found)

    for i in range(_STARTS):
        last = least ** (i / (_STARTS - 1))
        rated(last ** ((layer + 1) / layers) for layer in range(layers))
    for number in range(rounds):
        parents = frontier(seen.values())
        for _ in range(mutations):
            rated(mutated(draw.choice(parents).schedule, draw))
        for _ in range(crossovers if len(parents) > 1 else 0):
            pair = (point.schedule for point in draw.sample(parents, 2))
            rated(map(_mean, *pair))
        say(f"round {number + 1} of {rounds}: {len(seen):,} schedules, {len(frontier(seen.values()))} kept")
    return frontier(seen.values())


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points than which none is cheaper with as good a score, the cheapest first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda point: (point.cost, -point.score, point.schedule)):
        if not found or point.score > found[-1].score:
            found.append(point)
    return found


def mutated(schedule: Sequence[float], draw: random.Random) -> list[float]:
    """A schedule of which each share is drawn anew with probability 1/2; see the module."""
    shares = [1.0]
    for i, share in enumerate(schedule):
        after = schedule[i + 1] if i + 1 < len(schedule) else 0.0
        shares.append(draw.uniform(after, shares[-1]) if draw.random() < 0.5 else share)
    return shares[1:]


def within(points: Sequence[Point], cost: float) -> Point:
    """The point of the best score that costs no more.

    Args:
        points: as `search_schedules` returns them.
        cost: the largest cost, in (0, 1].

    Raises:
        ValueError: no point is as cheap.
    """
    found = [point for point in points if point.cost <= cost]
    if not found:
        raise ValueError(f"cost: expected at least {min(p.cost for p in points):.3f}, got {cost!r}")
    return found[-1]


def _mean(a: float, b: float) -> float:
    return (a + b) / 2
