"""Stages of masking: which unit an epoch has, and what the hash covers."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.pretraining.formats import DocSentences
from fastbert.pretraining.masking import Masking
from fastbert.pretraining.objectives.entities import Staged
from fastbert.pretraining.objectives.masked import Objective
from tests.support.objectives import numbered

STAGES = (("token", 0), ("word", 2), ("ngram", 3))


def objective(stages=STAGES, **values) -> Staged:
    return Staged(DocSentences(numbered(), 50, 0), stages=stages, **values)


@pytest.mark.parametrize(
    ("epoch", "unit"), [(0, "token"), (1, "token"), (2, "word"), (3, "ngram"), (4, "ngram"), (999, "ngram")]
)
def test_an_epoch_is_masked_by_its_stage(epoch, unit):
    ours = objective(masking=Masking(share=0.3, max_predictions=9), seed=4)
    stage = ours.stage(epoch)
    assert stage.masking == Masking(unit, share=0.3, max_predictions=9)
    plain = Objective(ours.format, Masking(unit, share=0.3, max_predictions=9), seed=4)
    plan = ours.plan(epoch)
    assert np.array_equal(plan.lengths, plain.plan(epoch).lengths)
    for index in range(10):
        one, other = ours.example(plan, epoch, index), plain.example(plan, epoch, index)
        for name in ("ids", "labels", "spans"):
            assert np.array_equal(getattr(one.masked, name), getattr(other.masked, name))


def test_masks_that_come_again_have_the_stage_of_their_epoch():
    ours = objective(static=2)
    plan = ours.plan(1)
    masked = [ours.example(plan, epoch, 3).masked for epoch in (1, 3, 5)]
    assert np.array_equal(masked[1].labels, masked[2].labels)  # both n-grams, of the draws of epoch 1
    ngrams = Objective(ours.format, Masking("ngram"), static=2)
    assert np.array_equal(masked[2].labels, ngrams.example(plan, 1, 3).masked.labels)
    assert not np.array_equal(masked[2].labels, masked[0].labels)
    assert ours.stage(5).masking.unit == "ngram"
    assert ours.stage(1).masking.unit == "token"
    plain = Objective(ours.format, Masking("token"), static=2)
    assert np.array_equal(masked[0].labels, plain.example(plan, 1, 3).masked.labels)


def test_the_hash_covers_the_stages():
    hashes = [
        objective().hash,
        objective((("token", 0), ("word", 1), ("ngram", 3))).hash,
        objective((("token", 0), ("word", 2))).hash,
        objective(masking=Masking(share=0.2)).hash,
        objective(seed=1).hash,
        objective(static=3).hash,
        Objective(objective().format).hash,
    ]
    assert len(set(hashes)) == len(hashes)
    # as a recipe's file has them
    assert objective([["token", 0], ["word", 2], ["ngram", 3]]).hash == hashes[0]


def test_ernies_stages():
    ours = Staged(DocSentences(numbered(), 50, 0))
    assert [ours.stage(epoch).masking.unit for epoch in range(4)] == ["word", "phrase", "entity", "entity"]


@pytest.mark.parametrize("stages", [(), None, (("token", 1),), (("token", 0), ("word", 0)), ((0, "token"),)])
def test_bad_stages_are_named(stages):
    with pytest.raises(ValueError, match="stages: expected pairs of a unit and its first epoch"):
        objective(stages)


def test_bad_rules_are_named():
    words = "masking: stages set the unit; expected the default unit, got 'word'"
    with pytest.raises(ValueError, match=words):
        objective(masking=Masking("word"))
    with pytest.raises(ValueError, match="unit: expected one of"):
        objective((("token", 0), ("letter", 1)))
    with pytest.raises(ValueError, match="choose: bernoulli"):
        objective(masking=Masking(choose="bernoulli"))
    with pytest.raises(ValueError, match="static: expected"):
        objective(static=0)
