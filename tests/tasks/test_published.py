"""The published scores, against the tasks and the averages that the paper prints."""

from __future__ import annotations

import numpy as np
import pytest

from fastbert.tasks.glue_tasks import TASKS
from fastbert.tasks.published import GLUE_AVERAGES, PUBLISHED


def test_each_row_is_of_a_split_and_of_a_metric_of_its_task():
    for row in PUBLISHED:
        if row.task in TASKS:
            assert row.split in TASKS[row.task].files
            assert set(row.scores) <= set(TASKS[row.task].metrics)
    keys = [row[:3] for row in PUBLISHED]
    assert len(set(keys)) == len(keys) == 5 * 9 + 2 * 8 + 19 + 12 + 24 + 3 * 7


def test_averages_are_those_of_the_rows():
    for model, average in GLUE_AVERAGES.items():
        rows = [r for r in PUBLISHED if r.task in TASKS and r.model == model and r.split.startswith("test")]
        assert np.mean([score for row in rows for score in row.scores.values()]) == pytest.approx(
            average, abs=0.07
        )
