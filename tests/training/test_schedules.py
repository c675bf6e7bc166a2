"""Learning rates: against transformers, by hand, at their ends."""

from __future__ import annotations

import pytest
import torch
import transformers

from fastbert.training.schedules import Schedule


@pytest.mark.parametrize("warmup", [0, 1, 7, 30])
@pytest.mark.parametrize("kind", ["linear", "constant"])
def test_equal_to_transformers(kind, warmup):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.25)
    theirs = (
        transformers.get_linear_schedule_with_warmup(optimizer, warmup, 30)
        if kind == "linear"
        else transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    )
    ours = Schedule(kind, 0.25, 30, warmup)
    for step in range(34):
        assert ours(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-15), step
        optimizer.step()
        theirs.step()


def test_googles_jump():
    rate = Schedule("linear-google", 1.0, 100, 10)
    assert [rate(s) for s in (0, 5, 9, 10, 50, 99, 100, 500)] == pytest.approx(
        [0, 0.5, 0.9, 0.9, 0.5, 0.01, 0, 0]
    )


def test_nvidias_square_root():
    rate = Schedule("poly", 6e-3, 7038, 0.2843)
    assert rate.warmup_steps == pytest.approx(2000.9, abs=0.1)
    assert rate(0) == pytest.approx(6e-3 / 2000.9, rel=1e-4)
    assert rate(3518) == pytest.approx(6e-3 * 0.5**0.5)
    assert rate(7037) == rate(9999) == 0
    assert Schedule("poly", 1.0, 4, power=1.0)(0) == 0.75


def test_mosaics_end():
    rate = Schedule("linear", 5e-4, 70_000, 0.06, final_share=0.02)
    assert rate(4200) == 5e-4
    assert rate(70_000) == rate(80_000) == pytest.approx(0.02 * 5e-4)
    assert rate(37_100) == pytest.approx(0.51 * 5e-4)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"kind": "cosine"}, "kind: expected one of constant, linear, linear-google, poly"),
        ({"steps": 0}, "steps: expected an integer >= 1, got 0"),
        ({"warmup": 11}, r"warmup: expected steps in \[0, 10\]"),
        ({"kind": "poly", "final_share": 0.1}, "final_share: only linear has it, got kind 'poly'"),
        ({"power": 1.0}, "power: only poly has it, got kind 'linear'"),
        ({}, "step: expected an integer >= 0, got -1"),
    ],
)
def test_bad_values_are_named(values, match):
    with pytest.raises(ValueError, match=match):
        Schedule(**{"kind": "linear", "lr": 0.1, "steps": 10, **values})(-1)
