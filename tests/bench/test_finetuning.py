"""The benchmark of fine-tuning: its lengths, what it refuses to compare, and a run of the suite's file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.lib import finetuning
from bench.lib.engines import minilm_directory
from tests.support.benches import TINY, has, suite

pytestmark = pytest.mark.skipif(minilm_directory() is None, reason="needs MiniLM's tokenizer")
# task -> (mean tokens per example, the most)
LENGTHS = {"mrpc": (53, 128), "squad": (178.5, 384)}


@pytest.mark.parametrize("task", LENGTHS)
def test_examples_have_the_task_s_lengths(task, tmp_path):
    mixed, grouped = finetuning.prepared(tmp_path, TINY, task, 1)
    mean, most = LENGTHS[task]
    size = finetuning.WORKLOADS[task].batch_size
    for examples in (mixed, grouped):
        assert len(examples) == finetuning.TURN * size
        assert examples.lengths.mean() == pytest.approx(mean, rel=0.03)
        assert examples.lengths.max() <= most
    batches = grouped.lengths.reshape(-1, size)
    assert (np.ptp(batches, axis=1) < np.ptp(mixed.lengths) / 8).all()


def test_a_candidate_that_learns_otherwise_has_no_speed(monkeypatch):
    turn = {"seconds": 1.0, "cpu_seconds": 2.0, "peak_mib": 3.0, "loaded_mib": 1.0, "measured_by": "VmHWM"}
    names = ("fastbert-fp32", "transformers-fp32", "transformers_grouped-fp32")
    found = {name: {"lengths": (5, 9), "turns": [turn] * 3, "checked": [[0.5], [1.0]]} for name in names}
    found["fastbert-fp32"]["checked"] = [[0.5], [1.01]]
    found["transformers_grouped-fp32"] = {"error": "RuntimeError: no memory"}
    monkeypatch.setattr(finetuning, "measured", lambda *_: found)
    for memory in (False, True):
        rows = finetuning.bench_finetuning(TINY, "mrpc", wanted=names, memory=memory)
        ours, theirs, failed = rows
        assert "off by 0.01" in ours["incorrect"]
        assert "incorrect" not in theirs
        assert (failed["status"], failed["error"]) == ("error", "RuntimeError: no memory")
    assert theirs["above_mib"] == 2.0


@pytest.mark.sweep
def test_the_suite_s_file(tmp_path):
    if not has("transformers"):
        pytest.skip("needs transformers")
    written = tmp_path / "out.json"
    options = ["--samples", 2, "--dtype", "fp32", "--benchmark-json", written]
    done = suite("bench/suite/test_finetuning.py", *options, OMP_NUM_THREADS="2")
    data = json.loads(written.read_text())
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    groups = [entry["group"] for entry in data["benchmarks"]]
    assert {name: groups.count(name) for name in groups} == {f"finetuning-minilm-{t}": 3 for t in LENGTHS}
    assert all(entry["extra_info"]["correct"] for entry in data["benchmarks"])
    assert data["fastbert"]["without_a_time"] == []
    assert len(data["fastbert"]["memory"]) == 6
    assert all(row["above_mib"] > 0 for row in data["fastbert"]["memory"])
