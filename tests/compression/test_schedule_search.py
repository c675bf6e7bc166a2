"""The search of schedules: its frontier, its costs, and a task that needs few tokens."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
import torch

import fastbert
from fastbert.analysis.measures import Measure
from fastbert.compression.elimination import scheduled
from fastbert.compression.schedule_search import Point, frontier, mutated, search_schedules, within
from fastbert.compression.size import TOKENS, flops_of, size_of
from tests.compression.test_elimination import SCHEDULE, of

FEW = {"rounds": 2, "mutations": 3, "crossovers": 3}
MANY = {"rounds": 5, "mutations": 15, "crossovers": 15}


def wanted(model):
    """A score that is best with all tokens in layers 0 and 1, and a share of 0.3 in layer 2."""
    shares = model.config.token_schedule
    return shares[0] + shares[1] - abs(shares[2] - 0.3)


def test_flops_by_hand():
    model = of(schedule=SCHEDULE)
    h, f, counts = 48, 80, [10, 8, 5, 5, 2]
    whole = 4 * (10 * (8 * h * h + 4 * h * f) + 4 * 10 * 10 * h)
    assert flops_of(model, [10], None) == whole
    total = 0
    for n, kept in pairwise(counts):
        total += n * 6 * h * h + kept * (2 * h * h + 4 * h * f) + 4 * n * n * h
        total += 2 * n * n * h if kept < n else 0
    assert flops_of(model, [10], SCHEDULE) == total
    assert flops_of(model, [10, 1, 10], SCHEDULE) == 2 * total + flops_of(model, [1], None)
    assert size_of(model).flops == round(flops_of(model, [TOKENS], SCHEDULE) / TOKENS)
    assert size_of(fastbert.eliminate(model, None)).flops == flops_of(model, [TOKENS], None) // TOKENS


def test_frontier_and_budget():
    points = [Point((share,), cost, score) for share, cost, score in (
        (0.1, 0.1, 0.5), (0.2, 0.2, 0.5), (0.3, 0.3, 0.4), (0.4, 0.4, 0.9), (0.5, 0.4, 0.8), (0.6, 1.0, 0.95)
    )]  # fmt: skip
    found = frontier(reversed(points))
    assert [point.schedule[0] for point in found] == [0.1, 0.4, 0.6]
    assert [within(found, cost).schedule[0] for cost in (0.1, 0.39, 0.4, 1)] == [0.1, 0.1, 0.4, 0.6]
    with pytest.raises(ValueError, match=r"cost: expected at least 0\.100, got 0\.05"):
        within(found, 0.05)


def test_mutations_stay_between_their_neighbours():
    schedule, draw, changed = (0.9, 0.6, 0.6, 0.1), random.Random(0), [0] * 4
    for _ in range(400):
        shares = mutated(schedule, draw)
        assert all(a >= b for a, b in zip([1.0, *shares], shares, strict=False))
        assert all(new >= after for new, after in zip(shares, (*schedule[1:], 0.0), strict=True))
        changed = [n + (a != b) for n, a, b in zip(changed, shares, schedule, strict=True)]
    assert changed[2] > 0
    assert all(150 < n < 250 for n in (changed[0], changed[1], changed[3]))


def test_a_search_improves_what_it_starts_with():
    model, asked = of(schedule=None), []

    def score(given):
        asked.append(tuple(given.config.token_schedule))
        return wanted(given)

    start = search_schedules(model, score, lengths=[64], rounds=0)
    first = len(asked)
    assert first == 20
    assert asked[0] == (1.0,) * 4
    ratios = {b / a for a, b in zip((1.0, *asked[-1]), asked[-1], strict=False)}
    assert all(ratio == pytest.approx(0.001**0.25, rel=0.2) for ratio in ratios)
    said = []
    found = search_schedules(model, score, lengths=[64], **MANY, seed=3, say=said.append)
    assert model.config.token_schedule is None
    assert len(said) == 5
    assert 20 + 5 * 30 - 20 <= len(asked) - first <= 20 + 5 * 30
    assert len({*asked[first:]}) == len(asked) - first
    costs, scores = [point.cost for point in found], [point.score for point in found]
    assert costs == sorted(costs)
    assert scores == sorted({*scores})
    for point in found:
        with scheduled(model, point.schedule):
            assert point.score == wanted(model)
        assert point.cost == flops_of(model, [64], point.schedule) / flops_of(model, [64], None)
    for old in start:
        assert within(found, old.cost).score >= old.score
    assert scores[-1] > start[-1].score + 0.15
    again = search_schedules(model, wanted, lengths=[64], **MANY, seed=3)
    assert again == found
    assert search_schedules(model, wanted, lengths=[64], **MANY, seed=4) != found


def test_crossovers_are_means():
    model, asked = of(schedule=None), []

    def score(given):
        asked.append(tuple(given.config.token_schedule))
        return wanted(given)

    parents = search_schedules(model, score, lengths=[64], rounds=0)
    search_schedules(model, score, lengths=[64], rounds=1, mutations=0, crossovers=10)
    schedules = [point.schedule for point in parents]
    means = {
        tuple(round((x + y) / 2, 3) for x, y in zip(a, b, strict=True)) for a in schedules for b in schedules
    }
    assert len(asked) > 40
    assert {*asked[40:]} <= means
    # One schedule is better than all others, so it has no partner
    before = len(asked)
    (one,) = search_schedules(model, lambda m: -score(m), lengths=[64], rounds=1, mutations=0)
    assert one.schedule == schedules[0]
    assert len(asked) == before + 20


def test_examples_are_scored_by_their_measure(labelled):
    model = of(auto=fastbert.AutoModelForSequenceClassification, schedule=None, num_labels=3)
    found = search_schedules(model, labelled, **FEW)
    lengths = labelled.lengths.tolist()
    for point in found:
        with scheduled(model, point.schedule):
            assert point.score == Measure.of(model, labelled).scores().mean()
        expected = flops_of(model, lengths, point.schedule) / flops_of(model, lengths, None)
        assert point.cost == expected


def test_bad_arguments():
    model = of(schedule=None)
    for given, error, words in (
        ({"rounds": -1}, ValueError, "rounds: expected an integer >= 0"),
        ({"mutations": 1.0}, ValueError, "mutations: expected an integer >= 0"),
        ({"crossovers": True}, ValueError, "crossovers: expected an integer >= 0"),
        ({"seed": "a"}, TypeError, "seed: expected an integer"),
        ({"lengths": []}, ValueError, "lengths: expected integers >= 1"),
        ({"lengths": [3, 0]}, ValueError, "lengths: expected integers >= 1"),
        ({"pooling": "mean"}, ValueError, "pooling: expected None"),
    ):
        with pytest.raises(error, match=words):
            search_schedules(model, wanted, **given)
    with pytest.raises(TypeError, match="score: expected Examples or a function, got list"):
        search_schedules(model, [1])
    with pytest.raises(ValueError, match="score: expected a finite number, got nan"):
        search_schedules(model, lambda model: math.nan)
    with pytest.raises(ValueError, match="model: expected one without a token_schedule"):
        search_schedules(of(), wanted)
    with pytest.raises(ValueError, match="token_schedule: expected None, as modernbert"):
        search_schedules(fastbert.AutoModel.from_config(tiny("modernbert")), wanted)


def tiny(name):
    return fastbert.EncoderConfig(
        model_type=name, hidden_size=32, num_attention_heads=2, num_hidden_layers=2, intermediate_size=32
    )


def test_a_block_with_a_schedule_ends_as_it_began():
    model = of(schedule=SCHEDULE)
    ids = torch.arange(5, 15)[None]
    before = model(ids)[0]
    with pytest.raises(RuntimeError, match="inside"), scheduled(model, [1.0] * 4):
        raise RuntimeError("inside" if model.config.token_schedule == [1.0] * 4 else "without")
    assert model.config.token_schedule == SCHEDULE
    with pytest.raises(ValueError, match="fractions that do not rise"), scheduled(model, [0.1, 1, 1, 1]):
        pass
    assert model.config.token_schedule == SCHEDULE
    assert torch.equal(model(ids)[0], before)
